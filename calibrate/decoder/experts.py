"""Observes mixtures of experts: the activations of each expert, and its weights by name.

transformers 5 keeps the experts of a layer in two fused parameters, `gate_up_proj` [E, 2I, H] (gate
above up) and `down_proj` [E, H, I], and runs them in one module; those of gpt-oss are transposed,
and have biases. A `Checkpoint` has them one by one, and so do our histograms and scales. Everything
here uses the checkpoint's names.

With static input scales, each expert has its own. A kernel that runs experts separately can use
them. The fused FP8 kernels of vLLM and SGLang take one scale for all experts of a layer, the
largest.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear

from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec

__all__ = ["Tap", "assemble", "expert_weights", "tap_experts", "watch_experts"]

# tap(name, rows, token_index) -> rows
#   name         the observation: `<expert's gate projection>.input` or `<...down projection>.input`
#   rows         [n, K], n > 0, what this expert's projection reads, one row per token routed to it
#   token_index  int64 [n], on the device of `rows`: the row of the flattened [B*T, H] input that
#                each is, so token_index // T is the sample and token_index % T the position. No
#                token occurs twice. Padding is included: drop it before counting.
# It returns what the projection reads instead, of the same shape and dtype; to observe, `rows`.
# It is not called for an expert that receives no token of the batch.
Tap: TypeAlias = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
_EXPERT = re.compile(r"\w+\.experts\.(?P<index>\d+)\.(?P<projection>\w+)\.(?P<kind>weight|bias)")
_HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}  # of gate_up_proj


@contextmanager
def tap_experts(layer: torch.nn.Module, prefix: str, spec: ModelSpec, tap: Tap) -> Iterator[None]:
    """While active, runs the experts of decoder layer `prefix` (`spec.layer(index)`) one by one.

    `tap` is called with what each expert reads; see `Tap`. If the tap returns its rows, the output
    is that of transformers' own loop (`experts_implementation="eager"`) to the bit; its default,
    grouped GEMMs, rounds and adds in another order. Does nothing in a layer without experts. If two
    taps are nested, only the inner one is called. Raises UnsupportedError for a transformers
    release before 5.0, whose experts are not fused.
    """
    experts = _experts_module(layer)
    if experts is None:
        yield
        return
    gate, *_, down = spec.expert_projections
    names = [
        (
            f"{spec.experts_of(prefix)}.{e}.{gate}.input",
            f"{spec.experts_of(prefix)}.{e}.{down}.input",
        )
        for e in range(spec.experts)
    ]

    def forward(
        hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        # hidden [B*T, H]; top_k_index int64 and top_k_weights, both [B*T, k]
        out, tokens = torch.zeros_like(hidden), len(hidden)
        # One sort needs one transfer of sizes from the device. Within an expert, the order is that
        # of the loop we replace: by rank among a token's choices, then by token.
        chosen = top_k_index.t().reshape(-1)
        sizes = torch.bincount(chosen, minlength=len(names)).tolist()
        sent = torch.split(torch.argsort(chosen, stable=True), sizes)
        for expert, (which, (gate_input, down_input)) in enumerate(zip(sent, names, strict=True)):
            if not len(which):
                continue
            index, rank = which % tokens, which // tokens
            rows = tap(gate_input, hidden[index], index)
            both = _product(experts, "gate_up_proj", expert, rows)
            rows = tap(down_input, _gated(experts, both), index)
            rows = _product(experts, "down_proj", expert, rows)
            rows = rows * top_k_weights[index, rank, None]
            out.index_add_(0, index, rows.to(out.dtype))
        return out

    outer = vars(experts).get("forward")
    experts.forward = forward  # of this instance; the class keeps its own
    try:
        yield
    finally:
        if outer is None:
            del experts.forward
        else:
            experts.forward = outer


def _product(experts: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Returns the output of an expert's projection `name` for `rows` [n, K]."""
    weight = getattr(experts, name)[expert]
    if not _transposed(experts):
        return linear(rows, weight)
    found: torch.Tensor = rows @ weight + getattr(experts, f"{name}_bias")[expert]
    return found


