"""`octet verify URL`, on fake servers: the report and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serve.proof.engine_report import EngineReport
from tests.fake_servers import FakeOpenAI, FakeTriton
from tests.fakes import FakeRunner, fake_backend
from tests.serve.proof.fake_proofs import (
    HONEST,
    UNQUANTIZED,
    WORSE,
    fake_golden,
    noisy,
    served,
    write_proofs,
)
from tests.serve.proof.test_engine_report import vllm
from tests.serve.proof.test_probe import Limited
from tests.serve.proof.test_probe_numbers import OnTheWire
from tests.serve.proof.test_served_files import KEY, checkpoint, drop_key
from tests.verify.server.verifying import Verify, serving, words
from verify.server.report import ServerReport, in_words, show


def assert_readable(out: str) -> None:
    """Tables fit 80 columns; what is prose is a line each."""
    prose = ("right: ", "wrong: ", "note: ", "not checked: ")
    long = [line for line in out.splitlines() if len(line) > 80]
    assert all(line.lstrip().startswith(prose) for line in long), long


def test_an_honest_server_is_right(verify: Verify, proofs: Path) -> None:
    with serving(served(HONEST, server=vllm())) as server:
        code, out, err = verify(server.url, "--golden", proofs)
        assert (code, err.count("sending")) == (0, 1)
        assert_readable(out)
        told = words(out)
        assert "model fake on vLLM 0.32.0" in told and "cache fp8_e5m2" in told
        assert "declared fp8 weights, e5m2 cache (artifact" in told
        assert "sent 24 golden prompts" in told and "right: as expected:" in told
        assert "of 256 token ids (" in told and " of 512 positions" in told
        half = "about half of the faults that were not simulated are refused if they change"
        sizes = "perplexity by 2 to 4 % after 24 prompts and 1.2 to 2.5 % after 64"
        most = "most smaller ones pass, and some up to five times the lower figure"
        assert f"note: {half} {sizes}; {most}" in told
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
    assert "match weights without their k_scale" in told and "sent 64 golden prompts" in told
    assert_readable(out)
    assert "nearest conforming way to compute" in told and told.count(" conforming ") >= 2
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
        assert "wrong: 1 finding besides the log-probabilities; as expected" in words(out)
        code, out, _ = verify(server.url, "--golden", proofs, "--kv-cache", "e4m3")
        assert "declared fp8 weights, e4m3 cache" in words(out) and "E4M3 cache (" not in out
        assert "note: the artifact's scales of keys and values are for an e5m2 cache" in out
        code, out, _ = verify(server.url, "--golden", proofs, "--engine", "onnxruntime")
        assert code == 1 and "wrong: vLLM 0.32.0 where onnxruntime was declared" in out


def test_without_simulations_a_bound_is_what_there_is(verify: Verify, tmp_path: Path) -> None:
    proofs = write_proofs(tmp_path / "plain", scenarios=False)
    with serving(served(HONEST)) as server:
        code, out, _ = verify(server.url, "--golden", proofs)
        assert code == 3 and "against a bound of 0.1" in words(out)
        assert out.splitlines()[-1].endswith(
            "weakly proven: a fault that costs less than the bound would not show"
        )
        code, out, _ = verify(server.url, "--golden", proofs, "--json")
        found = json.loads(out)
        assert (code, found["exit_code"], found["verdict"]["weak"]) == (3, 3, True)
    with serving(served(WORSE * 3)) as server:
        assert verify(server.url, "--golden", proofs)[0] == 1
    with serving(served(HONEST, server=vllm("fp8_e4m3"))) as server:
        assert verify(server.url, "--golden", proofs)[0] == 1


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
    assert code == 2 and told.endswith("its log-probabilities could not be checked")
    assert "not checked: its answers: it returns no log-probabilities" in told
    assert "% of its greedy tokens are the reference's" in told


def test_a_server_of_nan_is_wrong_and_not_one_without_log_probabilities(
    verify: Verify, proofs: Path
) -> None:
    with serving(served(HONEST, server=OnTheWire(None))) as server:
        code, out, _ = verify(server.url, "--golden", proofs)
    assert code == 1 and "answers are invalid: NaN" in out
    assert "returns no log-probabilities" not in words(out)
    assert " nan " not in words(out)  # of a table without figures


@pytest.mark.parametrize("card", [{"max_model_len": 64}, {"max_model_len": None}])
def test_a_short_context_is_part_of_the_verdict(
    card: dict[str, Any], verify: Verify, proofs: Path
) -> None:
    """Also that of a server that does not report it, and refuses what is longer."""
    server = served(HONEST)
    server.engine = fake_backend(FakeRunner(model=noisy(HONEST, 1), context=64))
    server.card = card
    with serving(server):
        code, out, _ = verify(server.url, "--golden", proofs, "--json", "--all")
    found = json.loads(out)
    left_out = [n for r in fake_golden().records if (n := len(r.prompt_token_ids)) >= 64]
    assert 10 < len(left_out) < 40 and code == found["exit_code"]
    assert found["verdict"]["left_out"] == {
        "prompts": len(left_out),
        "of": 64,
        "from_tokens": min(left_out),
    }
    assert found["verdict"]["reason"].endswith(
        f"; {len(left_out)} of 64 golden prompts do not fit into its context: nothing of"
        f" {min(left_out)} tokens or more was examined"
    )


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


def test_a_start_that_is_no_date_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Milliseconds, from a server that says seconds."""
    engine = EngineReport("openai", started=1.79527254546e12, context=512)
    show(ServerReport("http://a", "m", "fp8", "0" * 64, engine), Console())
    told = capsys.readouterr().out
    assert "context 512" in told and "since" not in told
