"""Writes the decoder as an ONNX graph, and its variant for TensorRT.

`write.py` writes an export; `decoder.py` builds the graph.
"""
