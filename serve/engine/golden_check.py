"""Proves an export: runs its golden prompts through its own runner, checks the mean divergence.

golden.json has the unquantized model's next-token distribution after each golden prompt. Each
prompt is run twice: prefilled whole, and prefilled without its last tokens, which are then decoded
with all prompts in one batch. The second run covers every part of decoding, above all reading the
cache back. Both mean divergences must match what the recipe costs. The golden continuations are
then generated from the prompts alone. Their agreement is reported but not judged, because one close
decision that differs changes all that follows.

expected.json has the recipe's cost, simulated on the same prompts, as a 95 % range. A conforming
runner falls outside it once in twenty times, so a result is refused only outside twice that range
(in logarithms), or if it is off by more than a factor of 4: with few prompts the range is so wide
that nothing would be refused. Decoding may cost at most 4 times as much as prefill, because both
compute the same except for rounding. Without a prediction, `octet.artifacts.serving_path.bound_of`
applies, which catches only a broken export.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import GoldenRecord, GoldenSet
from octet.artifacts.manifest import Manifest
from octet.artifacts.serving_path import (
    EXPECTED_FILE,
    Expectation,
    ExpectedSet,
    ServingPath,
    bound_of,
)
from octet.errors import ExportError, UnsupportedError
from octet.proof.top_k import TopK, top_k_divergence
from serve.engine.load import load_runner
from serve.engine.prompts import PromptSteps
from serve.engine.sampler import log_softmax
from serve.runner.protocol import Runner

__all__ = ["Range", "expected_range", "prove", "prove_runner"]

_FACTOR = 4
_LEAST = 1e-3  # nats; smaller differences are not noticeable


@dataclass(frozen=True)
class Range:
    """The accepted mean divergences, in nats, and their source."""

    low: float
    high: float
    source: str
    expectation: Expectation | None = None

    def beside(self, read: float) -> "Range":
        """Returns the range for decoding, given the divergence `read` of prefill, in nats."""
        most = max(_FACTOR * read, _LEAST)
        if most >= self.high:
            return self
        return Range(min(self.low, most), most, f"{_FACTOR} times the divergence of prefill")


def prove(directory: Path, *, threads: int = 0, device: int = 0) -> dict[str, Any]:
    """Returns facts for a manifest: `status` "proven", with figures, or "unproven", with `reason`.

    It is "weakly proven" if nothing was predicted, so that only a bound was kept. An engine that
    cannot be executed on this machine is "unproven". Raises ExportError if the
    divergence is outside the accepted range, and ArtifactError for an incomplete or altered export.
    """
    manifest = Manifest.load(directory, verify=False)
    golden = GoldenSet.load(directory)
    try:
        runner = load_runner(directory, threads, device)
    except UnsupportedError as error:
        # The manifest keeps the reason, but not the directory where the engine was written.
        return {"status": "unproven", "reason": str(error).removeprefix(f"{directory}: ")}
    return prove_runner(runner, golden, expected_range(directory, manifest, runner), directory)


def prove_runner(
    runner: Runner, golden: GoldenSet, accepted: Range, directory: Path
) -> dict[str, Any]:
    """Proves a runner that is loaded already, as `prove` does; errors name `directory`."""
    records = [r for r in golden.records if len(r.prompt_token_ids) < runner.spec.max_positions]
    if not records:
        raise ExportError(f"{directory}: none of its golden prompts fits into its context")
    read, decoded, agree, tokens, same = _Golden(runner, records).run()
    _judge(float(np.mean(read)), "in prefill", accepted, directory)
    _judge(float(np.mean(decoded)), "in decoding", accepted.beside(float(np.mean(read))), directory)
    facts: dict[str, Any] = {
        "status": "weakly proven" if accepted.expectation is None else "proven",
        "prompts": len(records),
        "kl": float(np.mean(read)),
        "kl_max": float(np.max(read)),
        "kl_decoding": float(np.mean(decoded)),
        "accepted": {"low": accepted.low, "high": accepted.high, "from": accepted.source},
        "tokens": tokens,
        "tokens_agree": agree,
        "rows_independent": same,
    }
    if accepted.expectation is not None:
        facts["in_predicted_range"] = accepted.expectation.holds(float(np.mean(read)))
    return facts


def expected_range(directory: Path, manifest: Manifest, runner: Runner) -> Range:
    """Returns the range of the recipe's cost with this cache, computed in FP16 or better."""
    quantized = bool(manifest.details.get("quantized", True))
    if quantized and (directory / EXPECTED_FILE).is_file():
        expected = ExpectedSet.load(directory)
        for compute in ("float32", "bfloat16"):
            path = ServingPath(kv_cache=runner.kv_dtype, compute=compute)
            found = expected.find(path)
            if found is not None and found.mean > 0:
                high = found.mean * min((found.high / found.mean) ** 2, _FACTOR)
                low = found.mean * max((found.low / found.mean) ** 2, 1 / _FACTOR)
                if compute == "bfloat16":  # FP16 rounds eight times finer, so it may cost less
                    low = 0.0
                return Range(low, high, f"{EXPECTED_FILE}: {path.label}", found)
    return Range(0.0, *bound_of(manifest.recipe, quantized=quantized))


