"""Reads and writes artifacts: the directories with a manifest that stages exchange.

Start with `manifest.py`.
"""
