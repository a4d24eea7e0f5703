"""`octet verify URL`: sends an artifact's golden prompts to a running server, and judges it."""

import asyncio
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from octet.errors import BackendUnavailable, GateError
from octet.proof.divergence import measure
from octet.proof.reference import load_proofs
from octet.proof.responses import Response
from verify.server.connect import Query, reached

if TYPE_CHECKING:
    from serve.backends.base import Backend
    from serve.proof.golden_exam import GoldenExam
    from verify.server.report import ServerReport

__all__ = ["require_proven", "verify_url"]

_NO_LOGPROBS = (
    "its answers: it returns no log-probabilities (vLLM: start it with --max-logprobs 20)"
)


def verify_url(query: Query, *, as_json: bool = False, console: Console | None = None) -> int:
    """Prints the report and returns its exit code: 0 conforming, 1 non-conforming, 2 not checkable.

    Raises an OctetError for a server that cannot be queried at all.
    """
    from verify.server.report import show

    checked = None if query.checkpoint is None else _checkpoint(query.checkpoint, query)
    found = asyncio.run(_check(query, console))
    if checked is not None:
        found.findings += [line for line in checked.findings if line not in found.findings]
        found.unchecked += checked.unchecked
        found.checkpoint = checked.report
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        show(found, Console(soft_wrap=not sys.stdout.isatty()), show_all=query.every_prompt)
    return found.exit_code


def require_proven(query: Query, *, console: Console | None = None) -> str:
    """Checks the server of `query` before a measurement; returns a sentence about its proof.

    A server of the original weights is accepted in place of one of the quantized ones, and so is
    one whose log-probabilities cannot be checked. The server's defaults are not compared. Raises
    GateError, with the cause, for a server that does not match the artifact.
    """
    from verify.server.report import RESTARTED

    found = asyncio.run(_check(query, console))
    declared = ""
    if found.verdict is not None and found.verdict.outcome == "better":
        # Its cache is most likely not the artifact's either.
        for kv_cache in dict.fromkeys((query.kv_cache or "float16", query.kv_cache)):
            declaration = replace(query, weights="original", kv_cache=kv_cache)
            original = asyncio.run(_check(declaration, console))
            if original.verdict is not None and original.verdict.outcome == "as_expected":
                found, declared = original, "it serves the original weights, unquantized: "
                if not _mismatches(original):
                    break
    if found.restarted:
        return f"not proven: {RESTARTED}"
    reasons = _mismatches(found)
    outcome = "inconclusive" if found.verdict is None else found.verdict.outcome
    if found.verdict is not None:
        reasons.append(found.verdict.reason)
    if outcome in ("better", "worse") or len(reasons) > (found.verdict is not None):
        raise GateError(
            f"{query.url}: does not match {query.golden}: {'; '.join(reasons)}. Nothing was"
            " measured; leave out --golden to measure it anyway"
        )
    if found.verdict is None or found.missing or outcome == "inconclusive":
        return f"not proven: {'; '.join([*reasons, *found.unchecked]) or 'no verdict'}"
    return f"proven: {declared}{found.verdict.reason}"


def _mismatches(found: "ServerReport") -> list[str]:
    """Returns the findings, without those about what clients get by default."""
    return [line for line in found.findings if line not in found.defaults]


async def _check(query: Query, console: Console | None) -> "ServerReport":
    from serve.proof.engine_report import engine_report, structural_findings
    from serve.proof.golden_exam import GoldenExam
    from verify.server.report import ServerReport

    exam = GoldenExam.load(query.golden, query.proof())
    backend = await reached(query)
    try:
        before, engine = await backend.incarnation(), await engine_report(backend)
        model = backend.models[0]
        found = ServerReport(query.url, model, exam.declared.label, exam.identity, engine)
        if engine is not None:
            found.findings += structural_findings(engine, exam.proofs, exam.declared, query.golden)
        found.notes += _notes_on_cache(exam)
        found.notes += [exam.power] if exam.power else []
        await _ask(backend, exam, query, found, console)
        if not found.stopped:
            found.add_view(await exam.client_view(backend, timeout_s=query.timeout_s))
            after = await backend.incarnation()
            if before is not None and after is not None:  # a reload or a restart ends a proof
                found.restarted = not after.follows(before)
    finally:
        await backend.close()
    return found


