"""Checks what the stages wrote (files) and what servers do with it.

`artifact.py` is `octet verify` of a directory, `server/verify.py` that of a URL.
"""
