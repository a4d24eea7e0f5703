"""Sends golden prompts to a running server and judges its answers.

`verify.py` is `octet verify` of a URL.
"""
