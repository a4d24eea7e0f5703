"""Golden records: the unquantized model's answers to prompts of mixed lengths.

Everything is computed layer by layer in float32 arithmetic on the checkpoint's weights. On a CPU
each prompt runs by itself: its log-probabilities depend on no other prompt, and equal those of the
whole model in memory to the last bit if the output head is applied in one piece (up to 256 MiB of
it). On a GPU, which a short prompt does not fill, prompts of similar lengths run together, padded
at the end. The continuations run in batches of a few prompts. GEMMs of other shapes differ in the
last bits; that changes a greedy token only if two tokens are equally likely up to those bits.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache

from calibrate.decoder.experts import watch_experts
from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.weights import LayerWeights, free_memory, return_freed
from calibrate.samples.golden_prompts import CONTINUATION
from calibrate.simulate.schedule import fault_records
from octet.artifacts.coverage import coverage
from octet.artifacts.golden import POSITIONS, GoldenRecord, GoldenSet, Scope, Top
from octet.artifacts.manifest import software
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.progress import Spread

__all__ = ["described", "examined", "golden_set"]

TOP = 20

# By type of device. A larger batch does not fill a CPU any better, but needs more padding.
_TOGETHER = {"cpu": 8, "cuda": 64}  # prompts of similar lengths that are continued in one batch
_FEWEST = 8  # prompts that are continued together, however much memory their cache takes
_PREFILLED = {"cpu": 0, "cuda": 2048}  # padded tokens of prompts that are prefilled together
_LEAST = {"cpu": 64, "cuda": 2048}  # tokens; a smaller batch takes about as long
_LOGITS_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}  # of float64 logits of prompts at a time
_CACHE_BYTES = 1 << 30  # of keys and values at a time on a CPU
_WORKING = 0.5  # share of a GPU's free memory that is left to other things than keys and values


def golden_set(
    checkpoint: Checkpoint,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    device: torch.device | str = "cpu",
    weights: LayerWeights | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> GoldenSet:
    """Returns a record for each of `prompts` (text, token ids), computed in float32.

    Among equally likely tokens the one with the lower id comes first. An end token ends a
    continuation and is its last token. `advance` receives token counts as work progresses; they
    add up to the tokens of `prompts`.
    """
    spec = checkpoint.spec
    weights = weights or LayerWeights(checkpoint, device)
    model = LayeredModel(checkpoint, "float32", device, weights)
    tokens = sum(len(ids) for _, ids in prompts)
    rounds = _rounds(model, [ids for _, ids in prompts])
    steps = sum(
        _work(model, [int(x.lengths.sum()) for x in groups])
        + (CONTINUATION - 1) * _work(model, [len(x.prompts) for x in groups])
        for groups in rounds
    )
    progress = Spread(advance, tokens, steps * (spec.layers + _head_layers(spec)))
    records: list[GoldenRecord] = []
    for groups in rounds:
        answers = weights.run(partial(_answers, model, groups, progress))
        for group, answer in zip(groups, answers, strict=True):
            answered = zip(group.prompts, *answer, strict=True)
            for row, (ids, nll, tops, continuation) in enumerate(answered):
                text = prompts[len(records)][0]
                record = _record(text, ids, nll, tops, continuation, spec.eos_token_ids)
                records.append(record.model_copy(update={"experts": group.experts(row)}))
    progress.finish()
    identity = json.dumps(checkpoint.weight_hashes, sort_keys=True)
    return GoldenSet(
        weights_sha256=hashlib.sha256(identity.encode()).hexdigest(),
        compute_dtype="float32",
        software=software("torch", "transformers", "tokenizers"),
        records=tuple(records),
    )


def described(golden: GoldenSet, scope: Scope, lists: Collection[int]) -> GoldenSet:
    """Adds the `scope` of the prompts, and removes the likelihood of those that are lists of ids.

    `lists` has the numbers of the latter: a list of token ids is not text.
    """
    records = tuple(
        record.model_copy(update={"prompt_nll": None}) if number in lists else record
        for number, record in enumerate(golden.records)
    )
    return golden.model_copy(update={"records": records, "scope": scope})


def examined(golden: GoldenSet) -> str:
    """Describes what the golden prompts examine, and what the first prompts of an admission do."""
    whole = coverage(golden, range(len(golden.records)))
    few = fault_records(golden)
    first = coverage(golden, few)
    if whole is None or first is None:
        return ""
    return (
        f"The {len(golden.records)} golden prompts examine {whole.text}. The {len(few)} that an"
        f" admission sends first examine {first.text}."
    )


class _Group:
    """Prompts that are continued together, with their keys and values in every layer.

    `keys[layer]` and `values[layer]` are float32 [prompts, kv heads, room, D], where `room` is the
    capacity in tokens: the longest prompt and its continuation.
    """

    def __init__(self, model: LayeredModel, prompts: Sequence[list[int]]) -> None:
        spec = model.spec
        self.prompts = prompts
        self.lengths = torch.tensor([len(ids) for ids in prompts])
        self.room = int(self.lengths.max()) + CONTINUATION
        self.shape = (len(prompts), spec.kv_heads, self.room, spec.head_dim)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.reached = np.zeros((len(prompts), spec.layers, spec.experts), np.bool_)

    @property
    def nbytes(self) -> int:
        """Size of the keys and values of one layer."""
        return 2 * 4 * int(np.prod(self.shape))

    def experts(self, row: int) -> str:
        """Returns `GoldenRecord.experts` of the prompt `row`."""
        return np.packbits(self.reached[row]).tobytes().hex()

    def reach(self, rows: torch.Tensor, index: int, chosen: torch.Tensor) -> None:
        """Records the experts that layer `index` chose for the tokens of the prompts `rows`.

        `chosen` has an entry for each token, padding included.
        """
        for row, experts in zip(
            rows.tolist(), chosen.cpu().view(len(rows), -1, chosen.shape[-1]), strict=True
        ):
            self.reached[row, index, experts[: self.lengths[row]].flatten().numpy()] = True

    def batches(self, most: int) -> list[torch.Tensor]:
        """Divides the prompts into batches of up to `most` tokens with padding, or of one prompt.

        Returns the numbers of each batch's prompts in the group, int64 [n].
        """
        found: list[list[int]] = []
        longest = 0
        for row, length in enumerate(self.lengths.tolist()):
            longest = max(longest, length)
            if not found or (len(found[-1]) + 1) * longest > most:
                found.append([])
                longest = length
            found[-1].append(row)
        return [torch.tensor(rows) for rows in found]

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the prompts `rows` as token ids [n, T], padded at the end."""
        prompts = [torch.tensor(self.prompts[row]) for row in rows.tolist()]
        return nn.utils.rnn.pad_sequence(prompts, batch_first=True)

    def allocate(self, model: LayeredModel) -> None:
        # As one block: malloc would keep the pages of smaller ones after they are freed.
        shape = (model.spec.layers, *self.shape)
        for held in (self.keys, self.values):
            held[:] = torch.zeros(shape, dtype=model.dtype, device=model.device)


