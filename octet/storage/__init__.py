"""Reads and writes safetensors files, JSON documents and checksums.

Start with `tensors.py` and `files.py`.
"""
