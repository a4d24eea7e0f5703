"""calibration + checkpoint → checkpoint | ONNX decoder | engine | Triton entry.

One module each, imported by whoever needs it: `export.checkpoint.write`, `export.onnx.write`,
`export.engine.build` and `export.triton.write`.
"""
