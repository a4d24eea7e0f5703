"""Golden records of the fake model, in a directory as an export has them, and servers of it.

The fake model's distribution is known, so that its golden records are, too. Serving it in a
quantized way is the same with noise on its logits: some for an honest path, more for a fault.
"""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import POSITIONS, GoldenRecord, GoldenSet, Scope, Top
from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.artifacts.scenarios import Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ExpectedSet, Power, ServingPath
from octet.recipe import PRESETS
from serve.engine.sampler import log_softmax
from tests.fake_servers import FakeOpenAI
from tests.fakes import END, FakeRunner, byte_tokenizer, fake_backend, fake_logits, fake_spec

__all__ = ["HONEST", "UNQUANTIZED", "WORSE", "fake_golden", "noisy", "served", "write_proofs"]

Model = Callable[[list[int]], NDArray[np.float32]]
PATH = ServingPath(kv_cache="e5m2")
# Noise on logits: of an honest path, of a fault, of full precision.
HONEST, WORSE, UNQUANTIZED = 0.05, 0.6, 1e-3
_NOISE: Mapping[Scenario, float] = {
    Scenario(path=PATH): HONEST,
    Scenario(path=PATH, fault=Fault(kind="k_scale_dropped")): WORSE,
    Scenario(path=PATH.model_copy(update={"weights": False, "activations": False})): UNQUANTIZED,
}
POWER = (
    Power(prompts=24, low=0.01, middle=0.02, high=0.03, meaning="half_refused"),
    Power(prompts=64, low=0.005, middle=0.0123, high=0.02, meaning="half_refused"),
)
_FILES = {"model.safetensors": "0" * 64}


def noisy(spread: float, salt: int) -> Model:
    """The fake model with noise on its logits, of its own for each `salt`: part of it is shared."""

    def model(tokens: list[int]) -> NDArray[np.float32]:
        crc = zlib.crc32(np.array(tokens, np.int32).tobytes())
        logits = fake_logits(tokens)
        for seed, share in ((0, 0.8), (salt, 0.6)):
            random = np.random.Generator(np.random.PCG64([crc, seed, round(spread * 1e6)]))
            logits += np.float32(share * spread) * random.standard_normal(len(logits), np.float32)
        return logits

    return model


@cache
def fake_golden(count: int = 64) -> GoldenSet:
    """Prompts of 4 to 250 bytes, answered greedily by the fake model."""
    lengths = np.geomspace(4, 250, count).round().astype(int)
    text = "def route(request):  # to the backend that has the fewest tokens under way\n" * 5
    prompts = [f"{n}: {text}"[:length] for n, length in enumerate(lengths)]
    counts = Counter(token for prompt in prompts for token in prompt.encode())
    return GoldenSet(
        weights_sha256=hashlib.sha256(json.dumps(_FILES, sort_keys=True).encode()).hexdigest(),
        compute_dtype="float32",
        software={},
        records=tuple(map(_record, prompts)),
        scope=Scope(vocabulary=256, context=512, experts=0, held_out=counts.total(), counts=counts),
    )


def _record(prompt: str) -> GoldenRecord:
    tokens = list(prompt.encode())
    ids, tops = list(tokens), []
    nll = -sum(float(_logprobs(fake_logits, ids[:n])[ids[n]]) for n in range(1, len(ids)))
    while len(ids) < len(tokens) + 16 and ids[-1] != END:
        logprobs = _logprobs(fake_logits, ids)
        best = np.argsort(-logprobs, kind="stable")[:20]
        tops.append(Top(token_ids=best.tolist(), logprobs=logprobs[best].tolist()))
        ids.append(int(best[0]))
    return GoldenRecord(
        prompt=prompt,
        prompt_token_ids=tuple(tokens),
        continuation_token_ids=tuple(ids[len(tokens) :]),
        tops=tuple(tops[:POSITIONS]),
        prompt_nll=nll,
    )


def write_proofs(
    directory: Path, *, scenarios: bool = True, weights: str = _FILES["model.safetensors"]
) -> Path:
    """Golden records, scenarios, the tokenizer and a manifest of the model with those `weights`,
    which are not there; by default the one that the golden records are of."""
    golden = fake_golden()
    files = {"model.safetensors": weights}
    identity = ModelIdentity(name="fake", spec=fake_spec(), files=files, tokenizer={})
    with write_artifact(directory) as writer:
        golden.save(writer.path)
        byte_tokenizer().inner.save(str(writer.path / "tokenizer.json"))
        if scenarios:
            _scenarios(golden).save(writer.path)
            ExpectedSet(recipe="fp8", expectations=(), power=POWER).save(writer.path)
        writer.finish(
            Manifest(
                kind="checkpoint",
                model=identity,
                recipe=PRESETS["fp8"],
                details={"kv_cache": "e5m2"},
                software=software(),
            )
        )
    return directory


@cache
def _simulated(spread: float) -> NDArray[np.float32]:
    golden, repeats = fake_golden(), 3
    found = np.full((repeats, len(golden.records), POSITIONS, 20), np.nan, np.float32)
    for repeat in range(repeats):
        model = noisy(spread, 100 + repeat)
        for r, record in enumerate(golden.records):
            for j, top in enumerate(record.tops):
                seen = [*record.prompt_token_ids, *record.continuation_token_ids[:j]]
                found[repeat, r, j] = _logprobs(model, seen)[list(top.token_ids)]
    return found


def _scenarios(golden: GoldenSet) -> ScenarioSet:
    logprobs = {scenario: _simulated(spread) for scenario, spread in _NOISE.items()}
    return ScenarioSet(golden.weights_sha256, "fp8", logprobs)


def _logprobs(model: Model, tokens: list[int]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = log_softmax(model(tokens))
    return found


def served(spread: float = HONEST, *, server: FakeOpenAI | None = None) -> FakeOpenAI:
    """A vLLM of the fake model with so much noise: one more repeat of that scenario."""
    server = server or FakeOpenAI()
    server.engine = fake_backend(FakeRunner(model=noisy(spread, 1)))
    return server
