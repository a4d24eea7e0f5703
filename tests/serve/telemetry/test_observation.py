"""Tests what a request adds to the figures, event by event."""

import pytest

from serve.telemetry.observation import Observation
from tests.serve.clock import Clock
from tests.serve.telemetry.conftest import Figures

OPERATION = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m", "pool": "main"}
GAPS = "octet_inter_token_latency_seconds"


def observe(
    figures: Figures, *, path: str = "/v1/chat/completions", choices: int = 1
) -> Observation:
    """A request that a backend has been asked to answer."""
    observation = Observation(figures.metrics, path, "id-1")
    observation.authenticated("team")
    observation.routed("m", choices)
    observation.attempt("main", "gpu-1", "fp8")
    observation.estimated_prompt_tokens = 7
    return observation


def end(observation: Observation, status: int = 200) -> None:
    observation.status = status
    observation.ended()


def test_a_whole_stream(figures: Figures, clock: Clock) -> None:
    observation = observe(figures)
    clock.now += 0.3
    observation.first_token(2)  # the role, the first token
    for _ in range(4):
        clock.now += 0.02
        observation.streamed(1)
    clock.now += 5
    observation.streamed(0)  # usage and [DONE], late: no gap between tokens
    observation.finished(11, 5)
    end(observation)

    first = "gen_ai_server_time_to_first_token_seconds"
    assert figures.value(f"{first}_sum", **OPERATION) == pytest.approx(0.3)
    assert figures.value(f"{GAPS}_count", **OPERATION) == 4
    assert figures.value(f"{GAPS}_sum", **OPERATION) == pytest.approx(0.08)
    per_token = "gen_ai_server_time_per_output_token_seconds"
    assert figures.value(f"{per_token}_sum", **OPERATION) == pytest.approx(0.02)
    duration = "gen_ai_server_request_duration_seconds"
    assert figures.value(f"{duration}_sum", **OPERATION, error_type="") == pytest.approx(5.38)
    assert figures.only("octet_tokens_total") == {
        ("gpu-1", "backend", "team", "m", "fp8", "input"): 11,
        ("gpu-1", "backend", "team", "m", "fp8", "output"): 5,
    }
    assert figures.only("octet_requests_total") == {("/v1/chat/completions", "m", "200"): 1}


