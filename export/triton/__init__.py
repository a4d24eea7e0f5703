"""Writes the entries of a Triton model repository.

Start with `write.py`.
"""