def _judge(found: float, way: str, accepted: Range, directory: Path) -> None:
    if accepted.low <= found <= accepted.high:  # False for NaN
        return
    side = "below" if found < accepted.low else "outside"
    raise ExportError(
        f"{directory}: {way}, its divergence from the golden records is {found:.3g} nats, {side}"
        f" {accepted.low:.3g} to {accepted.high:.3g} ({accepted.source}): this export does not"
        " compute what its recipe says"
    )


class _Golden:
    """Runs the golden records through one runner."""

    def __init__(self, runner: Runner, records: Sequence[GoldenRecord]) -> None:
        self._records = records
        longest = max(len(r.prompt_token_ids) + len(r.continuation_token_ids) for r in records)
        self._steps = PromptSteps(runner, len(records), longest)

    def run(self) -> tuple[list[float], list[float], int, int, bool]:
        """Returns each prompt's divergence after prefill and after decoding, and token counts.

        The counts are the golden continuations' tokens that agree, and all of them. Last is whether
        the logits of a row were the same alone and in a batch, bit for bit.
        """
        read: list[float] = []
        decoded: list[float] = []
        agree = tokens = 0
        same = True
        together = self._steps.together
        for start in range(0, len(self._records), together):
            group = self._records[start : start + together]
            found, generated = self._answers(group)
            read += found
            for record, ids in zip(group, generated, strict=True):
                agree += _common(ids, record.continuation_token_ids)
                tokens += len(record.continuation_token_ids)
            rows = self._after([record.prompt_token_ids for record in group])
            decoded += [_divergence(r, row) for r, row in zip(group, rows, strict=True)]
            if start == 0 and len(group) > 1:
                alone = [self._after([record.prompt_token_ids])[0] for record in group]
                same = all(map(np.array_equal, alone, rows))
        return read, decoded, agree, tokens, same

    def _answers(self, group: Sequence[GoldenRecord]) -> tuple[list[float], list[list[int]]]:
        """Prefills each prompt by itself, then continues all of them together, greedily.

        Returns each prompt's divergence and its generated tokens.
        """
        slots = self._steps.acquire(len(group))
        found, generated = [], []
        for record, slot in zip(group, slots, strict=True):
            logits = self._steps.read(record.prompt_token_ids, slot)
            found.append(_divergence(record, logits))
            generated.append([int(logits.argmax())])
        going = list(range(len(group)))
        while going := [i for i in going if self._continues(group[i], generated[i])]:
            last = np.array([[generated[i][-1]] for i in going], np.int64)
            for i, row in zip(
                going, self._steps.step(last, [slots[i] for i in going]), strict=True
            ):
                generated[i].append(int(row.argmax()))
        self._steps.release(slots)
        return found, generated

    def _continues(self, record: GoldenRecord, generated: Sequence[int]) -> bool:
        held = len(record.prompt_token_ids) + len(generated)
        return (
            len(generated) < len(record.continuation_token_ids)
            and held <= self._steps.cache.positions
        )

    def _after(self, prompts: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        """Returns logits [V] after each prompt; decodes the last tokens of all rows together."""
        found = self._steps.decoded(prompts)
        for n, prompt in enumerate(prompts):
            if not len(found[n]):  # a prompt of one token, which is prefilled
                (slot,) = self._steps.acquire(1)
                found[n] = self._steps.read(prompt, slot)[None]
                self._steps.release([slot])
        return [rows[-1] for rows in found]


def _divergence(record: GoldenRecord, logits: NDArray[np.float32]) -> float:
    """Returns the divergence in nats over as many of the most likely tokens as the record has.

    This is the quantity that is predicted, and that an API would show.
    """
    logprobs = log_softmax(logits[None])
    top = np.argpartition(-logprobs, len(record.top) - 1)[:, : len(record.top)]
    served = TopK(top, np.take_along_axis(logprobs, top, axis=1))
    return float(top_k_divergence(TopK.of([record.top]), served)[0])


def _common(generated: Sequence[int], golden: Sequence[int]) -> int:
    """Counts the tokens before the first that differs."""
    pairs = zip(generated, golden, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(generated), len(golden)))
