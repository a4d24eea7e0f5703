"""Measures after how many tokens `octet drift` detects other traffic, and its false alarms.

The embedded engine serves an ONNX export of the example model, and counts every step. Each prompt
is counted once, with 4 tokens generated. It is cut where the calibration cut its samples: shorter
prompts are other traffic. A run draws prompts without replacement and joins them to windows, since
counts add up. Quiet runs draw code that the calibration has not seen. The published figures are of
`octet calibrate examples/python-lm/model --recipe fp8-static --max-length 256`, with the samples
`examples/python-lm/samples/calibration.jsonl`, and of its `octet export onnx`.

    python benchmarks/drift.py CALIBRATION EXPORT [--output benchmarks/results/drift-MACHINE.json]

Prose is the descriptions of installed Python packages. French is the messages of installed programs
(/usr/share/locale/fr, which Debian's packages bring).
"""

import argparse
import asyncio
import gettext
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
from card import conditions, report

import octet.artifacts.live as live
from calibrate.drift import Drift, compare_live
from octet.artifacts.calibration import Calibration
from octet.artifacts.live import Counting, LiveWindow, read_live
from serve.backends.embedded import EmbeddedBackend
from serve.engine.request import GenerateRequest
from serve.runner.onnx import OnnxRunner

SAMPLES = Path(__file__).parent.parent / "examples/python-lm/samples"
SEEN = 256  # samples of calibration.jsonl that a calibration with default options counts
ANSWER = 4  # tokens
PROMPTS = {"code": 256, "prose": 80, "French": 80}
WINDOW = 512  # tokens, at least
SIZES = (8, 16, 32)  # windows of a run
QUIET, CHANGED = 100, 10  # runs
SEED = 20


def code() -> Iterator[str]:
    for name, first in (("calibration", SEEN), ("heldout", 0)):
        for line in (SAMPLES / f"{name}.jsonl").read_text("utf-8").splitlines()[first:]:
            yield json.loads(line)["text"]


def prose() -> Iterator[str]:
    for found in sorted(distributions(), key=lambda x: x.metadata["Name"].lower()):
        metadata = found.metadata
        assert isinstance(metadata, Message)
        yield from pieces(str(metadata.get_payload() or ""), most=6)


def french() -> Iterator[str]:
    texts: list[str] = []
    for path in sorted(Path("/usr/share/locale/fr/LC_MESSAGES").glob("*.mo")):
        with path.open("rb") as file:
            try:
                catalog: Any = gettext.GNUTranslations(file)
            except (UnicodeDecodeError, OSError):
                continue
        texts += [text for key, text in catalog._catalog.items() if key and isinstance(text, str)]
    yield from pieces("\n".join(texts), most=1000)


def pieces(text: str, most: int) -> list[str]:
    found = [text[start : start + 1500] for start in range(0, len(text), 1500)]
    return [piece for piece in found if len(piece) > 500][:most]


async def counted(
    texts: Iterable[str], most: int, export: Path, calibration: Calibration, directory: Path
) -> list[LiveWindow]:
    """Serves prompts of at most `most` tokens, one after another; returns the counts of each."""
    backend = EmbeddedBackend(export, count=Counting(directory, 1, 1 << 40))
    await backend.start()
    started = backend._require_started()
    runner = started.engine._runner
    assert isinstance(runner, OnnxRunner) and runner.live is not None
    for number, text in enumerate(texts):
        ids = tuple(started.tokenizer.encode(text)[:most])
        request = GenerateRequest(
            request_id=str(number),
            model=backend.models[0],
            prompt=ids,
            max_tokens=ANSWER,
            temperature=0,
            ignore_eos=True,
        )
        async for _ in backend.generate(request):
            pass
        runner.live.flush()
    runner.live.close()  # else the last window may still be on its way to the file
    await backend.close()
    return read_live(directory, calibration)


@dataclass(frozen=True)
class Joined:
    """Prompts as one window."""

    prompts: list[LiveWindow]
    began = ended = 0.0

    @property
    def tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(prompt.names for prompt in self.prompts))

    def counts(self, name: str) -> Any:
        return np.sum([prompt.counts(name) for prompt in self.prompts], axis=0)


def drawn(prompts: list[LiveWindow], windows: int, rng: np.random.Generator) -> list[Any]:
    """Joins prompts in random order until there are `windows`."""
    found, part = [], list[LiveWindow]()
    for index in rng.permutation(len(prompts)):
        part.append(prompts[index])
        if sum(prompt.tokens for prompt in part) >= WINDOW:
            found.append(Joined(part))
            part = []
        if len(found) == windows:
            return found
    raise ValueError(f"{len(prompts)} prompts are too few for {windows} windows")


def row(name: str, windows: int, runs: list[Drift]) -> dict[str, Any]:
    return {
        "traffic": name,
        "windows": windows,
        "tokens": round(float(np.mean([run.tokens for run in runs]))),
        "runs": len(runs),
        "alarms": sum(run.drifted for run in runs),
        "distance": float(np.median([run.distance for run in runs])),
        "limit": float(np.median([run.limit for run in runs])),
    }


def mixed(one: list[LiveWindow], other: list[LiveWindow], share: float) -> list[LiveWindow]:
    """Returns prompts of which `share` are of `other`."""
    count = min(len(one), len(other))
    of_other = round(share * count)
    return one[: count - of_other] + other[:of_other]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("export", type=Path)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    live.KEPT = 1 << 20  # the prompts of a run, each in a file
    calibration = Calibration.load(given.calibration)
    samples = calibration.manifest.samples
    assert samples is not None  # only an export may lack it
    kinds: dict[str, Callable[[], Iterator[str]]] = {"code": code, "prose": prose, "French": french}
    rng = np.random.default_rng(SEED)
    counts: dict[str, list[LiveWindow]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, texts in kinds.items():
            chosen = list(texts())
            chosen = [chosen[i] for i in rng.permutation(len(chosen))[: PROMPTS[name]]]
            counts[name] = asyncio.run(
                counted(chosen, samples.max_length, given.export, calibration, Path(scratch) / name)
            )
            print(name, len(chosen), "prompts", sum(x.tokens for x in counts[name]), "tokens")
        traffic = {
            "code": counts["code"],
            "prose": counts["prose"],
            "French": counts["French"],
            "half prose": mixed(counts["code"], counts["prose"], 0.5),
            "a quarter prose": mixed(counts["code"], counts["prose"], 0.25),
        }
        rows = []
        for name, prompts in traffic.items():
            for windows in SIZES:
                quiet = name == "code" and windows == SIZES[-1]
                repeats = QUIET if quiet else CHANGED
                runs = [
                    compare_live(calibration, drawn(prompts, windows, rng)) for _ in range(repeats)
                ]
                rows.append(row(name, windows, runs))
                print(rows[-1], flush=True)
    facts = conditions(
        recipe=calibration.manifest.recipe.name,
        seed=SEED,
        samples=samples.count,
        max_length=samples.max_length,
        window_tokens=WINDOW,
        prompts=PROMPTS,
        false_alarms=runs[0].false_alarms,
        tolerance=runs[0].tolerance,
    )
    report("drift", facts, rows, given.output)


if __name__ == "__main__":
    main()
