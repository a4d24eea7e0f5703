"""Calibrates a checkpoint on samples: exact histograms, scales and golden records.

Takes `Options` (`options.py`) and writes a calibration; `pipeline.py` has the steps in order.
"""
