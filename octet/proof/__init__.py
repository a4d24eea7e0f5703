"""Decides whether a server's answers match its declared configuration.

Needs numpy alone. Start with `judge.py`.
"""
