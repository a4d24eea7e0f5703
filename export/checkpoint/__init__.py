"""Writes quantized checkpoints: compressed-tensors, ModelOpt and fp8.

`write.py` writes the files; `layout.py` declares what each format must provide.
"""
