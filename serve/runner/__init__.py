"""Defines the embedded engine's interface to a runner, and runs ONNX exports on the CPU.

`protocol.py` is the interface: token ids go in, logits come out, keys and values stay in a cache.
"""
