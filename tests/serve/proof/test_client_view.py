"""What clients get by default, of fake servers whose defaults are known."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from octet.errors import RequestError
from serve.backends.embedded import EmbeddedBackend
from serve.config.proof import Proof
from serve.engine.sampler import log_softmax
from serve.proof.golden_exam import GoldenExam
from serve.proof.probe import ClientView
from tests.fake_servers import FakeOpenAI, running
from tests.fakes import FakeRunner, byte_tokenizer, fake_logits
from tests.serve.openai_clients import started
from tests.serve.proof.fake_proofs import write_proofs
from tests.verify.server.verifying import run_verify, serving

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
END = 0


class Server(FakeOpenAI):
    """vLLM with defaults: whole answers are drawn as it draws them, penalties included."""

    def __init__(self) -> None:
        super().__init__()
        self.defaults: dict[str, Any] = {}
        self.stops: tuple[int, ...] = (END,)
        self.rotated = 0  # tokens from 100 on that its tokenizer names otherwise
        self.tokenizes = True
        self.most = 20  # log-probabilities of a token
        self.silent = False  # sends fewer, where it would refuse more
        self.counts = True  # gives as many choices as `n` says

    async def _whole(self, wanted: Any, body: dict[str, Any], named: Any) -> Any:
        if "messages" in body:
            return await super()._whole(wanted, body, named)
        if not self.silent and (body.get("logprobs") or 0) > self.most:
            raise RequestError(f"logprobs must be at most {self.most}", param="logprobs")
        # By what is asked, and not by when it arrives: several requests are sent at once.
        random = np.random.default_rng(zlib.crc32(json.dumps(body, sort_keys=True).encode()))
        number = body.get("n", 1) if self.counts else 1
        choices = [self._choice(body, random) for _ in range(number)]
        prompt = len(body["prompt"].encode())
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + sum(n for n, _ in choices)}
        return {"choices": [choice for _, choice in choices], "usage": usage}

    def _choice(self, body: dict[str, Any], random: np.random.Generator) -> tuple[int, Any]:
        """The number of tokens, and the choice."""
        settings = self.defaults | body
        ids, chosen, tops = list(str(body["prompt"]).encode()), [], []
        reason = "length"
        start = len(ids)
        for _ in range(body["max_tokens"]):
            logits = fake_logits(ids).astype(np.float64)
            logprobs = log_softmax(logits.astype(np.float32))
            for token, bias in (body.get("logit_bias") or {}).items():
                logits[int(token)] += bias
            seen = list(set(ids))
            penalty = settings.get("repetition_penalty", 1.0)
            logits[seen] = np.where(
                logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty
            )
            logits[list(set(ids[start:]))] -= settings.get("presence_penalty", 0.0)
            token = _draw(logits, settings, random)
            best = np.argsort(-logprobs)[: self.most].tolist()
            named = {f"token_id:{n}": float(logprobs[n]) for n in (*best, token)}
            tops.append(named)
            chosen.append(float(logprobs[token]))
            ids.append(token)
            if token in self.stops:
                reason = "stop"
                break
        found = {"token_logprobs": chosen, "top_logprobs": tops} if body.get("logprobs") else None
        return len(ids) - start, {"text": "", "finish_reason": reason, "logprobs": found}

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"error": {"message": "Not Found"}}, status=404)
        answer = await super()._tokenize(request)
        content = json.loads(answer.body)  # type: ignore[arg-type]
        last = 100 + self.rotated
        content["tokens"] = [
            100 + (n - 99) % self.rotated if 100 <= n < last else n for n in content["tokens"]
        ]
        return web.json_response(content)


def _draw(logits: Any, settings: dict[str, Any], random: np.random.Generator) -> int:
    temperature = settings.get("temperature", 1.0)
    if not temperature:
        return int(np.argmax(logits))
    order = np.argsort(-logits)
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    weights[settings.get("top_k") or len(weights) :] = 0
    weights /= weights.sum()
    weights[np.cumsum(weights) - weights >= settings.get("top_p", 1.0)] = 0
    return int(order[random.choice(len(weights), p=weights / weights.sum())])


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return described(tmp_path_factory.mktemp("export") / "export")


def described(directory: Path, **generation: Any) -> Path:
    write_proofs(directory)
    config = {"eos_token_id": [END], **generation}
    (directory / "generation_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def server(template: str = TEMPLATE, **settings: Any) -> Server:
    found = Server()
    runner = FakeRunner()
    found.engine = EmbeddedBackend(
        Path("fake"), model="fake", load=lambda: (runner, byte_tokenizer(template))
    )
    for name, value in settings.items():
        setattr(found, name, value)
    return found


async def viewed(found: Server, directory: Path) -> ClientView:
    exam = GoldenExam.load(directory, Proof())
    async with running(found), started(found.url) as backend:
        return await exam.client_view(backend, timeout_s=60)


async def test_the_artifacts_own_defaults_differ_in_nothing(export: Path, tmp_path: Path) -> None:
    view = await viewed(server(), export)
    assert view == ClientView(tokens=view.tokens)
    assert view.tokens < 250
    settings = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3}
    own = described(tmp_path / "own", **settings)
    view = await viewed(server(defaults=settings), own)
    assert view == ClientView(tokens=view.tokens)


@pytest.mark.parametrize(
    ("defaults", "named"),
    [
        ({"repetition_penalty": 1.3}, "its default repetition_penalty is not the artifact's"),
        ({"presence_penalty": 1.5}, "its default presence_penalty or frequency_penalty is not"),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "its default sampling is not"),
        ({"temperature": 0.0}, "its default sampling is not"),
    ],
)
async def test_a_default_that_the_artifact_does_not_have(
    export: Path, defaults: dict[str, Any], named: str
) -> None:
    view = await viewed(server(defaults=defaults), export)
    (line,) = view.differences
    assert line.startswith(named) and "`--generation-config`" in line


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "sent"])
async def test_five_log_probabilities_show_a_default_and_blame_none(
    silent: bool, export: Path
) -> None:
    view = await viewed(server(most=5, silent=silent), export)
    assert view == ClientView(tokens=view.tokens)
    view = await viewed(server(most=5, silent=silent, defaults={"temperature": 0.0}), export)
    assert [line.partition(" is not")[0] for line in view.differences] == ["its default sampling"]


async def test_a_server_that_draws_too_few_tokens_is_not_compared(export: Path) -> None:
    view = await viewed(server(counts=False, defaults={"temperature": 0.0}), export)
    assert view.differences == []
    (line,) = view.unchecked
    assert line.endswith("sampling: it drew 1 of 28 tokens")


@pytest.mark.parametrize(
    "missing", [{"repetition_penalty": 1.3}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}]
)
async def test_a_default_that_only_the_artifact_has(
    missing: dict[str, Any], tmp_path: Path
) -> None:
    view = await viewed(server(), described(tmp_path / "own", **missing))
    assert len(view.differences) == 1


async def test_a_stop_token_that_does_not_stop(export: Path) -> None:
    view = await viewed(server(stops=()), export)
    assert view.differences[0].startswith("it does not stop at the artifact's stop token 0: ")


@pytest.mark.parametrize("tokenizes", [True, False])
async def test_another_chat_template(export: Path, tokenizes: bool) -> None:
    other = TEMPLATE.replace("<assistant>", "<bot>")
    view = await viewed(server(other, tokenizes=tokenizes), export)
    (line,) = view.differences
    assert line.startswith("its chat template is not the artifact's")


async def test_one_percent_of_a_tokenizers_ids(export: Path) -> None:
    view = await viewed(server(rotated=3), export)
    assert view.tokenizer is not None
    assert "it encodes 'd' as token 101 instead of 100" in view.tokenizer


@pytest.mark.parametrize("content", [{}, {"tokens": "x", "usage": {"total_tokens": -1}}, [], None])
async def test_an_answer_of_another_form_proves_nothing(export: Path, content: Any) -> None:
    class Garbled(FakeOpenAI):
        async def _read(self, request: web.Request) -> Any:
            raise web.HTTPOk(text=json.dumps(content), content_type="application/json")

    view = await viewed(Garbled(), export)  # type: ignore[arg-type]
    assert (view.tokenizer, view.differences, view.tokens) == (None, [], 0)
    assert len(view.unchecked) == 5
    assert all("its answer has another form" in line for line in view.unchecked)


def test_verify_url_reports_it_with_its_remedy(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(server(defaults={"repetition_penalty": 1.3})) as found:
        code, out, _ = run_verify(capsys, found.url, "--golden", export, "--weights", "original")
    assert code == 1
    assert "wrong: its default repetition_penalty is not the artifact's, which is 1: start" in out
