"""Describes likely causes of a refusal: what the server's answers match, and the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass

from octet.artifacts.scenarios import Fault, Scenario
from octet.artifacts.serving_path import ServingPath

__all__ = [
    "ANOTHER_MODEL",
    "CLOSER",
    "Cause",
    "cause_of",
    "no_distribution",
    "partly_wrong",
    "undecided",
]


@dataclass(frozen=True)
class Cause:
    """A likely cause of a refusal.

    `name` is for machines; `sentence` continues "its log-probabilities"; `remedy` is an imperative.
    """

    name: str
    sentence: str
    remedy: str

    @property
    def short(self) -> str:
        """The name in words, without its layer."""
        words = self.name.partition(",")[0].replace("_", " ")
        return words.replace("k scale", "k_scale").replace("v scale", "v_scale")


ANOTHER_MODEL = Cause(
    "another_model",
    "match another model: no simulated path or fault explains them",
    "check which checkpoint and config.json the server loaded, whether they are complete, and its"
    " tokenizer",
)
CLOSER = Cause(
    "closer",
    "are closer to the unquantized model than this artifact allows",
    "check which checkpoint the server loaded, and whether its weights and its cache are quantized",
)
_SHOWN = 3  # causes, if several are as likely
_BY_LENGTH = 0.01  # significance, two-sided, at which the length of prompts is given as the cause
_OTHER = {"e5m2": "E4M3", "e4m3": "E5M2"}
# kind -> sentence, remedy
_FAULTS = {
    "k_scale_dropped": (
        "match weights without their k_scale",
        "check that the checkpoint still has its k_scale tensors and that the engine loads them",
    ),
    "v_scale_dropped": (
        "match weights without their v_scale",
        "check that the checkpoint still has its v_scale tensors and that the engine loads them",
    ),
    "kv_scales_dropped": (
        "match weights without their k_scale and v_scale",
        "check that the checkpoint still has its k_scale and v_scale tensors and that the engine"
        " loads them",
    ),
    "input_scales_dropped": (
        "match weights without their input_scale",
        "check that the checkpoint still has its input_scale tensors; export again",
    ),
    "weight_scales_dropped": (
        "match weights whose weight_scale was taken as 1",
        "check that the checkpoint still has its weight_scale tensors, under the names that this"
        " engine reads; export again",
    ),
    "global_scales_inverted": (
        "match weights multiplied by the global scale that divides them",
        "export in the format that this engine reads: one stores the divisor, another the factor",
    ),
    "kv_scales_exchanged": (
        "match k_scale used for values and v_scale for keys",
        "compare how this engine reads the names of k_scale and v_scale; use another version of it",
    ),
    "fused_scales_smallest": (
        "match fused linear layers that share the smallest of their global scales",
        "use an engine that keeps a global scale for each of q, k, v, gate and up, or quantize with"
        " shared ones",
    ),
    "fused_scales_in_one_slot": (
        "match fused linear layers of which only the first got its scale",
        "use an engine that reads the scales of fused linear layers, or store q, k, v, gate and up"
        " apart",
    ),
    "expert_scales_permuted": (
        "match experts that have the scales of the next expert",
        "compare how this engine numbers experts and their scales; use another version of it",
    ),
    "nibbles_swapped": (
        "match FP4 weights whose pairs of codes are read in the wrong order",
        "use an engine that reads the even column from the low nibble, or pack for this one",
    ),
    "fused_scales_merged": (
        "match fused linear layers that share the largest of their scales",
        "use an engine that keeps a scale for each of q, k, v, gate and up, or export with shared"
        " scales",
    ),
    "rope_parameters_dropped": (
        "match RoPE without the parameters of config.json: theta 10,000 and no scaling",
        "compare rope_theta and rope_parameters in the config.json that the server loaded; use a"
        " version of the engine that reads them",
    ),
    "rope_scaling_dropped": (
        "match RoPE without the scaling of config.json",
        "compare rope_scaling and rope_parameters in the config.json that the server loaded; use a"
        " version of the engine that reads them",
    ),
}


def cause_of(scenario: Scenario, declared: ServingPath) -> Cause:
    """Returns the cause of a refusal when `scenario` explains the answers.

    `declared` is the conforming path that explains them best.
    """
    path, fault = scenario.path, scenario.fault
    if fault is None or path.weights != declared.weights:
        return _path(path, declared)
    if fault.kind == "kv_scales_swapped" and path.kv_cache != declared.kv_cache:
        return _path(path, declared)  # the artifact's own scales are in use
    return _fault(fault, path)


def no_distribution(defect: str) -> Cause:
    """Returns the cause when values cannot be log-probabilities; `defect` says why."""
    return Cause(
        "no_distribution",
        f"are invalid: {defect}",
        "look for NaN in the server's logits: weights or scales that are NaN (octet verify finds"
        " them in the checkpoint), a cache that overflows, or a kernel",
    )


def undecided(
    candidates: Sequence[Scenario], excluded: Sequence[Scenario], declared: ServingPath
) -> Cause:
    """Returns the cause when scenarios of several causes explain the answers about equally well.

    `candidates` are the likeliest ones, likeliest first; `excluded` are all that are less likely.
    """
    causes = {cause.name: cause for cause in (cause_of(x, declared) for x in candidates)}
    shown = list(causes.values())[:_SHOWN]
    names = dict.fromkeys(cause_of(x, declared).short for x in excluded)
    known = {cause.short for cause in causes.values()}
    others = ", ".join(name for name in names if name not in known)
    return Cause(
        "undecided",
        f"{', or '.join(cause.sentence for cause in shown)}, and do not show which"
        + (f"; not: {others}" if others else ""),
        "; or ".join(dict.fromkeys(cause.remedy for cause in shown)),
    )


def partly_wrong(wrong: Sequence[int], prompts: int, *, shorter: float, longer: float) -> Cause:
    """Returns the cause when only the answers to some of `prompts` are far off.

    `wrong` are the lengths of these in tokens. `shorter` and `longer` are the probabilities that
    prompts drawn at random are as short, or as long.
    """
    sentence = (
        f"are as declared except for at least {len(wrong)} of {prompts} prompts, of {min(wrong)} to"
        f" {max(wrong)} tokens, which no simulated scenario explains"
    )
    if min(shorter, longer) < _BY_LENGTH / 2:
        return Cause(
            "partly_wrong",
            f"{sentence}; the {'longer' if longer < shorter else 'shorter'} prompts are far off",
            "look for what depends on a prompt's length: positions (RoPE), the cache and its"
            " blocks, kernels that are chosen by size",
        )
    return Cause(
        "partly_wrong",
        f"{sentence}; their lengths differ from the others' by no more than chance",
        "compare the checkpoint and its config.json with the manifest (octet verify)",
    )


def _fault(fault: Fault, path: ServingPath) -> Cause:
    name = fault.label
    if fault.kind in _FAULTS:
        return Cause(name, *_FAULTS[fault.kind])
    own = path.kv_cache.upper()
    other = _OTHER.get(path.kv_cache, "other")
    if fault.kind == "kv_bytes_reread":
        return Cause(
            name,
            f"match {own} bytes read as {other}",
            "use an engine that writes and reads its cache in one format: another version of it, or"
            " another --kv-cache-dtype",
        )
    if fault.kind == "kv_scales_swapped":
        return Cause(
            name,
            f"match an {own} cache with the scales of {other}",
            f"export again for a cache of {path.kv_cache}, or start the engine with the other one",
        )
    if fault.kind == "weight_scales_scaled":
        return Cause(
            name,
            f"match weight scales of layer {fault.layer} that are {_times(fault.factor)} what they"
            " should be",
            "compare the checkpoint with its manifest (octet verify), and export again",
        )
    return Cause(
        name,
        f"match a known fault: {name.replace('_', ' ')}",
        "compare the checkpoint with its manifest (octet verify), and export again",
    )


def _times(factor: float | None) -> str:
    return {0.5: "half of", 2.0: "twice"}.get(factor or 1.0, f"{factor:g} times")


def _path(path: ServingPath, declared: ServingPath) -> Cause:
    label = path.label
    if path.weights != declared.weights:
        if path.weights:
            return Cause(
                "quantized",
                f"match a quantized model ({label})",
                "serve the original checkpoint, or declare the pool as quantized",
            )
        cache = "" if path.kv_cache == "float16" else f" with an {path.kv_cache.upper()} cache"
        return Cause(
            "unquantized",
            f"match an unquantized model{cache}",
            "serve the exported checkpoint: this is the original, or its quantization is ignored",
        )
    if path.kv_cache != declared.kv_cache:
        cache = "a 16-bit" if path.kv_cache == "float16" else f"an {path.kv_cache.upper()}"
        return Cause(
            f"kv_cache_{path.kv_cache}",
            f"match {cache} cache",
            f"start the engine with a cache of {declared.kv_cache}, or declare {path.kv_cache}",
        )
    if declared.activations and not path.activations:
        return Cause(
            "weight_only",
            f"match weight-only matmuls ({label})",
            "the GPU lacks this format or its kernels are missing (octet doctor shows which);"
            " if that is intended, declare its device, or no engine",
        )
    return Cause(
        "another_path",
        f"match another way of serving this artifact ({label})",
        "declare the engine that serves it, or none",
    )
