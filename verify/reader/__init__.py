"""Decodes what the exporter wrote, sharing no code with it.

`checkpoint.py` reads a quantized checkpoint, `onnx.py` a graph.
"""
