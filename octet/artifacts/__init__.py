"""Reads and writes what the stages hand to each other: directories with a manifest.

Start with `manifest.py`.
"""
