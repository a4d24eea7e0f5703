"""The divergence is what its definition gives from whole logits, however it is computed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.quality.divergence import Reference, Sums, evaluation_batches
from calibrate.samples.batches import Batch, make_batches
from calibrate.samples.tokens import load_tokenizer
from calibrate.scales.derive import derive_scales
from calibrate.simulate.model import simulate
from octet.errors import NumericsError
from octet.limit import LEAST_SAMPLES
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.statistics import t_quantile, upper_bound
from tests.calibrate.bench import Bench, histograms_of, make_bench, recipe_with, sample_logits
from tests.calibrate.runs import batches_from

ACCURACY = Path(__file__).parents[3] / "benchmarks" / "results" / "accuracy-epyc-2core.json"


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return make_bench(tiny_model)


def test_a_model_does_not_diverge_from_itself(bench: Bench) -> None:
    cost = bench.reference.compare()
    assert (cost.kl, cost.kl_error, cost.kl_max, cost.change) == (0, 0, 0, 0)
    assert cost.perplexity == cost.reference_perplexity
    assert cost.tokens == sum(batch.tokens for batch in bench.batches)
    assert cost.samples == 12


def test_it_is_the_definition_applied_to_whole_logits(bench: Bench) -> None:
    """Every figure, from float64 logits of each sample by itself."""
    recipe = recipe_with("fp8-static", kv_cache="e4m3")
    before = sample_logits(bench.model, bench.batches)
    with simulate(bench.model, bench.checkpoint.spec, recipe, bench.scales(recipe)):
        cost = bench.reference.compare()
        after = sample_logits(bench.model, bench.batches)
    ids = [
        row[:n]
        for batch in bench.batches
        for row, n in zip(batch.token_ids, batch.lengths, strict=True)
    ]
    p = [logits.log_softmax(-1) for logits in before]
    q = [logits.log_softmax(-1) for logits in after]
    each = [(a.exp() * (a - b)).sum(-1) for a, b in zip(p, q, strict=True)]
    kl = torch.cat(each)

    def nll(logs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            -log[:-1].gather(1, row[1:, None])[:, 0] for log, row in zip(logs, ids, strict=True)
        ]

    def error(samples: list[torch.Tensor]) -> float:
        values = torch.cat(samples)
        spread = [float((x - values.mean()).sum()) ** 2 for x in samples]
        return math.sqrt(sum(spread) * len(samples) / (len(samples) - 1)) / len(values)

    # A value that lies on a rounding boundary may fall on its other side without the padding.
    near = {"rel": 0.02}
    change = [b - a for a, b in zip(nll(p), nll(q), strict=True)]
    assert cost.kl == pytest.approx(float(kl.mean()), **near)
    assert cost.kl_error == pytest.approx(error(each), **near)
    assert cost.kl_max == pytest.approx(float(kl.max()), rel=0.1)
    assert cost.kl_p90 == pytest.approx(float(kl.quantile(0.9)), rel=0.05)
    assert cost.reference_perplexity == pytest.approx(float(torch.cat(nll(p)).mean().exp()))
    assert cost.perplexity == pytest.approx(float(torch.cat(nll(q)).mean().exp()), rel=1e-3)
    assert cost.log_ratio == pytest.approx(float(torch.cat(change).mean()), abs=1e-3)
    assert cost.log_ratio_error == pytest.approx(error(change), **near)
    assert cost.change == pytest.approx(cost.perplexity / cost.reference_perplexity - 1)
    assert cost.samples == cost.samples_predicted == 12
    for bound, samples in ((cost.kl_bound, each), (math.log1p(cost.change_bound), change)):
        sums, sizes = [float(x.sum()) for x in samples], [len(x) for x in samples]
        assert bound == pytest.approx(upper_bound(sums, sizes), **near)
    # No lower than if divergences were symmetric, which they are not.
    assert cost.kl_bound >= cost.kl + t_quantile(0.95, 11) * cost.kl_error


def test_how_many_rows_are_computed_at_a_time_does_not_show(bench: Bench) -> None:
    recipe = Recipe.load("fp8")
    reference = Reference(bench.model, bench.checkpoint.spec, bench.batches)
    with simulate(bench.model, bench.checkpoint.spec, recipe, bench.scales(recipe)):
        whole = reference.compare()
        reference.rows_at_once = 7
        parts = reference.compare()
    assert parts.kl == pytest.approx(whole.kl, rel=1e-4)
    assert parts.perplexity == pytest.approx(whole.perplexity, rel=1e-6)


def test_progress_counts_every_token_once(bench: Bench) -> None:
    done: list[int] = []
    bench.reference.compare(advance=done.append)
    assert sum(done) == sum(batch.tokens for batch in bench.batches)


def test_nan_is_an_error(bench: Bench) -> None:
    def states(index: int) -> torch.Tensor:
        return bench.reference.hidden[index] * torch.nan

    with pytest.raises(NumericsError, match="NaN"):
        bench.reference.compare(states=states)


def test_one_sample_bounds_nothing(bench: Bench) -> None:
    batch = Batch(torch.arange(1, 9)[None], (8,), ("one",))
    reference = Reference(bench.model, bench.checkpoint.spec, [batch])
    assert reference.compare().kl_bound == math.inf


def test_the_bound_of_a_few_samples_of_skewed_divergence_is_further_out() -> None:
    """One of ten costs a hundred times what the others do."""
    lengths = (7, 9, 8, 6, 9, 7, 8, 9, 8, 9)
    costs = np.array([*([0.01] * 9), 1.0])
    tokens = np.array(lengths, np.float64)
    found = Sums(costs * tokens, tokens, costs * tokens, tokens).figures()
    reach = t_quantile(0.95, 9) * found["kl_error"]
    assert found["kl_bound"] > found["kl"] + 1.3 * reach
    assert found["kl_bound"] == found["log_ratio_bound"]


def test_evaluation_batches_are_spread_over_all_lengths() -> None:
    rows = [[1] * length for length in range(400, 0, -4)]
    batches = make_batches(rows, [""] * len(rows), batch_size=4)
    chosen = evaluation_batches(batches, 4000)
    tokens = sum(batch.tokens for batch in chosen)
    assert 4000 <= tokens < 7000
    mean = tokens / sum(len(batch.lengths) for batch in chosen)
    assert 150 < mean < 250  # of all: 202
    assert evaluation_batches(batches, 10**9) == batches


def test_evaluation_batches_of_long_samples_are_enough_samples() -> None:
    batches = make_batches([[1] * 4000] * 20, [""] * 20, batch_size=1)
    assert len(evaluation_batches(batches, 16_384)) == LEAST_SAMPLES
    assert evaluation_batches(batches[:6], 16_384) == batches[:6]


@pytest.mark.slow
def test_the_simulation_costs_what_the_embedded_engine_was_measured_to(
    example_model: Path, example_samples: Path
) -> None:
    """`benchmarks/accuracy.py` ran the exports over the same 128 held-out samples."""
    recorded = {
        (row["weights"], row["cache"]): row["perplexity"]
        for row in json.loads(ACCURACY.read_text())["results"]
    }
    checkpoint = Checkpoint.open(example_model)
    tokenizer = load_tokenizer(checkpoint)

    model = load_model(checkpoint, "float32")
    batches = batches_from(example_samples / "calibration.jsonl", 8, tokenizer)
    histograms = histograms_of(checkpoint, batches, "float32")
    judged = batches_from(example_samples / "heldout.jsonl", 128, tokenizer)
    reference = Reference(model, checkpoint.spec, judged)
    plain = recorded["bfloat16", "none"]
    for kv_cache in ("float16", "e5m2"):
        recipe = Recipe.load("fp8").model_copy(update={"kv_cache": kv_cache})
        scales = derive_scales(checkpoint, recipe, histograms).scales
        with simulate(model, checkpoint.spec, recipe, scales):
            cost = reference.compare()
        assert cost.reference_perplexity == pytest.approx(plain, rel=1e-6)
        # Rounding is chaotic (docs/LOG.md): two honest implementations differ by a noise of their
        # own, of the order of what either costs.
        served = math.log(recorded["fp8", kv_cache] / plain)
        assert abs(cost.log_ratio - served) < 3 * cost.log_ratio_error
