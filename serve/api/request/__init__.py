"""Handles one request from its key to its last byte.

Start with `exchange.py`; `attempts.py` sends it to backends.
"""
