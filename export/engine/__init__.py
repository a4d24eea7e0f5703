"""Builds TensorRT and TensorRT-RTX engines from ONNX graphs.

Start with `build.py`.
"""
