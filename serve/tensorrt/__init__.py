"""Serves from a TensorRT plan: the library, the GPU's memory, the cache on it, and the runner.

Start with `runner.py`, which implements `serve/runner/protocol.py`.
"""
