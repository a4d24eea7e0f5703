"""What has to be proven before `evaluate` and `bench` measure a server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octet.errors import GateError
from octet_cli.main import main
from tests import patient_loop
from tests.fake_servers import FakeOpenAI
from tests.serve.proof import fake_proofs
from tests.serve.proof.fake_proofs import (
    HONEST,
    PATH,
    UNQUANTIZED,
    WORSE,
    Scenario,
    served,
    write_proofs,
)
from tests.serve.proof.test_engine_report import vllm
from tests.serve.proof.test_probe import Limited
from tests.verify.bench.fake_vllm import install
from tests.verify.server.verifying import serving
from verify.server.connect import Query
from verify.server.verify import require_proven


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "run", patient_loop.run)


def told(server: FakeOpenAI, golden: Path) -> str:
    with serving(server) as running:
        return require_proven(Query(url=running.url, golden=golden))


def test_a_right_server_is_measured_and_a_wrong_one_is_not(proofs: Path) -> None:
    assert told(served(HONEST, server=vllm()), proofs).startswith("proven: as expected")
    with pytest.raises(GateError, match="weights without their k_scale"):
        told(served(WORSE), proofs)
    with pytest.raises(GateError, match="E4M3 cache"):
        told(served(HONEST, server=vllm("fp8_e4m3")), proofs)


@pytest.mark.parametrize("cache", [None, "auto", "bfloat16", "fp8_e5m2"])
def test_the_original_is_measured_beside_it(proofs: Path, cache: str | None) -> None:
    """Whatever cache its engine reports: it is started without the artifact's options."""
    server = None if cache is None else vllm(cache)
    assert told(served(UNQUANTIZED, server=server), proofs).startswith(
        "proven: it serves the original weights, unquantized: as expected"
    )


def test_the_original_with_the_artifacts_cache_is_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine does not say which cache it has: only its answers show that."""
    original = PATH.model_copy(update={"weights": False, "activations": False})
    monkeypatch.setitem(fake_proofs._NOISE, Scenario(path=original), 0.02)
    write_proofs(tmp_path / "proofs")
    assert told(served(0.02), tmp_path / "proofs").startswith(
        "proven: it serves the original weights, unquantized: as expected"
    )


def test_a_server_without_log_probabilities_is_measured_and_called_unproven(proofs: Path) -> None:
    server = Limited()
    server.most = 0
    assert told(served(HONEST, server=server), proofs).startswith("not proven: its answers: it")


def test_evaluate_measures_no_server_that_is_wrong(
    proofs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"text": "some words"}\n' * 8)

    def refused(*arguments: object) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", *map(str, arguments), "--samples", str(samples)])
        return ended.value.code, capsys.readouterr().err

    with serving(served(WORSE)) as server:
        code, err = refused(server.url, "--golden", proofs)
        assert code == 1 and "weights without their k_scale" in err and "Nothing was" in err
        assert not any("prompt_logprobs" in body for body in server.requests)
        code, err = refused(server.url, "--key", proofs)
        assert code == 2 and "--key checks the signature of --golden" in err
    code, err = refused(proofs, "--golden", proofs)
    assert code == 2 and "--golden checks servers, and no target is one" in err


def test_bench_shows_what_proves_each_target_and_starts_with_none_that_is_wrong(
    proofs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM_CALLS", str(tmp_path / "calls"))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    options = ("--vllm", install(tmp_path), "--tokenizer", tmp_path / "tokenizer")
    options += ("--load", "1x8x4", "--rounds", "1", "--requests", "1", "--golden", proofs)

    def bench(*arguments: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *map(str, (*arguments, *options))])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    with serving(served(UNQUANTIZED)) as one, serving(served(HONEST)) as other:
        code, out, err = bench(one.url, other.url, "--json")
        assert code == 0, err
        original, quantized = json.loads(out)["proofs"]
        assert "original weights" in original and quantized.startswith("proven: as expected")
        code, out, err = bench(one.url, other.url)
        assert code == 0 and "  proven: it serves the original weights" in out
        code, out, err = bench(one.url, other.url, "--key", tmp_path / "nowhere")
        assert code == 2 and "nowhere: No such file" in err
    calls = (tmp_path / "calls").read_text()
    with serving(served(UNQUANTIZED)) as one, serving(served(WORSE)) as other:
        code, out, err = bench(one.url, other.url)
    assert code == 1 and "does not match" in err and "Nothing was measured" in err
    assert (tmp_path / "calls").read_text() == calls
