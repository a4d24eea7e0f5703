"""The gateway's configuration: one YAML file."""

from serve.config.access import Access, Admin, KeyConfig
from serve.config.backends import BackendConfig, EmbeddedConfig, HttpConfig, TritonConfig
from serve.config.gateway import GatewayConfig, Limits, Listen, Logs, Traces
from serve.config.models import Canary, ModelConfig, Shadow
from serve.config.pools import (
    Admission,
    DnsDiscovery,
    Ejection,
    FileDiscovery,
    Health,
    PoolConfig,
    Retries,
    Routing,
    Timeouts,
)
from serve.config.proof import Proof, Tier

__all__ = [
    "Access",
    "Admin",
    "Admission",
    "BackendConfig",
    "Canary",
    "DnsDiscovery",
    "Ejection",
    "EmbeddedConfig",
    "FileDiscovery",
    "GatewayConfig",
    "Health",
    "HttpConfig",
    "KeyConfig",
    "Limits",
    "Listen",
    "Logs",
    "ModelConfig",
    "PoolConfig",
    "Proof",
    "Retries",
    "Routing",
    "Shadow",
    "Tier",
    "Timeouts",
    "Traces",
    "TritonConfig",
]