def _gated(experts: Any, both: torch.Tensor) -> torch.Tensor:
    """Returns what the down projection reads, [n, I], of gate and up [n, 2I]."""
    if _transposed(experts):
        gated: torch.Tensor = experts._apply_gate(both)
        return gated
    gate, up = both.chunk(2, dim=-1)
    activated: torch.Tensor = experts.act_fn(gate) * up
    return activated


def _transposed(experts: Any) -> bool:
    """Returns whether the experts are gpt-oss's: transposed, with biases and their own gate."""
    return bool(getattr(experts, "is_transposed", False))


@contextmanager
def watch_experts(layer: nn.Module, watch: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While active, calls `watch` with the experts chosen for each token, int64 [B*T, k].

    Does nothing in a layer without experts, and changes no result.
    """
    experts = _experts_module(layer)
    if experts is None:
        yield
        return
    handle = experts.register_forward_pre_hook(lambda _, inputs: watch(inputs[1]))
    try:
        yield
    finally:
        handle.remove()


def expert_weights(layer: torch.nn.Module, prefix: str, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Returns each expert's linears [N, K] of decoder layer `prefix`, by name: views, not copies.

    Returns {} for a layer without experts. Writing to a view changes the model.
    """
    experts = _experts_module(layer)
    if experts is None:
        return {}
    found = {}
    for expert in range(spec.experts):
        both, down = experts.gate_up_proj.data[expert], experts.down_proj.data[expert]
        weights = (both.T, down.T) if _transposed(experts) else (*both.chunk(2), down)
        for projection, weight in zip(spec.expert_projections, weights, strict=True):
            found[f"{spec.experts_of(prefix)}.{expert}.{projection}"] = weight
    return found


def assemble(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames a decoder layer's tensors from the checkpoint's names to those of transformers.

    Names are relative to the layer (`mlp...`). Experts are copied into fused tensors; everything
    else is passed on unchanged. Each item of `tensors` is read once and not kept, so a mapping that
    loads on access needs little more memory than the result.
    """
    matches = {name: _EXPERT.fullmatch(name) for name in tensors}
    experts = 1 + max((int(m["index"]) for m in matches.values() if m), default=-1)
    transposed = any(m["projection"] == "gate_up_proj" for m in matches.values() if m)
    fused: dict[str, torch.Tensor] = {}
    for name, match in matches.items():
        if match is None:
            fused[name.replace("block_sparse_moe.gate.", "mlp.gate.")] = tensors[name]
            continue
        weight = tensors[name]
        if transposed or match["kind"] == "bias":
            suffix = "_bias" if match["kind"] == "bias" else ""
            target = f"mlp.experts.{match['projection']}{suffix}"
            if target not in fused:
                fused[target] = weight.new_empty(experts, *weight.t().shape)
            fused[target][int(match["index"])] = weight.t()
            continue
        rows, columns = weight.shape
        half = _HALVES.get(match["projection"])
        target = f"mlp.experts.{'down' if half is None else 'gate_up'}_proj"
        if target not in fused:
            height = rows if half is None else 2 * rows
            fused[target] = weight.new_empty(experts, height, columns)
        start = (half or 0) * rows
        fused[target][int(match["index"]), start : start + rows] = weight
    return fused


def _experts_module(layer: torch.nn.Module) -> Any:
    """Returns the fused experts of a decoder layer, or None if it has none."""
    block: Any = getattr(layer, "mlp", None) or getattr(layer, "block_sparse_moe", None)
    experts = getattr(block, "experts", None)
    if isinstance(experts, torch.nn.ModuleList):
        import transformers

        raise UnsupportedError(
            f"mixtures of experts need transformers 5, {transformers.__version__} is installed:"
            " pip install 'transformers>=5'"
        )
    return experts


@contextmanager
def experts_one_by_one(model: Any, spec: ModelSpec) -> Iterator[None]:
    """While active, runs the experts of `model` one by one, as `calibrate.simulate.model` does.

    Only quantization then distinguishes the two.
    """
    with ExitStack() as stack:
        for prefix in map(spec.layer, spec.sparse_layers):
            layer: nn.Module = model.get_submodule(prefix)
            stack.enter_context(tap_experts(layer, prefix, spec, lambda name, rows, index: rows))
        yield
