"""Hostile backends and clients against a gateway in a process of its own.

In: tables of what an upstream sends (`upstreams.py`) and of what a client sends (`clients.py`).
Out: for each case the same invariants, checked by `runner.py`. `python -m tests.hostile` mutates
the cases for as long as one likes.
"""
