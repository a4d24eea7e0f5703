"""Reports the findings about a running server, for people in 80 columns and for machines."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octet.proof.verdict import Verdict
from octet.tables import fitted
from serve.proof.engine_report import EngineReport
from serve.proof.probe import ClientView, Probed

__all__ = ["RESTARTED", "ServerReport", "in_words", "show"]

RESTARTED = "it was restarted or reloaded while prompts were sent: run this again"
_NO_DATE = 2**37  # seconds since 1970: a value after the year 6000 is not a date
_NEAREST = 5  # scenarios that are shown without --all
_STYLES = {"as_expected": "green", "inconclusive": "yellow"}
_ENGINES = {"vllm": "vLLM", "triton": "Triton", "embedded": "Octet", "openai": "an OpenAI server"}


@dataclass
class ServerReport:
    """The findings about the server at `url`."""

    url: str
    model: str
    declared: str  # the declared configuration
    artifact: str  # the identity of the artifact that it is compared with
    engine: EngineReport | None = None
    verdict: Verdict | None = None
    asked: int = 0  # golden prompts that were sent
    answered: int = 0  # of these
    missing: int = 0  # prompts that were sent and never answered
    stopped: bool = False  # the server went away before the verdict was clear
    restarted: bool = False  # two processes answered, so nothing is known of either
    tokens: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)  # faults outside the log-probabilities
    defaults: list[str] = field(default_factory=list)  # of these, those of the server's defaults
    checkpoint: dict[str, Any] | None = None  # `octet verify` of the checkpoint that it serves
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def add(self, probed: Probed, missing: int) -> None:
        """Adds the results of one look, after which `missing` prompts are not answered."""
        self.missing = missing
        self.asked += len(probed.responses) + len(probed.failures)
        self.answered += len(probed.responses)
        self.tokens += probed.tokens
        self.seconds += probed.seconds
        self.notes += [note for note in probed.notes if note not in self.notes]
        cached = not probed.salted and self.engine is not None and self.engine.caches_prefixes
        if cached and _PREFIXES not in self.unchecked:
            self.unchecked.append(_PREFIXES)

    def add_view(self, view: ClientView) -> None:
        """Adds the comparison of the server's defaults, which apply to what requests leave out."""
        self.findings += [*filter(None, (view.tokenizer,)), *view.differences]
        self.defaults += view.differences
        self.unchecked += view.unchecked
        self.tokens += view.tokens

    @property
    def exit_code(self) -> int:
        """Returns 0: conforming; 1: non-conforming; 2: log-probabilities could not be checked.

        3: nothing contradicts it, but only a coarse bound was tested.
        """
        outcome = self.verdict.outcome if self.verdict else "inconclusive"
        if self.restarted:
            return 2
        if self.findings or outcome in ("better", "worse"):
            return 1
        if outcome == "inconclusive" or self.missing:
            return 2
        return 3 if self.verdict is not None and self.verdict.weak else 0

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _FIELDS},
            "unchecked": _unchecked(self, True),
            "engine": None if self.engine is None else asdict(self.engine),
            "verdict": None if self.verdict is None else self.verdict.as_json(),
            "exit_code": self.exit_code,
        }


_PREFIXES = "its kernels: it takes no cache_salt, so answers may come from its prefix cache"
_FIELDS = (
    *("url", "model", "declared", "artifact"),
    *("asked", "answered", "missing", "stopped", "restarted", "tokens", "seconds"),
    *("findings", "checkpoint", "notes"),
)


def show(found: ServerReport, console: Console, *, show_all: bool = False) -> None:
    """Prints the whole report, the verdict last."""
    verdict = found.verdict
    console.print(Text.assemble((found.url, "bold"), f": model {found.model}{_engine(found)}"))
    console.print(_facts(found))
    if verdict is not None and verdict.measure.prompts:
        console.print(fitted(_figures(verdict), console))
        if verdict.ranking:
            most = len(verdict.ranking) if show_all else _NEAREST
            console.print(fitted(_ranking(verdict, most), console))
    for label, style, lines in (
        ("wrong", "red", found.findings),
        ("note", "dim", found.notes),
        ("not checked", "yellow", _unchecked(found, show_all)),
    ):
        for line in lines:
            _say(console, Text(f"{label}: {line}", style=style), 2)
    _say(console, _verdict(found), 0)


