"""Where tokens come from: the embedded engine, vLLM over HTTP, Triton over gRPC."""
