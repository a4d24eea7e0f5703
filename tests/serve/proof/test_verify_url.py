"""`octet verify URL`, on fake servers: the report, the exit code, and what cannot be asked."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octet.cli import main
from octet.errors import RequestError
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.proof.golden_exam import GoldenExam
from serve.proof.report import in_words
from tests.fake_servers import FakeOpenAI, FakeTriton, running
from tests.serve.openai_clients import dead_url
from tests.serve.proof.exams import verdict
from tests.serve.proof.fake_proofs import (
    HONEST,
    UNQUANTIZED,
    WORSE,
    fake_golden,
    served,
    write_proofs,
)
from tests.serve.proof.test_probe import Limited
from tests.serve.proof.test_structure import KEY, checkpoint, drop_key, vllm


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """A fake server in a thread of its own: the command runs an event loop itself."""
    up, down = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with running(server):
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert up.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join()
        loop.close()


Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Exit code, standard output and standard error of `octet verify`."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["verify", *map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def words(text: str) -> str:
    """On one line, however it was wrapped."""
    return " ".join(text.split())


def assert_readable(out: str) -> None:
    """Tables fit 80 columns; what is prose is a line each."""
    prose = ("right: ", "wrong: ", "note: ", "not checked: ")
    long = [line for line in out.splitlines() if len(line) > 80]
    assert all(line.lstrip().startswith(prose) for line in long), long


def test_an_honest_server_is_right(verify: Verify, proofs: Path) -> None:
    with serving(served(HONEST, server=vllm())) as server:
        code, out, err = verify(server.url, "--golden", proofs)
        assert (code, err.count("asking")) == (0, 1)
        assert_readable(out)
        told = words(out)
        assert "model fake on vLLM 0.32.0" in told and "cache fp8_e5m2" in told
        assert "held to be fp8 weights, e5m2 cache (artifact" in told
        assert "asked 24 golden prompts" in told and "right: as expected:" in told
        assert "perplexity +" in told or "perplexity -" in told
        code, out, _ = verify(server.url, "--golden", proofs, "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["verdict"]["outcome"]) == (0, 0, "as_expected")
    assert found["engine"]["cache_dtype"] == "fp8_e5m2" and found["asked"] == 24
    assert abs(found["verdict"]["measure"]["perplexity_change"]) < 0.05


def test_a_corrupt_server_is_wrong_and_the_cause_is_named(verify: Verify, proofs: Path) -> None:
    with serving(served(WORSE)) as server:
        code, out, _ = verify(server.url, "--golden", proofs, "--all")
    told = words(out)
    assert code == 1 and "wrong: worse than expected" in told
    assert "match weights without their k_scale" in told and "asked 64 golden prompts" in told
    assert_readable(out)
    assert "nearest honest way to compute" in told and told.count(" honest ") >= 2
    (wrong,) = (line for line in out.splitlines() if line.startswith("wrong:"))
    assert "match weights without their k_scale: " in wrong  # in a pipe, for grep


def test_an_unquantized_server_is_better_and_wrong(verify: Verify, proofs: Path) -> None:
    with serving(served(UNQUANTIZED)) as server:
        code, out, _ = verify(server.url, "--golden", proofs, "--json")
        assert code == 1 and json.loads(out)["verdict"]["cause"]["name"] == "unquantized"
        code, _, _ = verify(server.url, "--golden", proofs, "--weights", "original")
        assert code == 0


def test_what_the_engine_says_is_enough_to_be_wrong(verify: Verify, proofs: Path) -> None:
    with serving(served(HONEST, server=vllm("fp8_e4m3"))) as server:
        code, out, _ = verify(server.url, "--golden", proofs)
        assert code == 1
        assert "wrong: E4M3 cache (cache_dtype=fp8_e4m3) where E5M2 was declared" in words(out)
        assert "wrong: 1 finding beside the numbers; as expected" in words(out)
        code, out, _ = verify(server.url, "--golden", proofs, "--kv-cache", "e4m3")
        assert "held to be fp8 weights, e4m3 cache" in words(out) and "E4M3 cache (" not in out
        assert "note: the artifact's scales of keys and values are for an e5m2 cache" in out
        code, out, _ = verify(server.url, "--golden", proofs, "--engine", "onnxruntime")
        assert code == 1 and "wrong: vLLM 0.32.0 where onnxruntime was declared" in out


def test_without_simulations_a_bound_is_what_there_is(verify: Verify, tmp_path: Path) -> None:
    proofs = write_proofs(tmp_path / "plain", hypotheses=False)
    with serving(served(HONEST)) as server:
        code, out, _ = verify(server.url, "--golden", proofs)
    assert code == 0 and "against a bound of 0.1" in words(out)


def test_any_other_server_names_tokens_by_text(verify: Verify, proofs: Path) -> None:
    with serving(served(WORSE, server=FakeOpenAI(flavour="sglang"))) as server:
        code, out, _ = verify(f"{server.url}/v1", "--golden", proofs, "--model", "fake")
    assert code == 1 and "on an OpenAI server" in words(out)


def test_a_triton_is_asked_by_its_address_and_model(verify: Verify, proofs: Path) -> None:
    with serving(served(HONEST, server=FakeTriton())) as server:
        for arguments in (
            (f"triton://{server.url}/fake",),
            (f"grpc://{server.url}", "--model", "fake"),
        ):
            code, out, _ = verify(*arguments, "--golden", proofs)
            assert code == 0 and "model fake on Triton 2.51.0" in words(out)
            assert "not checked: perplexity" in words(out)
        code, _, err = verify(f"grpc://{server.url}", "--golden", proofs)
        assert code == 2 and "name its model once: with --model" in err
        code, _, err = verify(f"triton://{server.url}/other", "--golden", proofs)
        assert code == 2 and err.count("\n") == 1


def test_a_server_without_log_probabilities_cannot_be_checked(verify: Verify, proofs: Path) -> None:
    server = Limited()
    server.most = 0
    with serving(served(HONEST, server=server)):
        code, out, _ = verify(server.url, "--golden", proofs)
    told = words(out)
    assert code == 2 and told.endswith("its numbers could not be checked")
    assert "not checked: its numbers: it returns no log-probabilities" in told
    assert "% of its greedy tokens are the reference's" in told


def test_the_checkpoint_that_it_serves_is_verified_as_well(
    verify: Verify, proofs: Path, tmp_path: Path
) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    broken = checkpoint(tmp_path / "broken", proofs, drop_key)
    with serving(served(HONEST)) as server:
        code, out, _ = verify(server.url, "--golden", right, "--checkpoint", broken, "--json")
    found = json.loads(out)
    assert code == 1 and found["verdict"]["outcome"] == "as_expected"
    assert any("altered since it was written" in line for line in found["findings"])
    assert f"the checkpoint that it loaded lacks 1 k_scale tensor ({KEY})" in found["findings"]


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
    assert (code, err.count("asking")) == (2, 1)
    assert "asked 24 golden prompts (4 answered)" in words(out)
    last = out.splitlines()[-1]
    assert last.startswith("inconclusive: 20 golden prompts were not answered; it stopped")


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
        (Several(), "serves 2 models (a, b): name one with --model"),
        (Locked(), "/v1/models does not list models: it refuses the key"),
    ],
    ids=["refuses the model", "several models", "refuses the key"],
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
    assert code == 2 and "environment variable NO_KEY is not set" in err


def test_golden_files_that_prove_nothing_are_refused(
    verify: Verify, proofs: Path, tmp_path: Path
) -> None:
    url = dead_url()
    truncated = shutil.copytree(proofs, tmp_path / "truncated")
    (truncated / "golden.json").write_bytes((proofs / "golden.json").read_bytes()[:5000])
    foreign = write_proofs(tmp_path / "foreign", weights="1" * 64)
    for directory, said in (
        (truncated, "golden.json: truncated or altered since it was written"),
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


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("nothing, e5m2 (nearest), float32", "unquantized, e5m2 (nearest), float32"),
        (
            "weights, float16, float32; k_scale_dropped",
            "weights, float16, float32; k_scale dropped",
        ),
        (
            "weights+activations, e4m3 (nearest), bfloat16; weight_scales_scaled, layer 3, x0.5",
            "weights+activations, e4m3 (nearest), bfloat16; weight scales scaled, layer 3, x0.5",
        ),
    ],
)
def test_hypotheses_have_names_for_people(label: str, said: str) -> None:
    assert in_words(label) == said
