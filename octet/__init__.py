"""Octet's shared vocabulary: formats, scales, recipes, artifacts, golden records, errors.

Imports nothing else of ours, and no GPU library at import time.
"""

__version__ = "0.1.0"
