"""Checks that the scales of the KV cache are complete and made for the right format."""

from typing import get_args

import numpy as np

from octet.recipe import KvCacheDtype
from verify.checks.findings import Verification
from verify.checks.names import Names
from verify.checks.original import Original
from verify.reader.checkpoint import Written
from verify.reader.scheme import Quantization

__all__ = ["cache_of", "check_cache_scales", "check_cache_scheme"]

_E5M2_PER_E4M3 = 448 / 57344  # scale that fills E5M2 / scale that fills E4M3
_SAME = 1e-6  # relative: the float32 error of 1/x and back


def cache_of(
    written: Written, recipe_cache: KvCacheDtype | None, exported: object = None
) -> KvCacheDtype:
    """Returns the cache format of the files, by the manifest, else by the configuration."""
    caches: tuple[KvCacheDtype, ...] = get_args(KvCacheDtype)
    for known in caches:
        if exported == known:
            return known
    if written.quantization is not None and written.quantization.kv_scheme:
        return "e4m3"
    return "e5m2" if recipe_cache in (None, "e4m3") else recipe_cache


def check_cache_scheme(written: Written, exported: object, found: Verification) -> None:
    """Adds a problem if the declared scheme of the cache does not match the format `exported` for.

    Engines make an E4M3 cache if the configuration declares the scheme, and none if it does not.
    `quant_method: fp8` cannot declare it: there an option of the engine selects the cache.
    """
    quantization = written.quantization
    if quantization is None or exported not in get_args(KvCacheDtype):
        return
    if exported != "e4m3" and quantization.kv_scheme:
        what = f"declares an E4M3 cache, and this was exported for {exported}"
        why = ": vLLM refuses the two together" if exported == "e5m2" else ""
        found.problem("configuration", "config.json", what + why)
    elif exported == "e4m3" and quantization.dialect != "fp8" and not quantization.kv_scheme:
        what = "declares no E4M3 cache (kv_cache_scheme), and this was exported for one"
        found.problem("configuration", "config.json", f"{what}: engines make one of 16 bits")
    elif exported == "e4m3" and not quantization.static_kv:
        what = "declares scales of the cache that are made at run time, and these are calibrated"
        found.problem("configuration", "config.json", what)


def check_cache_scales(
    written: Written,
    names: Names,
    kv_cache: KvCacheDtype,
    original: Original | None,
    found: Verification,
) -> None:
    """Adds to `found` scales that a declared E4M3 cache lacks, or that are of another format."""
    quantization = written.quantization
    if quantization is None:
        return
    declared = quantization.kv_scheme
    attentions = sorted({m.rpartition(".")[0] for m in names.linears if m.endswith("k_proj")})
    attentions = attentions or sorted(
        {m.rpartition(".")[0] for m in names.linears if m.endswith(".qkv_proj")}
    )
    for attention in attentions:
        for kind in "kvq":
            if kind not in names.cache.get(attention, {}):
                why = _why_needed(quantization, attention, kind, kv_cache, original)
                if why:
                    what = f"missing: {why}, and engines put 1.0 there"
                    found.problem("names", f"{attention}.{kind}_scale", what)
    for tensors in names.cache.values():
        if ("k" in tensors) != ("v" in tensors) and not declared:
            alone = tensors.get("k") or tensors.get("v") or ""
            found.problem("names", alone, "only one of the k and v scales: engines use it for both")
    scales = {
        name: float(written.values(name).reshape(-1)[0])
        for tensors in names.cache.values()
        for name in tensors.values()
    }
    keys_values = [n for t in names.cache.values() for kind, n in t.items() if kind != "q"]
    if declared and keys_values and all(scales[name] == 1.0 for name in keys_values):
        found.problem(
            "scales",
            keys_values[0],
            "1, as every k and v scale: not calibrated for E4M3, or made for an E5M2 cache",
        )
    if original is None or original.calibration is None:
        return
    for attention, tensors in names.cache.items():
        for kind, name in tensors.items():
            _compare(attention, kind, name, scales[name], kv_cache, original, found)


def _why_needed(
    quantization: Quantization,
    attention: str,
    kind: str,
    kv_cache: KvCacheDtype,
    original: Original | None,
) -> str:
    """Explains why a scale of "k", "v" or "q" is needed; empty if it is not."""
    if kind != "q" and quantization.kv_scheme and quantization.static_kv:
        return "config.json declares an E4M3 cache"
    if kind != "q" and quantization.dialect == "fp8" and kv_cache == "e4m3":
        return "this was exported for an E4M3 cache"
    if original is None or original.calibration is None or kv_cache == "float16":
        return ""
    known = original.calibration.cache_scale(attention, kind, kv_cache)
    return "" if known in (None, 1.0) else f"calibration has {known:.6g} for {kv_cache}"


def _compare(
    attention: str,
    kind: str,
    name: str,
    written: float,
    kv_cache: KvCacheDtype,
    original: Original,
    found: Verification,
) -> None:
    assert original.calibration is not None
    known = original.calibration
    wanted = known.cache_scale(attention, kind, kv_cache)
    if wanted is None or np.isclose(written, wanted, rtol=_SAME, atol=0):
        return
    other: KvCacheDtype = "e5m2" if kv_cache == "e4m3" else "e4m3"
    theirs = known.cache_scale(attention, kind, other)
    why = ""
    ratio = _E5M2_PER_E4M3 if kv_cache == "e4m3" else 1 / _E5M2_PER_E4M3
    if theirs is not None and np.isclose(written, theirs, rtol=_SAME, atol=0):
        why = f": it is the scale for an {other.upper()} cache"
    elif np.isclose(written, wanted * ratio, rtol=1e-3):
        why = f": it is made for {other.upper()}, which has another largest value"
    elif np.isclose(written, 1 / wanted, rtol=1e-3):
        why = ": it divides, and should multiply"
    found.problem(
        "scales", name, f"{written:.6g}, and calibration has {wanted:.6g} for {kv_cache}{why}"
    )
