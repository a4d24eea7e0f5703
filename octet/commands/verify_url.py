"""`octet verify URL`: asks a running server the golden prompts of an artifact, and judges it."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import ValidationError
from rich.console import Console

from octet.errors import BackendUnavailable, ConfigError, OctetError
from octet.proof.artifact import load_proofs
from octet.proof.declared import Engine
from octet.proof.measure import measure
from octet.proof.responses import Response
from octet.recipe import KvCacheDtype

if TYPE_CHECKING:
    from serve.backends.base import Backend
    from serve.config import BackendConfig
    from serve.proof.golden_exam import GoldenExam
    from serve.proof.report import ServerReport

__all__ = ["SCHEMES", "Asked", "verify_url"]

SCHEMES = ("http", "https", "grpc", "triton")
_ASIDE_S = 10.0  # for the question why it does not answer
_NO_LOGPROBS = (
    "its numbers: it returns no log-probabilities (vLLM: start it with --max-logprobs 20)"
)


@dataclass(frozen=True)
class Asked:
    """What the command line says of a server."""

    url: str
    golden: Path
    model: str | None = None
    api_key_env: str | None = None
    weights: Literal["quantized", "original"] = "quantized"
    kv_cache: KvCacheDtype | None = None
    engine: Engine | None = None
    checkpoint: Path | None = None
    seed: int = 0
    every_prompt: bool = False
    concurrency: int = 8
    timeout_s: float = 120.0


def verify_url(asked: Asked, *, as_json: bool = False, console: Console | None = None) -> int:
    """Prints what was found, and returns the exit code: 0 right, 1 wrong, 2 not checkable.

    Raises an OctetError for a server that cannot be asked at all.
    """
    from serve.proof.report import show

    checked = None if asked.checkpoint is None else _checkpoint(asked.checkpoint, asked.golden)
    found = asyncio.run(_check(asked, console))
    if checked is not None:
        found.findings += [line for line in checked.findings if line not in found.findings]
        found.unchecked += checked.unchecked
        found.checkpoint = checked.report
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        show(found, Console(), show_all=asked.every_prompt)
    return found.exit_code


async def _check(asked: Asked, console: Console | None) -> "ServerReport":
    from serve.config.proof import Proof
    from serve.proof.golden_exam import GoldenExam
    from serve.proof.report import ServerReport
    from serve.proof.structure import engine_report, structural_findings

    settings = Proof(
        golden=asked.golden, weights=asked.weights, kv_cache=asked.kv_cache, engine=asked.engine
    )
    exam = GoldenExam.load(asked.golden, settings)
    backend = await _reached(asked)
    try:
        engine = await engine_report(backend)
        model = backend.models[0]
        found = ServerReport(asked.url, model, exam.declared.label, exam.identity, engine)
        if engine is not None:
            found.findings += structural_findings(engine, exam.proofs, exam.declared, asked.golden)
        await _ask(backend, exam, asked, found, console)
    finally:
        await backend.close()
    return found


async def _ask(
    backend: "Backend",
    exam: "GoldenExam",
    asked: Asked,
    found: "ServerReport",
    console: Console | None,
) -> None:
    """Look after look, until the verdict is clear; prompts that failed once more with the next."""
    looks = exam.looks(asked.seed, backend.context_length)
    if asked.every_prompt:
        looks = [tuple(record for look in looks for record in look)]
    responses: list[Response] = []
    missing: list[int] = []
    for look in (*looks, ()):
        records = (*look, *missing)
        if not records:
            break
        if console is not None:
            console.print(f"asking {len(records)} golden prompts ...", style="dim")
        probed = await exam.ask(
            backend, records, concurrency=asked.concurrency, timeout_s=asked.timeout_s
        )
        responses += probed.responses
        if not responses:
            raise BackendUnavailable(f"{backend.name}: {'; '.join(probed.notes)}")
        missing = [failure.record for failure in probed.failures if failure.kind != "context"]
        found.add(probed, len(missing))
        if not probed.alternatives and probed.responses:
            break
        found.verdict = await exam.judge(responses, len(looks))
        if found.verdict.outcome in ("better", "worse"):
            break
        if missing and not await backend.ready():
            found.stopped = True
            return
        if found.verdict.outcome == "as_expected" and not missing:
            break
    await _add_prompts(backend, exam, asked, found, responses, len(looks))


async def _add_prompts(
    backend: "Backend",
    exam: "GoldenExam",
    asked: Asked,
    found: "ServerReport",
    responses: list[Response],
    looks: int,
) -> None:
    """The change in perplexity, if it can be measured; or, without log-probabilities, agreement."""
    from serve.proof.scores import with_prompts

    golden = exam.proofs.golden
    if found.verdict is None:
        share = measure(golden, responses).agreement
        found.notes.append(f"{share:.1%} of its greedy tokens are the reference's")
        found.unchecked.append(_NO_LOGPROBS)
    elif all(golden.records[response.record].prompt_nll is None for response in responses):
        found.unchecked.append("perplexity: the golden records are of an earlier release")
    else:
        scored, why_not = await with_prompts(
            backend, golden, responses, concurrency=asked.concurrency, timeout_s=asked.timeout_s
        )
        if why_not is None:
            found.verdict = await exam.judge(scored, looks)
        else:
            found.unchecked.append(f"perplexity: {why_not}")


async def _reached(asked: Asked) -> "Backend":
    """A started backend that is there. Raises OctetError."""
    if asked.url.partition("://")[0] in ("http", "https"):
        backend = await _openai(asked)
    else:
        backend = await _started(*_triton(asked))
    if not await backend.ready():
        await backend.close()
        if asked.url.startswith("http"):
            await _require_answer(asked.url)
        raise BackendUnavailable(f"{asked.url}: does not answer, or is not ready")
    return backend


async def _require_answer(url: str) -> None:
    """Raises BackendUnavailable, with the reason, where no server can be talked to."""
    from serve.evaluation.client import Client

    try:
        async with asyncio.timeout(_ASIDE_S), Client(url, None) as client:
            await client.ask("/v1/models")
    except TimeoutError:
        raise BackendUnavailable(f"{url}: no answer within {_ASIDE_S:g} s") from None
    except BackendUnavailable as error:
        if error.kind in ("refused", "lost", "garbled", "timeout"):
            raise
    except OctetError:
        pass  # it answers


async def _openai(asked: Asked) -> "Backend":
    """vLLM is asked as vLLM: it names tokens by id."""
    from serve.config import HttpConfig
    from serve.proof.structure import engine_report

    def config(kind: Literal["vllm", "openai"], model: str | None) -> HttpConfig:
        try:
            return HttpConfig(type=kind, url=asked.url, model=model, api_key_env=asked.api_key_env)
        except ValidationError as error:
            raise _refused(asked, error) from None

    backend = await _started(asked.model or "", config("openai", asked.model))
    try:
        model = asked.model or await _only_model(asked.url, backend)
        report = await engine_report(backend)
    finally:
        await backend.close()
    kind: Literal["vllm", "openai"] = "openai"
    if report is not None and report.engine == "vllm":
        kind = "vllm"
    return await _started(model, config(kind, model))


async def _only_model(url: str, backend: "Backend") -> str:
    """The one that it serves. Raises OctetError where there are several, or it does not say."""
    from serve.backends.openai_http import OpenAiHttpBackend

    assert isinstance(backend, OpenAiHttpBackend)
    status, body = await backend.get("/v1/models")
    try:
        names = [card["id"] for card in json.loads(body)["data"] if not card.get("parent")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        if not status:
            await _require_answer(url)
            raise BackendUnavailable(f"{url}: cannot be reached") from None
        said = "it refuses the key" if status in (401, 403) else f"it answered {status}"
        raise ConfigError(f"{url}: /v1/models does not list models: {said}") from None
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise ConfigError(f"{url}: serves {len(names)} models ({listed}): name one with --model")
    return str(names[0])


def _triton(asked: Asked) -> "tuple[str, BackendConfig]":
    from serve.config import TritonConfig

    parts = urlsplit(asked.url)
    model = parts.path.strip("/") or asked.model
    if not model or (asked.model and asked.model != model):
        raise ConfigError(f"{asked.url}: name its model once: with --model, or after the port")
    tokenizer = asked.golden if (asked.golden / "tokenizer.json").is_file() else None
    try:
        return model, TritonConfig(
            type="triton", url=parts.netloc, model=model, tokenizer=tokenizer
        )
    except ValidationError as error:
        raise _refused(asked, error) from None


def _refused(asked: Asked, error: ValidationError) -> ConfigError:
    return ConfigError(f"{asked.url}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")


async def _started(model: str, config: "BackendConfig") -> "Backend":
    from serve.routing.make import make_backend

    backend = make_backend(model, config)
    await backend.start()
    return backend


@dataclass(frozen=True)
class _Checked:
    """What was found about the checkpoint that a server serves."""

    findings: list[str]
    unchecked: list[str]
    report: dict[str, Any]  # as `octet verify DIR --json` has it


def _checkpoint(directory: Path, golden: Path) -> _Checked:
    """As `octet verify DIR` sees it, and beside the artifact whose golden records are asked.

    Raises OctetError for what cannot be checked at all.
    """
    from export.verify import verify
    from serve.proof.served import differences

    proofs = load_proofs(golden)
    beside = differences(directory, golden, proofs, trusted=True)
    made_from = proofs.manifest.kind == "calibration" and not any("another" in x for x in beside)
    checked = verify(directory, calibration=golden if made_from else None)
    return _Checked(
        [f"the checkpoint: {problem}" for problem in checked.problems] + beside,
        [f"of the checkpoint, {_elsewhere(text, directory)}" for text in checked.unchecked],
        checked.as_json(),
    )


def _elsewhere(text: str, directory: Path) -> str:
    """Beside a URL, --model is the server's name for it."""
    if not text.startswith("numbers:"):
        return text
    return f"numbers: `octet verify {directory} --model ORIGINAL` compares them with the original"
