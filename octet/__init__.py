"""Octet's shared vocabulary: formats, scales, recipes, artifacts, golden records, errors.

Imports no other package of this repository, and no GPU library at import time.
"""

__version__ = "0.2.0"
