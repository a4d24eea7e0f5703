"""Checkpoint and samples in, calibration out: exact histograms, scales and golden records."""

from calibrate.pipeline import run

__all__ = ["run"]
