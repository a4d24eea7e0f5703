"""Small runs of calibration, the same in every process that a test starts, and their batches."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from calibrate.decoder.loading import ComputeDtype
from calibrate.observe.sweep import Observed, observe_checkpoint
from calibrate.samples.batches import Batch, make_batches, real, real_tokens, tokenize
from calibrate.samples.source import load_samples
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.contents import count_reference
from tests.models import Tensors, rewrite_model

__all__ = [
    "DTYPE",
    "assert_counts_of_plain_hooks",
    "assert_same_counts",
    "batches_from",
    "batches_of",
    "interrupt_after",
    "run",
    "save_counts",
    "with_code",
]

DTYPE: ComputeDtype = "bfloat16"


def batches_of(count: int, *, seed: int = 0) -> list[Batch]:
    """`count` padded batches of 3 rows in two chunks, from no file and no tokenizer."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        lengths = tuple(int(n) for n in rng.integers(5, 40, 3))
        ids = torch.from_numpy(rng.integers(1, 4096, (3, max(lengths))))
        origins = tuple(f"line {3 * index + row + 1}" for row in range(3))
        made.append(Batch(ids, lengths, origins, chunk=int(index >= count // 2)))
    return made


def batches_from(samples: Path, count: int, tokenizer: Any) -> list[Batch]:
    """The first `count` samples of a file, 8 a batch, cut at 512 tokens."""
    found = load_samples(samples).samples[:count]
    rows = tokenize(found, tokenizer, max_length=512, vocab_size=4096)
    return make_batches(rows, [sample.origin for sample in found], batch_size=8)


def run(model: Path, journal: Path | None = None, *, count: int = 5, **settings: Any) -> Observed:
    """The histograms and mean squares of `batches_of(count)` with one thread."""
    torch.set_num_threads(1)
    checkpoint, batches = Checkpoint.open(model), batches_of(count)
    return observe_checkpoint(checkpoint, batches, dtype=DTYPE, journal=journal, **settings)


def interrupt_after(share: float, batches: Sequence[Batch] | None = None) -> Callable[[int], None]:
    """An `advance` that raises KeyboardInterrupt when that share of the work is done."""
    told, limit = 0, sum(batch.tokens for batch in batches or batches_of(5)) * share

    def advance(tokens: int) -> None:
        nonlocal told
        told += tokens
        if told >= limit:
            raise KeyboardInterrupt

    return advance


def with_code(model: Path, path: Path, name: str, index: Any, code: int) -> Checkpoint:
    """A copy in `path` whose BF16 tensor `name` has `code` at `index`."""

    def change(tensors: Tensors) -> Tensors:
        codes = tensors[name].codes.copy()
        codes[index] = code
        return tensors | {name: Tensor("BF16", codes)}

    return Checkpoint.open(rewrite_model(model, path, change))


def save_counts(path: Path, observed: Observed) -> None:
    counts = {name: Tensor.of(x) for name, x in observed.histograms.items()}
    means = {f"{name}.means": Tensor.of(x) for name, x in observed.mean_squares.items()}
    write_tensors(path, counts | means)


@torch.inference_mode()
def plain_counts(model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> dict[str, NDArray[Any]]:
    """Counts by name of what linears and experts' gates read, and of keys and values.

    From plain hooks on the whole model, as transformers runs it.
    """
    if spec.experts:
        model.set_experts_implementation("eager")  # the others add in another order
    counts: dict[str, NDArray[Any]] = {}
    gate = spec.expert_projections[0]
    for batch in batches:
        seen: dict[str, tuple[torch.Tensor, ...]] = {}

        def hook(name: str, seen: dict[str, Any] = seen) -> Any:
            return lambda module, args: seen.update({name: args})

        handles = [
            module.register_forward_pre_hook(hook(name))
            for name, module in model.named_modules()
            if (isinstance(module, torch.nn.Linear) and name != "lm_head")
            or name.endswith(".experts")
        ]
        cache = DynamicCache()  # it keeps everything, whatever the window
        model(batch.token_ids.to(model.device), past_key_values=cache, use_cache=True)
        for handle in handles:
            handle.remove()
        found = {}
        for name, (x, *rest) in seen.items():
            if name.endswith(".experts"):
                rows = real_tokens(batch).flatten().to(x.device)
                prefix = spec.experts_of(name.removesuffix(".mlp.experts"))
                for expert in range(spec.experts):
                    sent = (rest[0] == expert).any(-1) & rows
                    found[f"{prefix}.{expert}.{gate}.input"] = x[sent]
            else:  # an expert that all tokens go to may read [B * T, H]
                found[f"{name}.input"] = real(x.reshape(*batch.token_ids.shape, -1), batch)
        for index, layer in enumerate(cache.layers):
            attention = f"{spec.layer(index)}.self_attn"
            found[f"{attention}.key"] = real(layer.keys.transpose(1, 2), batch)
            found[f"{attention}.value"] = real(layer.values.transpose(1, 2), batch)
        for name, x in found.items():
            counts[name] = counts.get(name, 0) + count_reference(x)
    return counts


def assert_counts_of_plain_hooks(
    observed: Observed, model: Any, spec: ModelSpec, batches: Sequence[Batch]
) -> None:
    """Each chunk of `batches` gave what plain hooks count, bin for bin."""
    readers = {x.name: x.input for x in spec.linears()}
    for chunk in range(2):
        mine = [batch for batch in batches if batch.chunk == chunk]
        named = set()
        for name, counts in plain_counts(model, spec, mine).items():
            # q, k and v are each held against their common input
            name = readers.get(name.removesuffix(".input"), name)
            named.add(name)
            if name in observed.histograms:
                np.testing.assert_array_equal(observed.histograms[name][chunk], counts, name)
        assert all(x.endswith("gate.input") for x in named - observed.histograms.keys())  # routers
        down = f".{spec.expert_projections[-1]}.input"
        unhooked = observed.histograms.keys() - named
        assert all(".experts." in x and x.endswith(down) for x in unhooked), unhooked


def assert_same_counts(one: Observed, other: Observed) -> None:
    assert list(one.histograms) == list(other.histograms)
    for name, counts in one.histograms.items():
        np.testing.assert_array_equal(counts, other.histograms[name], err_msg=name)
    assert list(one.mean_squares) == list(other.mean_squares)
    for name, means in one.mean_squares.items():
        np.testing.assert_array_equal(means, other.mean_squares[name], err_msg=name)
