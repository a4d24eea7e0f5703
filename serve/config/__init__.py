"""The gateway's configuration: one YAML file, checked as a whole before anything starts.

`load.py` reads the file; `gateway.py` is its top level.
"""

from serve.config.access import Access, KeyConfig, SharedConfig
from serve.config.backends import (
    BackendConfig,
    EmbeddedConfig,
    HttpConfig,
    ManagedConfig,
    TritonConfig,
)
from serve.config.gateway import GatewayConfig, Limits, Logs, Traces
from serve.config.models import CaptureConfig, ModelConfig, Shadow
from serve.config.pools import (
    DnsDiscovery,
    Ejection,
    FileDiscovery,
    Health,
    PoolConfig,
    Retries,
    Routing,
)
from serve.config.proof import Judge, Proof, Tier
from serve.config.ray import RayConfig, RayEngines

__all__ = [
    "Access",
    "BackendConfig",
    "CaptureConfig",
    "DnsDiscovery",
    "Ejection",
    "EmbeddedConfig",
    "FileDiscovery",
    "GatewayConfig",
    "Health",
    "HttpConfig",
    "Judge",
    "KeyConfig",
    "Limits",
    "Logs",
    "ManagedConfig",
    "ModelConfig",
    "PoolConfig",
    "Proof",
    "RayConfig",
    "RayEngines",
    "Retries",
    "Routing",
    "Shadow",
    "SharedConfig",
    "Tier",
    "Traces",
    "TritonConfig",
]
