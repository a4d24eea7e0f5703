"""Generates text in this process: scheduling, sampling, tokenizing.

Start with `engine.py`.
"""
