"""Makes the gateway's settings from what `octet serve` was given; loads no web server."""

from pathlib import Path

from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError
from serve.config import EmbeddedConfig, GatewayConfig, ModelConfig, PoolConfig
from serve.config.checks import load_config

__all__ = ["settings_of"]


def settings_of(target: Path | None, config: Path | None) -> GatewayConfig:
    """Returns the settings in file `config`, or those that serve the export `target`.

    The export gets its model's name. Raises an OctetError for a file or a directory that cannot be
    served.
    """
    if config is not None:
        return load_config(config)
    if target is None:
        raise ConfigError("nothing to serve: give an export or a configuration file")
    # Fails early for a directory of another kind; the runner verifies its hashes.
    manifest = Manifest.load(target, verify=False)
    if manifest.kind not in ("onnx", "engine"):
        raise ConfigError(
            f"{target}: is a {manifest.kind}; what is served here is an ONNX export or an engine"
        )
    name = manifest.model.name
    embedded = EmbeddedConfig(type="embedded", path=target)
    return GatewayConfig(models={name: ModelConfig(pool=PoolConfig(backends=(embedded,)))})
