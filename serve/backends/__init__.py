"""Backends, which generate tokens: the embedded engine, vLLM over HTTP, Triton over gRPC.

`base.py` is their interface: a `GenerateRequest` goes in, an iterator of events comes out.
"""
