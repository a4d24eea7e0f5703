"""Backends, which generate tokens: the embedded engine, vLLM over HTTP, Triton over gRPC."""
