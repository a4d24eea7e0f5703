"""Holds the state of the gateway that lives across reloads.

Start with `state.py`.
"""
