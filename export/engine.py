"""calibration + checkpoint → a TensorRT engine: FP8 weights and inputs, an E5M2 cache.

manifest.json, model.plan, config.json, tokenizer, golden.json
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from export import tensorrt
from export.engine_graph import build_engine_graph
from export.graph import OPSET, Graph
from export.source import Source, require_space
from octet.artifact import Manifest, check_destination, write_artifact
from octet.errors import ExportError
from octet.model import ModelSpec

__all__ = ["MAX_BATCH", "PLAN_FILE", "build_engine", "profiles_of"]

PLAN_FILE = "model.plan"
MAX_BATCH = 16  # sequences in a decoding step
MAX_LOGITS = 128  # positions with logits in a prefill: float32 [L, V] each
STATUS = "built, unproven: compiled without a GPU; it has not generated the golden continuations"


def build_engine(
    calibration: Path,
    out: Path,
    *,
    model: Path | None = None,
    targets: list[str],
    force: bool = False,
    console: Console | None = None,
) -> Manifest:
    """Writes the engine directory `out`; `model` overrides where the checkpoint is.

    `targets` are compute capabilities such as "sm89". Raises UnsupportedError for a target or a
    recipe that cannot be built, ExportError for a graph that TensorRT-RTX refuses or would run
    other than written.
    """
    targets = tensorrt.check_targets(targets)
    check_destination(out, force=force, inputs=[calibration])
    source = Source.open(calibration, model)
    graph = build_engine_graph(source)
    tensorrt.load()
    require_space(out, (1 + len(targets)) * graph.weight_bytes)
    profiles = profiles_of(source.spec)
    with write_artifact(out, force=force) as writer:
        source.copy_side_files(writer.path)
        plan = _build(graph, profiles, targets, writer.path, console)
        _check_precision(plan, source)
        (writer.path / PLAN_FILE).write_bytes(plan.data)
        details = {
            "status": STATUS,
            "targets": targets,
            "builder": {"name": tensorrt.NAME, "version": plan.version},
            "profiles": profiles,
            "opset": OPSET,
            "kv_cache": {
                "dtype": "e5m2",
                "input": "uint8 codes",
                "new_rows": "float16, rounded to E5M2 values: the code is the top byte",
            },
            "precision": {"of": "the parsed network, not the engine"} | asdict(plan.network),
        }
        return writer.finish(source.manifest("engine", details, "onnx", "tensorrt_rtx"))


def profiles_of(spec: ModelSpec) -> dict[str, tensorrt.Profile]:
    """Shapes of each input: `prefill` runs one sequence, `decode` one new token of each of 16.

    The cache may be empty. Its window and the new tokens may each have the model's length, which
    together is more than a sequence has, since a profile cannot bound their sum.
    """
    longest = spec.max_positions
    usual = min(512, longest)
    logits = min(MAX_LOGITS, longest)
    # (B, T, S, L): sequences, new tokens, cached slots, positions with logits.
    prefill = ((1, 1, 0, 1), (1, usual, 0, 1), (1, longest, longest, logits))
    decode = ((1, 1, 0, 1), (4, 1, usual, 1), (MAX_BATCH, 1, longest, 1))
    return {"prefill": _profile(spec, prefill), "decode": _profile(spec, decode)}


_Sizes = tuple[int, int, int, int]


def _profile(spec: ModelSpec, sizes: tuple[_Sizes, _Sizes, _Sizes]) -> tensorrt.Profile:
    smallest, usual, largest = (_shapes(spec, *size) for size in sizes)
    return {name: (smallest[name], usual[name], largest[name]) for name in smallest}


def _shapes(spec: ModelSpec, batch: int, tokens: int, slots: int, logits: int) -> dict[str, Any]:
    cache = (batch, spec.kv_heads, slots, spec.head_dim)
    return {
        "input_ids": (batch, tokens),
        "position_ids": (batch, tokens),
        "attention_mask": (batch, 1, tokens, slots + tokens),
        "logit_positions": (batch, logits),
        **{
            f"past_key_values.{index}.{kind}": cache
            for index in range(spec.layers)
            for kind in ("key", "value")
        },
    }


def _build(
    graph: Graph,
    profiles: dict[str, tensorrt.Profile],
    targets: list[str],
    beside: Path,
    console: Console | None,
) -> tensorrt.Plan:
    """The plan of `graph`; the ONNX file exists only meanwhile, in the directory `beside`."""
    with tempfile.TemporaryDirectory(prefix="onnx.", dir=beside) as directory:
        return tensorrt.build_plan(graph.save(Path(directory)), profiles, targets, console)


def _check_precision(plan: tensorrt.Plan, source: Source) -> None:
    """Raises ExportError unless every linear that the recipe quantizes is an FP8 product."""
    wanted = len(source.quantized_linears())
    if plan.network.fp8_matmuls != wanted:
        raise ExportError(
            f"{tensorrt.NAME} {plan.version} parsed {plan.network.fp8_matmuls} FP8 products where"
            f" recipe {source.recipe.name} has {wanted}; report this with the model's config.json"
        )