def _notes_on_cache(exam: "GoldenExam") -> list[str]:
    """Returns a note if the declared cache is not the one whose scales the artifact has."""
    kept, own = exam.declared.kv_cache, exam.proofs.kv_cache
    if exam.declared.weights == "original" or "float16" in (kept, own) or kept in (None, own):
        return []
    return [
        f"the artifact's scales of keys and values are for an {own} cache, and {kept} is declared:"
        f" for scales of its own, export with --kv {kept}"
    ]


async def _ask(
    backend: "Backend",
    exam: "GoldenExam",
    query: Query,
    found: "ServerReport",
    console: Console | None,
) -> None:
    """Sends the prompts look by look (interim analyses), until the verdict is clear.

    Prompts that failed are sent again with the next look.
    """
    from serve.proof.probe import Unprovable

    parts = exam.parts(query.seed, backend.context_length)
    if not parts:
        raise Unprovable.in_context(backend.name, backend.context_length)
    if query.every_prompt:
        parts = [tuple(record for look in parts for record in look)]
    parts.append(())  # a last look, for prompts that are still missing
    responses: list[Response] = []
    missing: list[int] = []
    too_long: set[int] = set()
    for look in parts:
        records = (*look, *missing)
        if not records:
            break
        if console is not None:
            console.print(f"sending {len(records)} golden prompts ...", style="dim")
        probed = await exam.probe(
            backend, records, concurrency=query.concurrency, timeout_s=query.timeout_s
        )
        responses += probed.responses
        if not responses:
            raise BackendUnavailable(f"{backend.name}: {'; '.join(probed.notes)}")
        missing = probed.missing
        too_long |= probed.too_long
        found.add(probed, len(missing))
        if not probed.alternatives and probed.responses:
            break
        found.verdict = await exam.judge(responses, len(parts))
        left_out = exam.left_out(backend.context_length, too_long)
        found.verdict = found.verdict.leaving_out(left_out)
        if found.verdict.outcome in ("better", "worse"):
            break
        if missing and not await backend.ready():
            found.stopped = True
            return
        if found.verdict.outcome == "as_expected" and not missing:
            break
    await _add_prompts(backend, exam, query, found, responses, len(parts))


async def _add_prompts(
    backend: "Backend",
    exam: "GoldenExam",
    query: Query,
    found: "ServerReport",
    responses: list[Response],
    parts: int,
) -> None:
    """Adds the change in perplexity, if measurable; without log-probabilities, the agreement."""
    from verify.server.perplexity import with_prompts

    golden = exam.proofs.golden
    if found.verdict is None:
        share = measure(golden, responses).agreement
        found.notes.append(f"{share:.1%} of its greedy tokens are the reference's")
        found.unchecked.append(_NO_LOGPROBS)
    elif all(golden.records[response.record].prompt_nll is None for response in responses):
        found.unchecked.append("perplexity: the golden records are of an earlier release")
    else:
        scored, why_not = await with_prompts(
            backend, golden, responses, concurrency=query.concurrency, timeout_s=query.timeout_s
        )
        if why_not is None:
            left_out = found.verdict.left_out
            found.verdict = (await exam.judge(scored, parts)).leaving_out(left_out)
        else:
            found.unchecked.append(f"perplexity: {why_not}")


@dataclass(frozen=True)
class _Checked:
    """The findings about the checkpoint that a server serves."""

    findings: list[str]
    unchecked: list[str]
    report: dict[str, Any]  # as printed by `octet verify DIR --json`


def _checkpoint(directory: Path, query: Query) -> _Checked:
    """Checks a checkpoint as `octet verify DIR` does, and compares it with the golden artifact.

    Raises OctetError for a checkpoint that cannot be checked at all.
    """
    from serve.proof.served_files import differences
    from verify.artifact import verify

    golden = query.golden
    proofs = load_proofs(golden, query.key)
    beside = differences(directory, golden, proofs, trusted=True)
    made_from = proofs.manifest.kind == "calibration" and not any("another" in x for x in beside)
    checked = verify(directory, calibration=golden if made_from else None)
    return _Checked(
        [f"the checkpoint: {problem}" for problem in checked.problems] + beside,
        [f"of the checkpoint, {_elsewhere(text, directory)}" for text in checked.unchecked],
        checked.as_json(),
    )


def _elsewhere(text: str, directory: Path) -> str:
    """Rewords a hint about --model, which with a URL is the server's name for the model."""
    if not text.startswith("numbers:"):
        return text
    return f"numbers: `octet verify {directory} --model ORIGINAL` compares them with the original"