class _GroupCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """KV cache that transformers writes to, for some `rows` of a group.

    `start` int64 [rows] is the position of each row's first new token. With `prompt`, during
    prefill, attention sees only the new tokens. Otherwise it sees the whole cache, masked. What
    padding has written there is overwritten by the continuation before it is seen.
    """

    def __init__(
        self, group: _Group, rows: torch.Tensor, start: torch.Tensor, *, prompt: bool
    ) -> None:
        super().__init__()
        self._group, self._rows, self._start, self._prompt = group, rows, start, prompt

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._group.keys[layer_idx], self._group.values[layer_idx]
        at = self._start[:, None] + torch.arange(key_states.shape[2])
        rows, at = self._rows[:, None].to(keys.device), at.to(keys.device)
        keys[rows, :, at] = key_states.transpose(1, 2)
        values[rows, :, at] = value_states.transpose(1, 2)
        return (key_states, value_states) if self._prompt else (keys, values)


def _work(model: LayeredModel, batches: Sequence[int]) -> int:
    """Returns the cost of one layer for batches of so many tokens, in tokens."""
    least = _LEAST[model.device.type]
    return sum(max(tokens, least) for tokens in batches)


def _head_layers(spec: ModelSpec) -> int:
    """Returns how many layers have about as many weights as the output head, at least 1."""
    layer = 4 * spec.hidden_size**2 + 3 * spec.hidden_size * spec.intermediate_size
    return max(1, round(spec.vocab_size * spec.hidden_size / layer))


