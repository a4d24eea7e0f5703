"""A gateway over one fake backend, for tests that look at it without serving."""

from typing import Any

from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.routing import Pool
from tests.fakes import FakeRunner, fake_backend


def busy_gateway(**admission: Any) -> Gateway:
    """The model `m` on the pool `main`, in FP8; `admission` are that pool's settings."""
    url = "http://replaced"
    pool = {
        "precision": "fp8",
        "backends": [{"type": "vllm", "url": url}],
        "admission": admission,
    }
    config = GatewayConfig.model_validate(
        {
            "tiers": {"standard": {"max_kl": 0.05}},
            "pools": {"main": pool},
            "models": {"m": {"pool": "main"}},
        }
    )
    made = Pool.of("main", [fake_backend(FakeRunner())], config.pools["main"])
    return Gateway(config, {"main": made})
