"""Verifies a checkpoint directory, written by Octet, llm-compressor, ModelOpt or another tool."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octet.artifacts.manifest import Manifest
from octet.errors import CheckpointError
from octet.model.spec import ModelSpec, refuse_more_than_stored
from verify.checks.cache import cache_of, check_cache_scales, check_cache_scheme
from verify.checks.findings import Verification
from verify.checks.names import Names, check_names
from verify.checks.numbers import measure
from verify.checks.original import Original
from verify.checks.scheme import check_calibrated_scales, check_recipe
from verify.checks.tensors import compare_copies, judge, row_of
from verify.reader.checkpoint import Written
from verify.reader.scheme import Stored

__all__ = ["verify_checkpoint"]

Advance = Callable[[int], None]
_CODES = ("U8", "F8_E4M3")


def verify_checkpoint(
    path: Path,
    manifest: Manifest | None,
    original: Original | None,
    found: Verification,
    advance: Advance = lambda elements: None,
) -> Written | None:
    """Checks the checkpoint at `path` and adds to `found`; None if it cannot be read."""
    try:
        written = Written.open(path)
    except CheckpointError as error:
        found.problem("files", str(path.name), str(error))
        return None
    spec = _spec(written, manifest, original)
    found.format = _format(written)
    shapes = original.shapes if original is not None else dict(spec.tensor_shapes())
    linears = _linears(written, shapes, spec)
    if _undeclared(written, linears, found):
        return written  # all further checks would report the same
    names = check_names(
        written, shapes.keys(), linears, _fused(spec), found, ours=manifest is not None
    )
    exported = manifest.details.get("kv_cache") if manifest is not None else None
    cache = cache_of(written, manifest.recipe.kv_cache if manifest is not None else None, exported)
    check_cache_scheme(written, exported, found)
    check_cache_scales(written, names, cache, original, found)
    check_calibrated_scales(written, names, original, found)
    _check_second_opinion(written, linears, found)
    if manifest is not None:
        check_recipe(written, names, manifest, spec, found)
    if original is not None:
        _Comparison(written, original, spec, manifest is not None, found).run(names, advance)
    return written


@dataclass
class _Comparison:
    written: Written
    original: Original
    spec: ModelSpec
    ours: bool
    found: Verification

    def run(self, names: Names, advance: Advance) -> None:
        for module, group in names.quantized.items():
            self._quantized(module, group.stored)
            advance(int(np.prod(self.original.shapes[f"{module}.weight"])))
            self._release()
        for name in names.plain:
            self._copied(name)
            advance(int(np.prod(self.original.shapes.get(name, ()))))
        self._release()

    def _release(self) -> None:
        self.written.release()
        self.original.release()

    def _quantized(self, module: str, stored: Stored) -> None:
        tensor = f"{module}.{stored.weight}"
        try:
            coded = self.written.coded(module, stored)
        except ValueError as error:
            self.found.problem("numbers", tensor, str(error))
            return
        reference = self.original.weight(module)
        if reference.shape != coded.codes.shape:
            self.found.problem(
                "numbers",
                tensor,
                f"is [N, K] = {list(coded.codes.shape)}, the original {list(reference.shape)}",
            )
            return
        numbers = measure(coded, reference, stored.scale_format)
        self.found.rows.append(row_of(tensor, stored.label, numbers))
        others = self.original.others(module, self.spec)
        why = judge(coded, reference, numbers, ours=self.ours, others=others)
        if why is not None:
            self.found.problem("numbers", tensor, why)

    def _copied(self, name: str) -> None:
        """Checks that a tensor which is not quantized equals the original's, bit for bit."""
        if name not in self.written:
            if name == "lm_head.weight" and self.spec.tied_embeddings:
                return
            if not name.endswith("rotary_emb.inv_freq"):
                self.found.problem("names", name, "missing: the original has it")
            return
        if name not in self.original.shapes:
            return
        hint = self._hint()
        before, after = self.original.read(name), self.written.read(name)
        compare_copies(name, before, after, self.found, hint, self._release)

    def _hint(self) -> str:
        if self.original.calibration is not None:
            return ""
        if self.ours:
            return "; if an algorithm changed weights in calibration, give --calibration"
        return "; SmoothQuant and AWQ change norms and weights, which then cannot be compared"


def _spec(written: Written, manifest: Manifest | None, original: Original | None) -> ModelSpec:
    if original is not None:
        return original.checkpoint.spec
    if manifest is not None:
        return manifest.model.spec
    config = {k: v for k, v in written.config.items() if k != "quantization_config"}
    where = str(written.path / "config.json")
    refuse_more_than_stored(config, len(written.names), where)
    return ModelSpec.from_config(config, where)


def _format(written: Written) -> str:
    if written.quantization is None:
        return "not quantized"
    labels = dict.fromkeys(group.stored.label for group in written.quantization.groups)
    return f"{written.quantization.dialect}: {', '.join(labels)}"


def _linears(
    written: Written, shapes: dict[str, tuple[int, ...]], spec: ModelSpec
) -> dict[str, tuple[int, int]]:
    """Returns [N, K] of each module that becomes a linear layer: all matrices but embeddings."""
    found: dict[str, tuple[int, int]] = {}
    projections = {linear.name for linear in spec.linears()}
    dialect = written.quantization.dialect if written.quantization is not None else None
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name or "embed" in module:
            continue
        if module == "lm_head" and spec.tied_embeddings:
            continue
        # These cover projections: engines quantize neither the head nor a router.
        if dialect in ("fp8", "mxfp4") and module not in projections:
            continue
        found[module] = (shape[0], shape[1])
    return found


def _fused(spec: ModelSpec) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for linear in spec.linears():
        groups.setdefault(linear.input, []).append(linear.name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _undeclared(written: Written, linears: dict[str, tuple[int, int]], found: Verification) -> bool:
    """Detects weights that are codes without a declaration in config.json.

    Engines would read such codes as numbers.
    """
    if written.quantization is not None:
        return False
    codes = [
        module
        for module in linears
        if f"{module}.weight_packed" in written
        or f"{module}.blocks" in written
        or (f"{module}.weight" in written and written.dtype(f"{module}.weight") in _CODES)
    ]
    if codes:
        what = (
            f"declares no quantization, but {len(codes)} linear layers hold codes, such as"
            f" {codes[0]}"
        )
        found.problem("configuration", "config.json", what)
    return bool(codes)


def _check_second_opinion(
    written: Written, linears: dict[str, tuple[int, int]], found: Verification
) -> None:
    """Checks that config.json and hf_quant_config.json agree: engines read one or the other."""
    first, second = written.quantization, written.second_opinion()
    if first is None or second is None:
        return
    for module in linears:
        stored = [one.group_of(module) for one in (first, second)]
        labels = ["not quantized" if group is None else group.stored.label for group in stored]
        if labels[0] != labels[1]:
            found.problem(
                "configuration",
                "hf_quant_config.json",
                f"says {labels[1]} of {module}, config.json {labels[0]}",
            )
            return
    if first.kv_scheme != second.kv_scheme:
        which = "config.json" if first.kv_scheme else "hf_quant_config.json"
        found.problem(
            "configuration", "hf_quant_config.json", f"{which} alone declares an FP8 cache"
        )
