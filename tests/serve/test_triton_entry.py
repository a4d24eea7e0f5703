"""The Triton entry over the fake model, in a stand-in for Triton's Python backend."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.errors import ArtifactError, ConfigError
from serve.engine.request import Delta, Finished, GenerateRequest
from serve.triton_entry import TritonEntry
from tests.fakes import FakeRunner, byte_tokenizer, fake_backend, opened
from tests.serve.triton_python import PbUtils, Request, Tensor, TritonError, string

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
REPORTS = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


class Served:
    def __init__(self, runner: FakeRunner, slots: int = 4) -> None:
        self.entry = TritonEntry(runner, byte_tokenizer(), PbUtils, slots=slots)
        self.engine = self.entry._loaded.engine

    def ask(self, request: Request) -> Request:
        self.entry.execute([request])
        return request

    def idle(self) -> bool:
        """Whether every slot becomes free soon."""
        deadline = time.monotonic() + 60
        while self.engine.stats.running or self.engine.stats.waiting or self.entry._live:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def served(runner: FakeRunner) -> Iterator[Served]:
    served = Served(runner)
    yield served
    runner.gate.set()
    served.entry.close()


def streamed(text: str = "abc", **sampling: Any) -> Request:
    return Request(text_input=text, stream=True, sampling_parameters=GREEDY | sampling, **REPORTS)


async def embedded(**fields: Any) -> tuple[str, list[Delta], Finished]:
    """The same request to the embedded backend."""
    async with opened(fake_backend()) as backend:
        request = GenerateRequest(
            **{
                "request_id": "r",
                "model": "fake",
                "prompt": "abc",
                "max_tokens": 12,
                "temperature": 0.0,
                "ignore_eos": True,
                **fields,
            }
        )
        *deltas, end = [event async for event in backend.generate(request)]
    return "".join(delta.text for delta in deltas), deltas, end


async def test_a_stream_is_the_embedded_engines(served: Served) -> None:
    text, _, end = await embedded()
    request = served.ask(streamed()).wait()
    assert request.text == text
    reasons = [string(response, "finish_reason") for response in request.responses]
    assert reasons[-1] == end.reason == "length" and set(reasons[:-1]) <= {"None"}
    last = request.responses[-1]
    assert last.values["num_input_tokens"].tolist() == [3]
    assert last.values["num_input_tokens"].dtype == np.uint32
    assert sum(r.values["num_output_tokens"][0] for r in request.responses) == 12
    assert string(last, "stop_reason") == "null" and "logprobs" not in last.values


@pytest.mark.parametrize(
    ("excluded", "prompt"), [(None, "abc"), (False, "abc"), (True, "")], ids=str
)
async def test_without_stream_there_is_one_response(
    served: Served, excluded: bool | None, prompt: str
) -> None:
    text, _, _ = await embedded()
    asked = {} if excluded is None else {"exclude_input_in_output": excluded}
    request = Request(text_input="abc", sampling_parameters=GREEDY, **asked)
    (response,) = served.ask(request).wait().responses
    assert string(response, "text_output") == prompt + text
    assert response.values.keys() == {"text_output"}


async def test_token_ids_are_a_prompt(served: Served) -> None:
    text, _, _ = await embedded()
    by_ids = Request(input_ids=[97, 98, 99], sampling_parameters=GREEDY)
    assert served.ask(by_ids).wait().text == "abc" + text


@pytest.mark.parametrize("prompt", ["abc", "caf\u00e9"])
async def test_logprobs_name_tokens_by_id(served: Served, prompt: str) -> None:
    _, deltas, _ = await embedded(prompt=prompt, logprobs=3, max_tokens=40)
    request = streamed(prompt, logprobs=3, max_tokens=40)
    request.tensors["return_logprobs"] = Tensor("return_logprobs", np.array([True]))
    found = [
        position
        for response in served.ask(request).wait().responses
        for position in json.loads(string(response, "logprobs"))
    ]
    expected = [position for delta in deltas for position in delta.logprobs or ()]
    assert len(found) == len(expected) == 40
    for entries, position in zip(found, expected, strict=True):
        first, *_ = entries
        assert int(first) == position.chosen.token_id
        assert entries[first]["text_offset"] == position.text_offset
        assert entries.keys() == {str(t.token_id) for t in (position.chosen, *position.top)}
        for rank, token in enumerate(position.top, 1):
            entry = entries[str(token.token_id)]
            assert (entry["rank"], entry["logprob"]) == (rank, token.logprob)
            assert (entry["decoded_token"], bytes(entry["bytes"])) == (token.text, token.bytes)


async def test_a_stop_string_and_a_stop_token_say_so(served: Served) -> None:
    text, deltas, _ = await embedded()
    stop = text[4:6]
    by_string = served.ask(streamed(stop=[stop])).wait()
    assert by_string.text == text[: text.index(stop)]
    token = deltas[3].token_ids[0]
    by_token = served.ask(streamed(stop_token_ids=[token])).wait()
    for request, reason in ((by_string, stop), (by_token, token)):
        assert string(request.responses[-1], "finish_reason") == "stop"
        assert json.loads(string(request.responses[-1], "stop_reason")) == reason


async def test_the_requests_own_parameters_stand_in(served: Served) -> None:
    """`curl .../generate -d '{"text_input": ..., "temperature": 0}'` arrives like this."""
    text, _, _ = await embedded()
    own = GREEDY | {"triton_enable_empty_final_response": True}
    assert served.ask(Request(text_input="abc", parameters=own)).wait().text == "abc" + text
    # What is said explicitly counts alone.
    request = Request(text_input="abc", parameters={"nope": 1}, sampling_parameters=GREEDY)
    assert served.ask(request).wait().text == "abc" + text


async def test_max_tokens_is_vllms(served: Served) -> None:
    """16 unless said otherwise; null runs to the end of the context, here of 512."""
    for sampling, count in (({}, 16), ({"max_tokens": None}, 509)):
        fields = {"temperature": 0, "ignore_eos": True} | sampling
        request = Request(text_input="abc", stream=True, sampling_parameters=fields, **REPORTS)
        served.ask(request).wait()
        assert sum(r.values["num_output_tokens"][0] for r in request.responses) == count


@pytest.mark.parametrize(
    ("inputs", "param", "message"),
    [
        ({"sampling_parameters": {"tempratur": 1}}, "tempratur", "did you mean 'temperature'?"),
        (
            {"sampling_parameters": {"prompt": "x"}},
            "prompt",
            "unknown field 'prompt': a text goes into 'text_input', token ids into 'input_ids'",
        ),
        ({"sampling_parameters": {"messages": []}}, "messages", "no conversation: give 'text_in"),
        (
            {"sampling_parameters": {"min_p": 0.5}},
            "min_p",
            "not supported by this model; vLLM accepts it",
        ),
        ({"sampling_parameters": {"temperature": -1}}, "temperature", "greater than or equal"),
        ({"sampling_parameters": '{"top_p": NaN}'}, "top_p", "'top_p' should"),
        ({"sampling_parameters": {"top_p": 1.5}}, "top_p", "less than or equal to 1"),
        ({"sampling_parameters": {"max_tokens": 0}}, "max_tokens", "greater than 0"),
        ({"sampling_parameters": {"max_tokens": "5"}}, "max_tokens", 'got "5"'),
        ({"sampling_parameters": {"logprobs": 21}}, "logprobs", "at most 20"),
        ({"sampling_parameters": {"stop": ""}}, "stop", "cannot be empty"),
        ({"sampling_parameters": {"n": 2}}, "n", "one answer to a request"),
        ({"sampling_parameters": "{"}, "sampling_parameters", "not valid JSON"),
        ({"sampling_parameters": "[" * 100_000}, "sampling_parameters", "nested too deeply"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters", "should be a JSON object"),
        ({"sampling_parameters": b"\xff"}, "sampling_parameters", "not UTF-8"),
        ({"text_input": b"\xff"}, "text_input", "not UTF-8"),
        ({"text_input": ""}, "prompt", "empty"),
        ({"text_input": "x" * 600}, "prompt", "context of 512"),
        ({"input_ids": [1]}, "input_ids", "not both"),
        ({"text_input": "", "input_ids": []}, "prompt", "empty"),
        ({"text_input": "", "input_ids": [999]}, "prompt", "token id 999"),
        ({"text_input": "", "input_ids": [-1]}, "prompt", "'prompt'"),
        (
            {"stream": True, "exclude_input_in_output": False},
            "exclude_input_in_output",
            "cannot be false",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_bad_request_is_refused_by_name(
    served: Served, inputs: dict[str, Any], param: str, message: str
) -> None:
    request = served.ask(Request(**{"text_input": "abc", **inputs})).wait()
    assert len(request.responses) == 1 and request.error.code == TritonError.INVALID_ARG
    refusal = json.loads(str(request.error))
    assert refusal["param"] == param and message in refusal["message"]
    assert "\n" not in refusal["message"] and served.idle()


async def test_one_bad_request_does_not_harm_the_others(served: Served) -> None:
    text, _, _ = await embedded()
    good = [streamed() for _ in range(6)]  # more than there are slots
    bad = Request(text_input="abc", sampling_parameters="{")
    served.entry.execute([good[0], bad, *good[1:]])
    assert [request.wait().text for request in good] == [text] * 6
    assert bad.wait().error.code == TritonError.INVALID_ARG


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(stream: bool) -> None:
    served = Served(FakeRunner(delay_s=0.01), slots=1)
    sampling = GREEDY | {"max_tokens": 400}
    running, waiting = (
        Request(text_input="abc", stream=stream, sampling_parameters=sampling) for _ in range(2)
    )
    served.entry.execute([running, waiting])
    time.sleep(0.1)
    for request in (waiting, running):
        request.gone = True
        assert request.wait().error.code == TritonError.CANCELLED
    assert served.idle()
    assert served.ask(streamed()).wait().text
    served.entry.close()


def test_a_failing_step_ends_with_an_error() -> None:
    served = Served(FakeRunner(poison=frozenset([1])))
    request = served.ask(streamed("a\x01")).wait()
    assert request.error.code == TritonError.INTERNAL and "told to fail" in str(request.error)
    assert served.idle() and served.ask(streamed()).wait().text
    served.entry.close()


def test_a_response_that_cannot_be_sent_ends_the_request(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    request = streamed(max_tokens=400)
    request.refuses = True
    served.ask(request).wait()
    assert request.error.code == TritonError.INTERNAL and served.idle()
    assert "shared memory" not in str(request.error) and "shared memory" in caplog.text


async def test_a_slow_triton_does_not_hold_the_engine_up(served: Served) -> None:
    """What was not taken meanwhile comes at once, in order and complete."""
    text, _, _ = await embedded(max_tokens=100)
    request = streamed(max_tokens=100)
    request.gate.clear()
    served.ask(request)
    deadline = time.monotonic() + 60
    while served.engine.stats.generated_tokens < 100:
        assert time.monotonic() < deadline, "the engine waits for Triton"
        time.sleep(0.005)
    request.gate.set()
    assert request.wait().text == text and len(request.responses) <= 3
    assert sum(r.values["num_output_tokens"][0] for r in request.responses) == 100


async def test_closing_lets_running_answers_finish(served: Served) -> None:
    text, _, _ = await embedded(max_tokens=100)
    request = served.ask(streamed(max_tokens=100))
    served.entry.close()
    assert request.final.is_set() and request.text == text
    late = served.ask(streamed()).wait()
    assert late.error.code == TritonError.UNAVAILABLE


def arguments(directory: Path, **parameters: str) -> dict[str, str]:
    """What Triton hands to `initialize`."""
    values = {name: {"string_value": value} for name, value in parameters.items()}
    config = json.dumps({"parameters": values})
    return {
        "model_repository": str(directory),
        "model_version": "1",
        "model_config": config,
    }


def test_it_loads_the_export_of_its_version(tmp_path: Path, exports: dict[str, Path]) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "onnx").symlink_to(exports["fp8"])
    entry = TritonEntry.load(arguments(tmp_path, slots="2", threads="1"), PbUtils)
    requests = [streamed("def f(x):") for _ in range(3)]
    entry.execute(requests)
    first, *others = [request.wait().text for request in requests]
    assert first and others == [first, first]
    assert entry._loaded.engine.stats.slots == 2
    entry.close()


@pytest.mark.parametrize(("name", "value"), [("slots", "0"), ("slots", "many"), ("threads", "-1")])
def test_a_parameter_that_cannot_be_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"config.pbtxt: parameter '{name}'.*got '{value}'"):
        TritonEntry.load(arguments(tmp_path, **{name: value}), PbUtils)


def test_an_entry_without_its_export_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="1/onnx: no such directory"):
        TritonEntry.load(arguments(tmp_path), PbUtils)


def test_it_loads_neither_torch_nor_the_web_framework() -> None:
    code = "import sys, serve.triton_entry; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "transformers", "fastapi", "starlette", "aiohttp"} & set(output)
