"""Finds the linears of an unknown architecture by the tensor names of its checkpoint."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from octet.errors import UnsupportedError

__all__ = ["Linear", "find_linears", "generic_fields"]


class Linear(BaseModel):
    """One projection of a decoder layer; weight `[out_features, in_features]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # full module name, such as model.layers.0.self_attn.q_proj
    out_features: int
    in_features: int
    # Linears with the same `input` read the same tensor, and are fused by the kernels that serve
    # them: q/k/v, and gate/up. It is named after the first of them: `<first linear>.input`.
    input: str


_IN_LAYER = re.compile(r"(?P<prefix>(?:.+\.)?layers)\.(?P<index>\d{1,9})\.(?P<module>.+)\.weight")

_EXPERT = re.compile(
    r"(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d{1,9})\.(?P<projection>gate_proj|up_proj|down_proj)"
)

# Matrices of a layer that are not quantizable linears: embeddings, norms and routers
# (`shared_expert_gate` too, but not `gate_proj`).
_EXCLUDED = re.compile(r".*(embed|norm|router).*|(.*_)?gate")

# Linears of one module with these names read the same input tensor.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

# The execution order in a layer; other linears come after, by name.
_ORDER = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w3", "w2", "fc1", "fc2"),
)


def generic_fields(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Any]:
    """Returns the fields of a ModelSpec: sizes under their usual keys, linears from `tensors`.

    `tensors` are shapes by name. Raises KeyError for a missing size without a default, and
    UnsupportedError, naming `where`, if the tensors are not those of one stack of decoder layers.
    """
    layers, heads, hidden = (
        config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not all(isinstance(x, int) and x > 0 for x in (layers, heads, hidden)):
        raise UnsupportedError(
            f"{where}: config.json: num_hidden_layers, num_attention_heads or hidden_size is no"
            " count"
        )
    prefix = _layers_prefix(tensors, layers, where)
    _refuse_fused_experts(config, tensors, prefix, where)
    linears = find_linears(tensors, prefix, layers)
    attended = {name.partition(".self_attn.")[0] for name in (x.name for x in linears)}
    for index in range(layers):
        if f"{prefix}.{index}" not in attended:
            raise UnsupportedError(
                f"{where}: {prefix}.{index} has no self_attn with a linear in it: such layers are"
                " not supported"
            )
    rope, eos = config.get("rope_parameters"), config.get("eos_token_id")
    rope = rope if isinstance(rope, dict) else {}
    tied = config.get("tie_word_embeddings")
    epsilons = (config.get(key) for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps"))
    return {
        "generic": True,
        "prefix": prefix,
        "found": linears,
        "layers": layers,
        "hidden_size": hidden,
        "intermediate_size": config.get("intermediate_size") or 0,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "rms_norm_eps": next((x for x in epsilons if x is not None), 1e-6),
        # The default differs between classes; a head that is not stored is tied to the embeddings.
        "tied_embeddings": "lm_head.weight" not in tensors if tied is None else bool(tied),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "bos_token_id": config.get("bos_token_id"),
        **_experts(linears, prefix, config, where),
    }


def find_linears(
    shapes: Mapping[str, tuple[int, ...]], prefix: str, layers: int
) -> tuple[Linear, ...]:
    """Returns the linears of the first `layers` layers below `prefix`, in execution order.

    A linear is every matrix `<module>.weight` that is not an embedding, a norm or a router.
    """
    modules: dict[tuple[int, str], tuple[int, ...]] = {}
    for name, shape in shapes.items():
        match = _IN_LAYER.fullmatch(name)
        if match is None or match["prefix"] != prefix or len(shape) != 2:
            continue
        if int(match["index"]) >= layers:
            continue
        if not any(_EXCLUDED.fullmatch(part) for part in match["module"].split(".")):
            modules[int(match["index"]), match["module"]] = shape
    return tuple(
        Linear(
            name=f"{prefix}.{index}.{module}",
            out_features=modules[index, module][0],
            in_features=modules[index, module][1],
            input=f"{prefix}.{index}.{_first_reader(index, module, modules)}.input",
        )
        for index, module in sorted(modules, key=lambda key: (key[0], *_rank(key[1])))
    )


def _layers_prefix(names: Iterable[str], layers: int, where: str) -> str:
    """Returns the `<prefix>.layers` of the `layers` decoder layers, such as model.layers.

    Raises UnsupportedError, naming `where`, if there is none, or more than one.
    """
    found: dict[str, set[int]] = {}
    for name in names:
        match = _IN_LAYER.fullmatch(name)
        if match:
            found.setdefault(match["prefix"], set()).add(int(match["index"]))
    wanted = set(range(layers))
    whole = [prefix for prefix, indices in found.items() if indices == wanted]
    # Extra layers after the last predict further tokens, and are not part of the decoder.
    whole = whole or [prefix for prefix, indices in found.items() if indices > wanted]
    if len(whole) == 1:
        return whole[0]
    stacks = f"{len(whole)} stacks of so many ({', '.join(whole)})" if whole else "none such"
    raise UnsupportedError(
        f"{where}: is not supported: of an architecture that Octet does not know, it takes the"
        f" {layers} decoder layers from tensors named <prefix>.layers.<i>.*, and there are {stacks}"
    )


_OTHER_EXPERTS = (
    "of an architecture that Octet does not know, experts are mlp.experts.<i>.gate_proj, up_proj"
    " and down_proj; others are not supported"
)


def _refuse_fused_experts(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], prefix: str, where: str
) -> None:
    """Raises UnsupportedError if one tensor holds all experts of a layer."""
    if not any(config.get(key) for key in ("num_experts", "num_local_experts")):
        return
    for name, shape in tensors.items():
        if name.startswith(f"{prefix}.") and len(shape) == 3:
            raise UnsupportedError(
                f"{where}: {name} holds {shape[0]} experts in one tensor: {_OTHER_EXPERTS}"
            )


def _experts(
    linears: Iterable[Linear], prefix: str, config: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Returns the fields that describe sparse layers; {} for a dense model."""
    found: dict[int, dict[tuple[int, str], tuple[int, int]]] = {}
    for linear in linears:
        name = linear.name.removeprefix(f"{prefix}.")
        if ".experts." not in name:
            continue
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"{where}: {linear.name}: {_OTHER_EXPERTS}")
        key = int(match["expert"]), match["projection"]
        found.setdefault(int(match["layer"]), {})[key] = (linear.out_features, linear.in_features)
    if not found:
        return {}
    layer, first = next(iter(found.items()))
    experts, inner = 1 + max(expert for expert, _ in first), first.get((0, "gate_proj"), (0,))[0]
    hidden = config["hidden_size"]
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    complete = len(first) == experts * len(shapes)  # before a dictionary of as many is made
    whole = {(e, name): shape for e in range(experts * complete) for name, shape in shapes.items()}
    for index, held in found.items():
        if not complete or held != whole:
            raise UnsupportedError(
                f"{where}: the experts of layers {layer} and {index} are not of one make, which is"
                " not supported"
            )
    return {
        "experts": experts,
        "experts_per_token": config["num_experts_per_tok"],
        "moe_intermediate_size": inner,
        "sparse_layers": tuple(found),
    }


def _first_reader(index: int, module: str, modules: Mapping[tuple[int, str], object]) -> str:
    """Returns the first of the linears that read the same input as `module`."""
    block, dot, last = module.rpartition(".")
    for names in _TOGETHER:
        if last in names:
            return next(x for x in (f"{block}{dot}{n}" for n in names) if (index, x) in modules)
    return module


def _rank(module: str) -> tuple[object, ...]:
    block, _, last = module.rpartition(".")
    place = _ORDER.index(last) if last in _ORDER else len(_ORDER)
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", block))  # expert indices
    return 0 if "attn" in block or "attention" in block else 1, len(numbers), numbers, place, module
