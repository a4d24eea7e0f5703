"""Reads samples from files and turns them into batches of token ids.

Start with `inputs.py`.
"""
