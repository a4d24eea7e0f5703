"""Measures what quantization costs: sensitivity, precision budgets and the accuracy gate.

`divergence.py` compares a quantized model with the original.
"""
