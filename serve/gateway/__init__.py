"""Holds the state of the gateway that outlasts reloads.

Start with `state.py`.
"""
