"""Loads a checkpoint as a transformers model and runs it one decoder layer at a time.

Start with `layers.py`; `partial.py` runs the layers from one on.
"""