def _say(console: Console, text: Text, indent: int) -> None:
    """Prints text wrapped on a terminal; in a pipe as one line, which `grep` finds whole."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)), highlight=False)
    else:
        console.print(Text(" " * indent) + text, highlight=False, soft_wrap=True)


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
    rows = [("declared", f"{found.declared} (artifact {found.artifact[:12]})")]
    if found.engine is not None and (said := ", ".join(_said(found.engine))):
        rows.append(("reports", said))
    few = "" if found.answered == found.asked else f" ({found.answered} answered)"
    cost = f"{found.tokens:,} tokens in {found.seconds:.1f} s"
    rows.append(("sent", f"{found.asked} golden prompts{few}, {cost}"))
    if found.verdict is not None:
        measure, path = found.verdict.measure, found.verdict.path
        rows.append(
            ("agreement", f"{measure.agreement:.1%} of greedy tokens, up to the first difference")
        )
        if measure.perplexity_change is not None:
            change = (
                f"{measure.perplexity_change:+.2%} on the prompts: one figure, without an interval"
            )
            rows.append(("perplexity", change))
        if path is not None:
            rows.append(
                ("compared with", f"{in_words(path.label)}: the nearest conforming way to compute")
            )
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    return table


def _said(engine: EngineReport) -> Iterator[str]:
    if engine.cache_dtype:
        yield f"cache {engine.cache_dtype}"
    if engine.context:
        yield f"context {engine.context:,}"
    if engine.started and engine.started < _NO_DATE:
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
        table.add_row("expected of a conforming one", f"{expected.mean:.3g}", honest, "", "")
    return table


def _ranking(verdict: Verdict, most: int) -> Table:
    """Tabulates the likeliest scenarios, and always the conforming one that z compares with."""
    scores, base = verdict.ranking, None if verdict.path is None else verdict.path.label
    shown = [score for i, score in enumerate(scores) if i < most or score.label == base]
    title = "scenarios that explain the answers"
    if len(shown) < len(scores):
        title += f", {len(shown)} of {len(scores)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("scenario", overflow="fold")
    table.add_column("log-likelihood", justify="right", no_wrap=True)
    table.add_column("z", justify="right", no_wrap=True)
    for score in shown:
        hidden = " (too close to tell)" if score.label in verdict.hidden else ""
        z = "conforming" if score.label == base else f"{score.z:+.1f}"
        table.add_row(Text(in_words(score.label) + hidden), f"{score.log_likelihood:.3f}", z)
    return table


def in_words(label: str) -> str:
    """Rewords a scenario's label for people; --json has the label itself."""
    path, semicolon, fault = label.partition("; ")
    if path.startswith("nothing, "):
        path = path.replace("nothing", "unquantized", 1)
    fault = fault.replace("_", " ").replace("k scale", "k_scale").replace("v scale", "v_scale")
    return path + semicolon + fault


def _unchecked(found: ServerReport, show_all: bool) -> list[str]:
    hidden = found.verdict.hidden if found.verdict else ()
    if not hidden:
        return found.unchecked
    names = "; ".join(f"({in_words(label)})" for label in hidden)
    if not show_all and len(hidden) > 1:
        names = f"({in_words(hidden[0])}) and {len(hidden) - 1} more (--all)"
    return [*found.unchecked, f"faults that cannot be told from a conforming server: {names}"]


def _verdict(found: ServerReport) -> Text:
    verdict = found.verdict
    outcome = verdict.outcome if verdict else "inconclusive"
    if found.restarted:
        return Text(f"inconclusive: {RESTARTED}", style="yellow")
    if found.findings and (verdict is None or outcome in _STYLES):
        count = len(found.findings)
        said = f"wrong: {count} finding{'s' if count > 1 else ''} besides the log-probabilities"
        return Text(said + ("" if verdict is None else f"; {verdict.reason}"), style="red")
    if verdict is None:
        return Text("its log-probabilities could not be checked", style="yellow")
    if found.missing and outcome in _STYLES:
        said = f"inconclusive: {found.missing} golden prompts were not answered"
        said += "; it stopped answering: run this again once it is back" if found.stopped else ""
        return Text(said, style="yellow")
    if verdict.weak:
        return Text(verdict.reason, style="yellow")
    word = {"as_expected": "right: ", "better": "wrong: ", "worse": "wrong: "}.get(outcome, "")
    return Text(word + verdict.reason, style=_STYLES.get(outcome, "red"))
