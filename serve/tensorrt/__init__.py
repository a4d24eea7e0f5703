"""Serving from a TensorRT plan: its library, the GPU's memory, the cache there, and the runner."""
