"""Sends golden prompts to a running server and judges its answers.

`verify.py` implements `octet verify URL`.
"""
