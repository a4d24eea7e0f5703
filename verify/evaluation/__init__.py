"""Compares models on text: perplexity, divergence and tasks.

`evaluator.py` scores the targets; `comparison.py` is the result.
"""
