"""Calibrates a checkpoint on samples: exact histograms, scales and golden records."""

from calibrate.pipeline import progress_directory, run

__all__ = ["progress_directory", "run"]
