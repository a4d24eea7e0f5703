"""Describes a checkpoint: its architecture, its linears and its tensors.

`checkpoint.py` opens one; `spec.py` is the description.
"""
