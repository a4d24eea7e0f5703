"""Defines number formats, their bits, and how values are scaled and rounded to them.

Start with `formats.py` and `scaling.py`.
"""
