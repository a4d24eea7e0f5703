"""Where a Triton is, for tests: gRPC's threads go by the machine's clock, whatever holds it up."""

from typing import Any

from serve.config import TritonConfig

__all__ = ["triton_at"]


def triton_at(url: str, **settings: Any) -> TritonConfig:
    return TritonConfig.model_validate(
        {"type": "triton", "url": url, "connect_timeout_s": 60} | settings
    )
