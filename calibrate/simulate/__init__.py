"""Computes what each way of serving a quantized model would answer, correct or faulty.

`predict.py` runs all serving paths; `model.py` simulates one.
"""
