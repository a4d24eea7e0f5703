"""TensorRT's Python API by version, as its bindings declare it; extract.py writes the list."""

from pathlib import Path

__all__ = ["LISTED", "SIGNATURES"]

SIGNATURES = Path(__file__).parent / "signatures.txt"
# The oldest release that Octet works with, the last of 10, the newest, and TensorRT-RTX's.
LISTED = {
    "a": ("tensorrt_cu13_bindings", "10.13.3.9"),
    "b": ("tensorrt_cu13_bindings", "10.16.1.11"),
    "c": ("tensorrt_cu13_bindings", "11.4.0.106"),
    "d": ("tensorrt_rtx_cu13_bindings", "1.7.1.116"),
}
