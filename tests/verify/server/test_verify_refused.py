"""`octet verify URL` of servers that do not answer, or cannot be asked; and mistakes."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octet.errors import RequestError
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.proof.golden_exam import GoldenExam
from tests.fake_servers import FakeOpenAI
from tests.serve.openai_clients import dead_url
from tests.serve.proof.exams import verdict
from tests.serve.proof.fake_proofs import (
    HONEST,
    fake_golden,
    served,
    write_proofs,
)
from tests.serve.proof.test_engine_report import vllm
from tests.verify.server.verifying import Verify, serving, words


class Failing(FakeOpenAI):
    """Answers four prompts and then no more; unless it `recovers`, it is not ready either."""

    def __init__(self, recovers: bool) -> None:
        super().__init__()
        self.recovers = recovers
        self.count = 0

    async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
        self.count += 1
        if 4 < self.count <= 24:
            self.healthy = self.recovers
            raise RequestError("out of order", status=500)
        return await super()._answer(request, body)


def test_who_does_not_answer_everything_is_not_right(verify: Verify, proofs: Path) -> None:
    """What it fails at may be what would have shown that it is wrong."""
    with serving(served(HONEST, server=Failing(recovers=False))) as server:
        code, out, err = verify(server.url, "--golden", proofs)
    assert (code, err.count("sending")) == (2, 1)
    assert "sent 24 golden prompts (4 answered)" in words(out)
    last = out.splitlines()[-1]
    assert last.startswith("inconclusive: 20 golden prompts were not answered; it stopped")


def test_a_restart_between_prompts_proves_nothing(
    verify: Verify, proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both answer as they should: the second answered only a part."""
    server = vllm()
    page, answer = server.flavour.metrics, server._answer

    async def restarting(request: Any, body: dict[str, Any]) -> Any:
        later = page.replace("1.79527254546e+09", "1.79527259999e+09")
        server.flavour = replace(server.flavour, metrics=later)
        return await answer(request, body)

    monkeypatch.setattr(server, "_answer", restarting)
    with serving(served(HONEST, server=server)):
        code, out, _ = verify(server.url, "--golden", proofs)
    last = out.splitlines()[-1]
    assert code == 2 and last.startswith("inconclusive: it was restarted or reloaded")


def test_prompts_that_failed_are_asked_again(verify: Verify, proofs: Path) -> None:
    with serving(served(HONEST, server=Failing(recovers=True))) as server:
        code, out, _ = verify(server.url, "--golden", proofs, "--json")
    found = json.loads(out)
    assert (code, found["missing"], found["verdict"]["outcome"]) == (0, 0, "as_expected")
    assert found["verdict"]["measure"]["prompts"] == found["answered"] == found["asked"] - 20


class Stubborn(FakeOpenAI):
    """Fails at one prompt, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
        if body["prompt"] == fake_golden().records[0].prompt and self.times > 0:
            self.times -= 1
            raise RequestError("out of order", status=500)
        return await super()._answer(request, body)


@pytest.mark.parametrize("options", [["--all"], ["--seed", "3"]])
def test_each_time_that_it_is_judged_counts_in_its_level(
    options: list[str], verify: Verify, proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last one, on prompts that had failed before."""
    looks: dict[int, int] = {}  # by the number of answers: the same ones are no new look

    async def judge(_exam: GoldenExam, responses: Sequence[Response], among: int) -> Verdict:
        looks.setdefault(len(responses), among)
        return verdict("inconclusive")

    monkeypatch.setattr(GoldenExam, "judge", judge)
    with serving(served(HONEST, server=Stubborn(3 if "--seed" in options else 1))) as server:
        verify(server.url, "--golden", proofs, *options)
    assert max(looks) == 64 and len(looks) >= 2
    assert all(among >= len(looks) for among in looks.values()), looks


class Refusing(FakeOpenAI):
    async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
        raise RequestError(f"The model `{body['model']}` does not exist.", status=404)


def tiny() -> FakeOpenAI:
    server = FakeOpenAI()
    server.card = {"max_model_len": 3}
    return server


class Several(FakeOpenAI):
    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"data": [{"id": "a"}, {"id": "b"}, {"id": "c", "parent": "a"}]})


class Locked(FakeOpenAI):
    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        self.headers.append(dict(request.headers))
        return web.json_response({"error": "no"}, status=401)


@pytest.mark.parametrize(
    ("server", "line"),
    [
        (Refusing(), "refuses the golden prompts: The model `fake` does not exist."),
        (tiny(), "was started for a context of 3 tokens, shorter than every golden prompt"),
        (Several(), "serves 2 models (a, b): name one with --model"),
        (Locked(), "/v1/models does not list models: it refuses the key"),
    ],
    ids=["refuses the model", "short context", "several models", "refuses the key"],
)
def test_a_server_that_cannot_be_asked_is_one_line(
    server: FakeOpenAI, line: str, verify: Verify, proofs: Path
) -> None:
    with serving(server):
        code, out, err = verify(server.url, "--golden", proofs)
    assert (code, out) == (2, "") and err.splitlines()[-1].endswith(line)


def test_a_key_comes_from_the_environment(
    verify: Verify, proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-1")
    with serving(served(HONEST)) as server:
        assert verify(server.url, "--golden", proofs, "--api-key-env", "THE_KEY")[0] == 0
        assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-1"}
        code, _, err = verify(server.url, "--golden", proofs, "--api-key-env", "NO_KEY")
    assert code == 2 and "environment variable NO_KEY with the API key is not set" in err


def test_golden_files_that_prove_nothing_are_refused(
    verify: Verify, proofs: Path, tmp_path: Path
) -> None:
    url = dead_url()
    truncated = shutil.copytree(proofs, tmp_path / "truncated")
    (truncated / "golden.json").write_bytes((proofs / "golden.json").read_bytes()[:5000])
    foreign = write_proofs(tmp_path / "foreign", weights="1" * 64)
    for directory, said in (
        (truncated, "golden.json: altered since it was written"),
        (foreign, "golden.json: golden records of another model than manifest.json names (fake)"),
        (tmp_path / "nowhere", "no such directory"),
    ):
        code, out, err = verify(url, "--golden", directory)
        assert code == 2 and said in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("http://127.0.0.1:1",), "give --golden"),
        (("ftp://127.0.0.1:1", "--golden", "."), "unknown scheme"),
        (("http://127.0.0.1:1", "--calibration", "."), "--calibration is for files"),
        (("http://127.0.0.1:1", "--no-tokens"), "--no-tokens is for files"),
        ((".", "--golden", "."), "--golden is for a server's URL; . is none"),
        ((".", "--seed", "3"), "--seed is for a server's URL"),
        (("http://user@127.0.0.1:1", "--golden", "GOLDEN"), "1: must hold no user or password"),
        (("triton://127.0.0.1", "--golden", "GOLDEN", "--model", "m"), "must be host:port"),
        (("http://127.0.0.1:1", "--golden", "GOLDEN"), "cannot be reached (Connection refused)"),
        (("http://127.0.0.1:1", "--golden", "GOLDEN", "--model", "m"), "Connection refused"),
        (("127.0.0.1:8000", "--golden", "."), "of a server, write http://127.0.0.1:8000"),
        (("http:/host:80/m", "--golden", "."), "of a server, write http://host:80/m"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], said: str, verify: Verify, proofs: Path
) -> None:
    given = [str(proofs) if argument == "GOLDEN" else argument for argument in arguments]
    code, out, err = verify(*given)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