Writes = list[tuple[float, int, int]]  # seconds, events, choices that have ended
# Choices, events that come first, later ones, tokens by the backend's count; gaps and their sum.
STREAMS: dict[str, tuple[int, int, Writes, int | None, int, float]] = {
    # vLLM sends the role by itself, at the moment of the first token.
    "the first token after a role": (1, 1, [(0, 1, 0), (0.02, 1, 0)], None, 1, 0.02),
    "tokens that come together": (1, 2, [(0.1, 4, 0)], None, 4, 0.1),
    "a choice has ended": (2, 4, [(0.02, 2, 1), *[(0.02, 1, 0)] * 10], None, 12, 0.24),
    "an event only says the end": (1, 2, [*[(0.02, 1, 0)] * 4, (0, 1, 1)], 5, 4, 0.08),
    "events only say the ends": (3, 6, [*[(0.02, 3, 0)] * 4, (0, 3, 3)], 15, 12, 0.24),
    "one says it": (2, 4, [(0.02, 2, 0), (0, 1, 1), *[(0.02, 1, 0)] * 3], None, 5, 0.1),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_gaps_are_between_the_tokens_of_a_choice(
    figures: Figures, clock: Clock, stream: tuple[int, int, Writes, int | None, int, float]
) -> None:
    choices, first, writes, tokens, count, total = stream
    observation = observe(figures, choices=choices)
    observation.first_token(first)
    for seconds, events, ended in writes:
        clock.now += seconds
        observation.streamed(events, ended=ended)
    if tokens is not None:
        observation.finished(3, tokens)
    end(observation)
    assert figures.value(f"{GAPS}_count", **OPERATION) == count
    assert figures.value(f"{GAPS}_sum", **OPERATION) == pytest.approx(total)
    assert figures.value(f"{GAPS}_bucket", le="0.05", **OPERATION) == count


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("choices", [2, 5])
def test_choices_that_are_written_in_turns(
    figures: Figures, clock: Clock, path: str, choices: int
) -> None:
    """Each choice gets a token every 20 ms, one after the other: that is its latency."""
    observation = observe(figures, path=path, choices=choices)
    opening = [1] * choices if path.endswith("chat/completions") else []
    first, *rest = [*opening, *[1] * choices]
    observation.first_token(first)
    for events in rest:
        observation.streamed(events)
    for _ in range(10):
        clock.now += 0.02
        for _ in range(choices):
            observation.streamed(1)
    observation.finished(3, 11 * choices)
    end(observation)
    ((_, count),) = figures.only(f"{GAPS}_count").items()
    ((_, total),) = figures.only(f"{GAPS}_sum").items()
    assert count == 10 * choices
    assert total / count == pytest.approx(0.02)
    ((_, mean),) = figures.only("gen_ai_server_time_per_output_token_seconds_sum").items()
    assert mean == pytest.approx(0.02)


def test_tokens_of_a_cut_answer_are_estimated_and_marked(figures: Figures, clock: Clock) -> None:
    observation = observe(figures)
    observation.first_token(2)
    observation.streamed(3)
    observation.gone = True
    end(observation, 499)
    assert figures.only("octet_tokens_total") == {
        ("gpu-1", "estimated", "team", "m", "fp8", "input"): 7,
        ("gpu-1", "estimated", "team", "m", "fp8", "output"): 4,  # five events, one with the role
    }
    assert figures.only("octet_uncounted_streams_total") == {("m",): 1}
    assert figures.only("octet_client_disconnects_total") == {("/v1/chat/completions",): 1}


def test_a_cut_answer_whose_backend_counted_is_exact(figures: Figures) -> None:
    observation = observe(figures)
    observation.first_token(2)
    observation.finished(11, 3)
    observation.gone = True
    end(observation, 499)
    assert {key[1] for key in figures.only("octet_tokens_total")} == {"backend"}
    assert figures.only("octet_uncounted_streams_total") == {}


def test_a_stream_that_broke(figures: Figures, clock: Clock) -> None:
    observation = observe(figures)
    observation.first_token(2)
    clock.now += 0.02
    observation.streamed(1)
    observation.broken("lost")
    end(observation)
    assert figures.only("octet_broken_streams_total") == {("m",): 1}
    assert figures.only("octet_errors_total") == {("lost", "/v1/chat/completions"): 1}
    duration = "gen_ai_server_request_duration_seconds_count"
    assert figures.value(duration, **OPERATION, error_type="lost") == 1
    # Its mean would be of half an answer.
    assert figures.only("gen_ai_server_time_per_output_token_seconds_count") == {}


def test_a_request_that_no_backend_answered(figures: Figures) -> None:
    observation = observe(figures)
    observation.retried("refused")
    observation.attempt("main", "gpu-2", "fp8")
    observation.retried("lost")
    observation.attempt("spare", "cpu", "bf16")
    observation.refused("backend_unavailable")
    end(observation, 503)
    assert figures.only("octet_retries_total") == {("main", "refused"): 1, ("main", "lost"): 1}
    assert figures.only("octet_backend_failovers_total") == {("gpu-1", "m"): 1, ("gpu-2", "m"): 1}
    assert figures.only("octet_tokens_total") == {}
    assert observation.outcome == "backend_unavailable"


def test_the_gate(figures: Figures) -> None:
    observation = Observation(figures.metrics, "/v1/completions", "id-1")
    observation.routed("m")
    observation.pool = "main"
    observation.queued(0.2)
    observation.refused("rate_limit_exceeded")
    end(observation, 429)
    assert figures.value("octet_queue_seconds_sum", pool="main") == pytest.approx(0.2)
    errors = figures.only("octet_errors_total")
    assert errors == {("rate_limit_exceeded", "/v1/completions"): 1}


def test_an_unknown_model_makes_no_series_of_its_name(figures: Figures) -> None:
    """Or anybody could fill the gateway's memory, name by name."""
    observation = Observation(figures.metrics, "/v1/completions", "id-1")
    observation.refused("model_not_found")
    end(observation, 404)
    assert figures.only("octet_requests_total") == {("/v1/completions", "", "404"): 1}
    assert figures.only("gen_ai_server_request_duration_seconds_count") == {}


def test_a_whole_answer_without_usage_is_estimated(figures: Figures) -> None:
    observation = observe(figures, path="/v1/embeddings")
    observation.finished(None, None)
    end(observation)
    assert figures.only("octet_tokens_total") == {
        ("gpu-1", "estimated", "team", "m", "fp8", "input"): 7,
        ("gpu-1", "estimated", "team", "m", "fp8", "output"): 0,
    }


def test_the_tokens_of_a_tokenizer_cost_nothing(figures: Figures) -> None:
    observation = observe(figures, path="/tokenize")
    end(observation)
    assert figures.only("octet_tokens_total") == {}
