"""Runs ONNX exports with ONNX Runtime.

Start with `runner.py`.
"""
