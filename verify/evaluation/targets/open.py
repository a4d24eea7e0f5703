"""Opens the arguments of `octet evaluate`, each kind of target with its own stage."""

from collections.abc import Callable, Sequence
from pathlib import Path

from octet.artifacts.manifest import PLAN_FILE
from octet.errors import BackendError, ConfigError, UnsupportedError
from octet.interrupts import held_back
from octet.model.checkpoint import Checkpoint
from octet.model.gpt_oss import is_mxfp4
from octet.storage.files import read_json
from verify.evaluation.sequences import Sequences, read_texts
from verify.evaluation.target import Target

__all__ = ["is_export", "open_target", "read_samples"]


def open_target(name: str, api_key_env: str | None, concurrency: int) -> Target:
    """Opens a server by its URL, an export or engine by its directory, or else a checkpoint."""
    if name.startswith(("http://", "https://")):
        from verify.evaluation.targets.server import Server

        return Server(name, api_key_env=api_key_env, concurrency=concurrency)
    if "://" in name:
        raise UnsupportedError(
            f"{name}: only servers with OpenAI's API (http://host:port) return log-probabilities"
            " of a prompt; for a Triton server, evaluate the export or engine that it serves"
        )
    path = Path(name)
    if is_export(path):
        with held_back():
            from verify.evaluation.targets.export import Export

        return Export(path)
    if _quantized(path):
        raise UnsupportedError(
            f"{name}: is quantized, and transformers would not compute it as an engine does: serve"
            " it (vLLM) and give http://host:port, or evaluate an ONNX export of its calibration"
        )
    Checkpoint.open(path)  # refuses a directory that is none, before torch is loaded
    with held_back():
        from calibrate.decoder.arithmetic import fit_threads
        from verify.evaluation.targets.checkpoint import CheckpointTarget

    fit_threads()
    return CheckpointTarget(path)


def read_samples(
    targets: Sequence[Target],
    path: Path,
    *,
    count: int | None,
    text_field: str,
    max_length: int,
) -> Sequences:
    """Tokenizes the samples by the first of `targets` that can, cut to a length that all support.

    A checkpoint reads every format that `calibrate` does, the others JSONL texts. Raises
    ConfigError if none of them has a tokenizer.
    """
    length = min([max_length, *(t.longest for t in targets if t.longest is not None)])
    for target in targets:
        if hasattr(target, "sequences"):
            found: Sequences = target.sequences(
                path, count=count, text_field=text_field, max_length=length
            )
            return found
    for target in targets:
        if target.encode("a") is not None:
            return read_texts(
                path, _encoder(target), count=count, text_field=text_field, max_length=length
            )
    raise ConfigError(
        f"{targets[0].name}: has no /tokenize to split the samples into tokens: give --reference,"
        " whose tokenizer is used then"
    )


def _encoder(target: Target) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        ids = target.encode(text)
        if ids is None:
            raise BackendError(f"{target.name}: no longer tokenizes texts (/tokenize)")
        return ids

    return encode


def _quantized(path: Path) -> bool:
    """Decides whether config.json declares a quantization; opening reports an unreadable file.

    gpt-oss's MXFP4 does not count as one: engines multiply by the decoded weights.
    """
    try:
        config = read_json(path / "config.json")
        declares = isinstance(config, dict) and "quantization_config" in config
        return declares and not is_mxfp4(config)
    except (OSError, ValueError, TypeError):
        return False


def is_export(path: Path) -> bool:
    return any((path / name).exists() for name in ("model.onnx", PLAN_FILE))