def _rounds(model: LayeredModel, prompts: Sequence[list[int]]) -> list[list[_Group]]:
    """Divides prompts, in order, into groups and groups into rounds.

    The keys and values of a round fit in memory, unless that is too small for _FEWEST prompts.
    """
    rounds: list[list[_Group]] = []
    together, most, free = _TOGETHER[model.device.type], _CACHE_BYTES, 0
    if model.device.type == "cuda":
        most = int((1 - _WORKING) * free_memory(model.device))
    left = prompts
    while left:
        group = _Group(model, left[:together])
        while group.nbytes * model.spec.layers > most and len(group.prompts) > _FEWEST:
            group = _Group(model, group.prompts[: max(_FEWEST, len(group.prompts) // 2)])
        left = left[len(group.prompts) :]
        needed = group.nbytes * model.spec.layers
        if needed > free or not rounds:
            rounds.append([])
            free = most
        rounds[-1].append(group)
        free -= needed
    return rounds


def _answers(
    model: LayeredModel, groups: Sequence[_Group], progress: Spread
) -> list[tuple[list[float], list[list[Top]], list[list[int]]]]:
    """Computes the reference answers to the prompts of each group.

    Returns, for each group, three lists with one item a prompt: its negative log-likelihood in
    nats, the likeliest tokens at the first POSITIONS positions, and up to CONTINUATION greedy
    tokens. Decode runs one token at a time for a whole group.
    """
    return_freed()
    states = _prefill(model, groups, progress)
    return_freed()
    nlls = [_nlls(model, x.prompts, y) for x, y in zip(groups, states, strict=True)]
    prompts = _work(model, [int(group.lengths.sum()) for group in groups])
    progress.step(prompts * _head_layers(model.spec))
    last = model.logits([x[:, -1:] for hidden in states for x in hidden])
    found = iter([x[0, 0].cpu().numpy() for x in last])
    firsts = [[next(found) for _ in group.prompts] for group in groups]
    chosen = [[[int(x.argmax())] for x in logits] for logits in firsts]
    tops = [[[_top(x)] for x in logits] for logits in firsts]
    del states, last
    return_freed()
    eos = set(model.spec.eos_token_ids)
    while len(chosen[0][0]) < CONTINUATION and not all(eos & {*x} for y in chosen for x in y):
        answers = _next(model, groups, chosen, progress)
        for tokens, found_tops, logits in zip(chosen, tops, answers, strict=True):
            for continuation, top, x in zip(tokens, found_tops, logits, strict=True):
                continuation.append(int(x.argmax()))
                if len(top) < POSITIONS:
                    top.append(_top(x))
    for group in groups:
        group.keys.clear()
        group.values.clear()
    return list(zip(nlls, tops, chosen, strict=True))


def _prefill(
    model: LayeredModel, groups: Sequence[_Group], progress: Spread
) -> list[list[torch.Tensor]]:
    """Fills the caches of `groups`; returns [1, T, H] after the last layer for each prompt."""
    together: list[tuple[_Group, torch.Tensor]] = []
    for group in groups:
        group.allocate(model)
        together += [(group, rows) for rows in group.batches(_PREFILLED[model.device.type])]
    states = [model.embed(group.padded(rows)) for group, rows in together]
    for index, layer in model.sweep():
        for number, (group, rows) in enumerate(together):
            cache = _GroupCache(group, rows, torch.zeros_like(rows), prompt=True)
            with watch_experts(layer, partial(group.reach, rows, index)):
                states[number] = model.forward(states[number], cache)
        progress.step(_work(model, [int(group.lengths.sum()) for group in groups]))
    prompts = iter([x[None] for batch in states for x in batch])
    return [[next(prompts)[:, : len(ids)] for ids in group.prompts] for group in groups]


def _nlls(
    model: LayeredModel, prompts: Sequence[Sequence[int]], states: Sequence[torch.Tensor]
) -> list[float]:
    """Returns -Σ ln p over each prompt's tokens but the first, from its last hidden states.

    `states` are [1, T, H], one for each prompt.
    """
    hidden = torch.cat([x[:, :-1] for x in states], 1)
    following = torch.tensor([token for ids in prompts for token in ids[1:]], dtype=torch.int64)
    step = max(1, _LOGITS_BYTES[model.device.type] // (8 * model.spec.vocab_size))
    found = [torch.zeros(0, dtype=torch.float64)]
    for start in range(0, len(following), step):
        (logits,) = model.logits([hidden[:, start : start + step]])
        logprobs, wanted = logits[0].double().log_softmax(-1), following[start : start + step, None]
        found.append(-logprobs.gather(-1, wanted.to(logprobs.device))[:, 0].cpu())
    sizes = [len(ids) - 1 for ids in prompts]
    return [float(part.sum()) for part in torch.split(torch.cat(found), sizes)]


def _next(
    model: LayeredModel,
    groups: Sequence[_Group],
    chosen: Sequence[Sequence[Sequence[int]]],
    progress: Spread,
) -> list[NDArray[np.float32]]:
    """Returns the logits [prompts, V] of each group after the last of its `chosen` tokens."""
    states = [model.embed(torch.tensor([x[-1:] for x in tokens])) for tokens in chosen]
    position = [group.lengths + len(chosen[0][0]) - 1 for group in groups]
    for _ in model.sweep():
        for index, group in enumerate(groups):
            rows, at = torch.arange(len(group.prompts)), position[index]
            mask = model.mask(torch.arange(group.room)[None] <= at[:, None], at)
            states[index] = model.forward(
                states[index],
                _GroupCache(group, rows, at, prompt=False),
                position_ids=at[:, None].to(model.device),
                attention_mask=mask,
            )
        progress.step(_work(model, [len(group.prompts) for group in groups]))
    logits = [x[:, 0].cpu().numpy() for x in model.logits(states)]
    progress.step(_work(model, [len(group.prompts) for group in groups]) * _head_layers(model.spec))
    return logits


def _top(logits: NDArray[np.float32]) -> Top:
    """Returns the TOP likeliest tokens; among equally likely ones, the lower id comes first."""
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    least = np.partition(logprobs, -TOP)[-TOP] if len(logprobs) > TOP else -np.inf
    likely = np.flatnonzero(logprobs >= least)  # a few; sorting all takes ten times as long
    top = likely[np.argsort(-logprobs[likely], kind="stable")][:TOP]
    return Top(
        token_ids=tuple(int(token) for token in top),
        logprobs=tuple(float(value) for value in logprobs[top]),
    )


def _record(
    prompt: str,
    ids: Sequence[int],
    nll: float,
    tops: Sequence[Top],
    continuation: Sequence[int],
    eos_token_ids: Sequence[int],
) -> GoldenRecord:
    ends = [n for n, token in enumerate(continuation, start=1) if token in eos_token_ids]
    length = min(ends, default=CONTINUATION)
    return GoldenRecord(
        prompt=prompt,
        prompt_token_ids=tuple(ids),
        continuation_token_ids=tuple(continuation[:length]),
        tops=tuple(tops[:length]),
        prompt_nll=nll,
    )
