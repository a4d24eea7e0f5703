"""Computes the logits of a quantized model under each scenario, correct or faulty.

`predict.py` runs all serving paths; `model.py` simulates one.
"""
