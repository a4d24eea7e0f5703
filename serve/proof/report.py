"""What was found out about a running server, for people in 80 columns and for machines."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octet.proof.verdict import Score, Verdict
from serve.proof.probe import Probed
from serve.proof.structure import EngineReport

__all__ = ["ServerReport", "show"]

_NEAREST = 5  # hypotheses that are shown without --all
_STYLES = {"as_expected": "green", "inconclusive": "yellow"}
_ENGINES = {"vllm": "vLLM", "triton": "Triton", "embedded": "Octet", "openai": "an OpenAI server"}


@dataclass
class ServerReport:
    """The findings about the server at `url`."""

    url: str
    model: str
    declared: str  # what it is held to be
    artifact: str  # the identity of what it is held against
    engine: EngineReport | None = None
    verdict: Verdict | None = None
    asked: int = 0  # golden prompts
    tokens: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)  # what is wrong beside the numbers
    checkpoint: dict[str, Any] | None = None  # `octet verify` of the one that it serves
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def add(self, probed: Probed) -> None:
        """What came of one look."""
        self.asked += len(probed.responses) + len(probed.failures)
        self.tokens += probed.tokens
        self.seconds += probed.seconds
        self.notes += [note for note in probed.notes if note not in self.notes]
        cached = not probed.salted and self.engine is not None and self.engine.caches_prefixes
        if cached and _PREFIXES not in self.unchecked:
            self.unchecked.append(_PREFIXES)

    @property
    def exit_code(self) -> int:
        """0: right; 1: wrong; 2: its numbers could not be checked."""
        outcome = self.verdict.outcome if self.verdict else "inconclusive"
        if self.findings or outcome in ("better", "worse"):
            return 1
        return 2 if outcome == "inconclusive" else 0

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _FIELDS},
            "engine": None if self.engine is None else asdict(self.engine),
            "verdict": None if self.verdict is None else self.verdict.as_json(),
            "exit_code": self.exit_code,
        }


_PREFIXES = (
    "whether its kernels answered: it takes no cache_salt, and its prefix cache may have answered"
)
_FIELDS = (
    *("url", "model", "declared", "artifact", "asked", "tokens", "seconds"),
    *("findings", "checkpoint", "notes", "unchecked"),
)


def show(found: ServerReport, console: Console, *, show_all: bool = False) -> None:
    """All of it, the verdict last."""
    verdict = found.verdict
    console.print(Text.assemble((found.url, "bold"), f": model {found.model}{_engine(found)}"))
    console.print(_facts(found))
    if verdict is not None:
        console.print(_figures(verdict))
        if verdict.ranking:
            most = len(verdict.ranking) if show_all else _NEAREST
            console.print(_ranking(verdict.ranking, most))
    for label, style, lines in (
        ("wrong", "red", found.findings),
        ("note", "dim", found.notes),
        ("not checked", "yellow", _unchecked(found, show_all)),
    ):
        for line in lines:
            console.print(Padding(Text(f"{label}: {line}", style=style), (0, 0, 0, 2)))
    console.print(_verdict(found), highlight=False)


def _engine(found: ServerReport) -> str:
    engine = found.engine
    if engine is None:
        return ""
    built = f" ({engine.machine.upper()})" if engine.machine else ""
    return f" on {_ENGINES[engine.engine]} {engine.version or ''}".rstrip() + built


def _facts(found: ServerReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=12, no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("held to be", f"{found.declared} (artifact {found.artifact[:12]})")]
    if found.engine is not None and (said := ", ".join(_said(found.engine))):
        rows.append(("says", said))
    rows.append(
        ("asked", f"{found.asked} golden prompts, {found.tokens:,} tokens in {found.seconds:.1f} s")
    )
    if found.verdict is not None:
        measure, path = found.verdict.measure, found.verdict.path
        rows.append(
            ("agreement", f"{measure.agreement:.1%} of greedy tokens, up to the first other")
        )
        if measure.perplexity_change is not None:
            rows.append(("perplexity", f"{measure.perplexity_change:+.2%} on the prompts"))
        if path is not None:
            rows.append(("most like", path.label))
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    return table


def _said(engine: EngineReport) -> Iterator[str]:
    if engine.cache_dtype:
        yield f"cache {engine.cache_dtype}"
    if engine.context:
        yield f"context {engine.context:,}"
    if engine.started:
        yield f"since {datetime.fromtimestamp(engine.started, UTC):%Y-%m-%d %H:%M:%S} UTC"
    for name, value in engine.facts.items():
        yield f"{name} {value}"
    if engine.root:
        yield f"from {engine.root}"


def _figures(verdict: Verdict) -> Table:
    measure, expected = verdict.measure, verdict.expected
    title = f"{measure.positions} positions of {measure.prompts} prompts"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("KL from the reference, nats")
    for name in ("mean", "95 % interval", "p90", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    interval = f"{measure.kl_low:.3g} to {measure.kl_high:.3g}"
    tail = (f"{measure.kl_p90:.3g}", f"{measure.kl_max:.3g}")
    table.add_row("measured", f"{measure.kl_mean:.3g}", interval, *tail)
    if expected is not None:
        honest = f"{expected.low:.3g} to {expected.high:.3g}"
        table.add_row("expected of an honest one", f"{expected.mean:.3g}", honest, "", "")
    return table


def _ranking(scores: Sequence[Score], most: int) -> Table:
    shown = scores[:most]
    title = "what explains the answers"
    if len(shown) < len(scores):
        title += f", nearest {len(shown)} of {len(scores)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("hypothesis", overflow="fold")
    table.add_column("log-likelihood", justify="right", no_wrap=True)
    table.add_column("z", justify="right", no_wrap=True)
    for score in shown:
        table.add_row(Text(score.label), f"{score.log_likelihood:.3f}", f"{score.z:+.1f}")
    return table


def _unchecked(found: ServerReport, show_all: bool) -> list[str]:
    hidden = found.verdict.hidden if found.verdict else ()
    if not hidden:
        return found.unchecked
    names = (
        "; ".join(hidden)
        if show_all
        else f"{hidden[0]}" + (f" and {len(hidden) - 1} more (--all)" if len(hidden) > 1 else "")
    )
    return [*found.unchecked, f"these numbers cannot show: {names}"]


def _verdict(found: ServerReport) -> Text:
    verdict = found.verdict
    outcome = verdict.outcome if verdict else "inconclusive"
    if found.findings and (verdict is None or outcome in _STYLES):
        count = len(found.findings)
        said = f"wrong: {count} finding{'s' if count > 1 else ''} beside the numbers"
        return Text(said + ("" if verdict is None else f"; {verdict.reason}"), style="red")
    if verdict is None:
        return Text("its numbers could not be checked", style="yellow")
    word = {"as_expected": "right: ", "better": "wrong: ", "worse": "wrong: "}.get(outcome, "")
    return Text(word + verdict.reason, style=_STYLES.get(outcome, "red"))
