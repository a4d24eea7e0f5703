"""Configures a Triton for tests, with a long timeout: gRPC's threads use the machine's clock."""

from typing import Any

from serve.config import TritonConfig

__all__ = ["triton_at"]


def triton_at(url: str, **settings: Any) -> TritonConfig:
    return TritonConfig.model_validate(
        {"type": "triton", "url": url, "connect_timeout_s": 60} | settings
    )
