"""calibration + checkpoint → checkpoint | ONNX decoder | engine | Triton entry.

One module each, imported by whoever needs it: `export.checkpoint`, `export.onnx`, `export.engine`
and `export.triton`.
"""
