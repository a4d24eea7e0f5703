"""`octet golden`: makes a proof pack for a checkpoint that another tool quantized.

A *proof pack* holds what proves a server of that checkpoint, and no weights: golden records of the
original, what each way of serving the checkpoint would answer, faults included, and the hashes of
both. It joins two stages: the reader of `verify` decodes the checkpoint, `calibrate` simulates.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from octet.artifacts.manifest import Manifest, check_destination, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.artifacts.serving_path import power_text
from octet.artifacts.signature import private_key, sign
from octet.errors import CheckpointError, UnsupportedError
from octet.model.checkpoint import Checkpoint, sha256_file
from octet.model.not_a_checkpoint import explain_missing
from octet.model.spec import ModelSpec
from octet.progress import progress_bar
from octet.recipe import KvCacheDtype
from verify.checks.checkpoint import verify_checkpoint
from verify.checks.findings import Problem, Verification
from verify.checks.names import FUSED
from verify.checks.original import Original
from verify.checks.side_files import other_sizes
from verify.reader.checkpoint import Written

if TYPE_CHECKING:
    from calibrate.samples.inputs import Prompts
    from calibrate.simulate.predict import Prediction
    from octet.artifacts.golden import GoldenSet
    from verify.stored_recipe import StoredRecipe

__all__ = ["PackOptions", "Pair", "open_pair", "write_pack"]

_CODES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """The options of `octet golden`."""

    original: Path
    quantized: Path
    samples: Path
    out: Path
    kv_cache: KvCacheDtype | None = None  # None: as the checkpoint declares
    name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    text_field: str = "text"
    messages_field: str = "messages"
    sign: Path | None = None  # the private key
    force: bool = False


@dataclass(frozen=True)
class Pair:
    """An original checkpoint, and what another tool made of it; headers have been read."""

    original: Checkpoint
    written: Written

    @property
    def kv_cache(self) -> KvCacheDtype:
        """The cache that engines make of this checkpoint by themselves."""
        quantization = self.written.quantization
        return "e4m3" if quantization is not None and quantization.kv_scheme else "float16"


def open_pair(options: PackOptions) -> Pair:
    """Opens both checkpoints; raises an OctetError for what cannot work. Reads no tensor."""
    if options.sign is not None:
        private_key(options.sign)
    original, quantized = options.original, options.quantized
    check_destination(
        options.out, force=options.force, inputs=[original, quantized, options.samples]
    )
    checkpoint = Checkpoint.open(original)
    if checkpoint.spec.generic:
        raise UnsupportedError(
            f"{original}: Octet does not know {checkpoint.spec.architecture}, and cannot simulate"
            " how it is served"
        )
    if not quantized.exists():
        raise explain_missing(quantized)
    written = Written.open(quantized)
    if written.quantization is None and not any(
        written.dtype(name) in _CODES for name in written.names
    ):
        raise CheckpointError(
            f"{quantized}: not a quantized checkpoint: config.json declares no quantization and no"
            " tensor holds codes; `octet calibrate` and `octet export` make one of it"
        )
    _require_same_model(checkpoint.spec, written, original)
    return Pair(checkpoint, written)


def write_pack(pair: Pair, options: PackOptions, *, console: Console | None = None) -> Manifest:
    """Writes the proof pack to `options.out` and returns its manifest.

    Raises CheckpointError if the checkpoint is damaged, or not made from the original, and
    ConfigError if a GPU is requested and there is none.
    """
    from calibrate.decoder.loading import resolve_device
    from calibrate.decoder.weights import LayerWeights
    from calibrate.golden import described, examined, golden_set
    from calibrate.samples.inputs import read_prompts
    from calibrate.simulate.predict import expected_divergence
    from verify.next_tokens import written_weight
    from verify.stored_recipe import stored_recipe

    device = resolve_device(options.device)
    checkpoint, written = pair.original, pair.written
    warnings = _require_sound(pair, console)
    stored = stored_recipe(written, checkpoint.spec, options.kv_cache or pair.kv_cache)
    prompts = read_prompts(checkpoint, options.samples, options.text_field, options.messages_field)
    weights = LayerWeights(checkpoint, device)
    chosen = prompts.chosen
    total = sum(len(ids) for _, ids in chosen.prompts)
    with progress_bar(console, "Golden records", total) as advance:
        golden = golden_set(
            checkpoint, chosen.prompts, device=device, weights=weights, advance=advance
        )
    golden = described(golden, prompts.scope, chosen.lists)
    prediction = expected_divergence(
        checkpoint,
        stored.recipe,
        stored.scales,
        golden,
        weights=lambda name: written_weight(written, name),
        weight_only=stored.weight_only,
        device=device,
        layers=weights,
        console=console,
    )
    assert prediction is not None  # the architecture is known
    power = prediction.expected.power
    found = {"examined": examined(golden), "power": power_text(power) if power else ""}
    return _write(pair, options, stored, prompts, golden, prediction, found, warnings)


def _write(
    pair: Pair,
    options: PackOptions,
    stored: "StoredRecipe",
    prompts: "Prompts",
    golden: "GoldenSet",
    prediction: "Prediction",
    found: Mapping[str, str],
    warnings: Sequence[str],
) -> Manifest:
    cache, written = stored.recipe.kv_cache, pair.written
    hashed = {file.path for file in written.files.values()} | {written.path / "config.json"}
    expected = {
        item.path.label: {"low": item.low, "mean": item.mean, "high": item.high}
        for item in prediction.expected.expectations
        if item.path.kv_cache == cache
    }
    manifest = Manifest(
        kind="pack",
        model=ModelIdentity.of(pair.original, options.name),
        recipe=stored.recipe,
        details={
            "source": str(options.original.absolute()),
            "kv_cache": cache,
            "format": _format(written),
            "weight_only": stored.weight_only,
            "checkpoint": {
                "name": written.path.resolve().name,
                "files": {path.name: sha256_file(path) for path in sorted(hashed)},
            },
            "held_out": prompts.facts,
            "expected_divergence": expected,
            **found,
            "predicted": True,
            "warnings": [*warnings, *prompts.warnings, *prediction.expected.warnings],
        },
        software=software("numpy", "torch", "transformers", "tokenizers"),
    )
    with write_artifact(options.out, force=options.force, kind="pack") as writer:
        golden.save(writer.path)
        prediction.expected.save(writer.path)
        prediction.scenarios.save(writer.path)
        for file in pair.original.side_files:  # what clients get by default is compared with them
            shutil.copyfile(file, writer.path / file.name)
        manifest = writer.finish(manifest)
        if options.sign is not None:
            sign(writer.path, private_key(options.sign))
        return manifest


def _format(written: Written) -> str:
    assert written.quantization is not None
    labels = dict.fromkeys(group.stored.label for group in written.quantization.groups)
    return f"{written.quantization.dialect}: {', '.join(labels)}"


def _require_same_model(spec: ModelSpec, written: Written, original: Path) -> None:
    """Raises CheckpointError if the configurations describe different models."""
    differ = other_sizes(spec, written.config, str(written.path))
    if differ:
        raise CheckpointError(
            f"{written.path}: not made from {original}: in its config.json, {differ[0]}"
        )


def _require_sound(pair: Pair, console: Console | None) -> list[str]:
    """Verifies every tensor against the original, and returns warnings.

    Raises CheckpointError naming the first that is wrong.
    """
    written, original = pair.written, Original(pair.original)
    found = Verification(written.path, "checkpoint", "", made_by="others")
    total = sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in original.shapes.values()
    )
    with progress_bar(console, "Comparing", total, "weights", transient=True) as advance:
        verify_checkpoint(written.path, None, original, found, advance)
    # A right engine keeps the scales of fused linears apart: what others do is simulated.
    fused = [problem for problem in found.problems if FUSED in problem.what]
    wrong = [problem for problem in found.problems if problem not in fused]
    if wrong:
        raise CheckpointError(_refusal(wrong, pair))
    return [f"{problem}" for problem in fused]


def _refusal(wrong: Sequence[Problem], pair: Pair) -> str:
    first = wrong[0]
    path, original = pair.written.path, pair.original.path
    why = ""
    if first.check in ("numbers", "copies"):
        why = f"; it is damaged, or {original} is not its original"
    if first.check == "scales" and ".experts." in first.where:
        why = (
            "; an expert that no calibration sample reached? Quantize again with more samples, or"
            " with all experts calibrated"
        )
    rest = f" (and {len(wrong) - 1} more: octet verify {path} --model {original})"
    return f"{path}: {first}{why}{rest if len(wrong) > 1 else ''}"
