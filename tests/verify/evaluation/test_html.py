"""The page of a comparison: whole, self-contained, and safe whatever a target is called."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from octet.proof.top_k import TopK
from octet.statistics import Interval
from verify.evaluation.comparison import compare
from verify.evaluation.html import render_page, write_page
from verify.evaluation.scores import Evaluation, Scores
from verify.evaluation.sequences import Sequences

NAMES = ("onnx", "</script><b>far")


def evaluation(*, reference: bool) -> Evaluation:
    generator = np.random.default_rng(0)
    sizes = (3, 40, 7, 12, 5, 9, 30, 20)
    ids = tuple(tuple(range(size + 1)) for size in sizes)
    origins = tuple(f"s.jsonl, line {i}" for i in range(1, len(sizes) + 1))
    sequences = Sequences(
        Path("s.jsonl"), "", 64, origins, ("",) * len(sizes), ids, ("",) * len(sizes)
    )

    def scores(name: str) -> Scores:
        nll = tuple(generator.random(size) for size in sizes)
        kl = tuple(generator.lognormal(-6, 2, size) for size in sizes) if reference else None
        likeliest = tuple(
            TopK(np.full((size, 1), 3, np.int32), np.full((size, 1), -0.5, np.float32))
            for size in sizes
        )
        return Scores(name, nll, kl, likeliest)

    origin = scores("original") if reference else None
    return Evaluation(sequences, 20, origin, tuple(map(scores, NAMES)), decode)


def decode(ids: Sequence[int]) -> str:
    return "".join({3: "\u202e\0", 7: "<b>\n"}.get(token, f" {token}") for token in ids)


def test_a_page_holds_every_figure_and_fetches_nothing(tmp_path: Path) -> None:
    found = evaluation(reference=True)
    tasks = [{"toy acc": Interval(0.5, 0.4, 0.6)}, {}]
    path = tmp_path / "page.html"
    path.write_text("before")
    write_page(path, found, compare(found, tasks))
    text = path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    own = re.sub(r"<script>\s*/\*\*.*?</script>", "", text, flags=re.DOTALL)  # without Plotly
    assert "default-src 'none'" in own and not re.search(r"(src|href)\s*=(?!\"#summary)", own)
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', own)
    data = json.loads(embedded)
    assert [row["name"] for row in data["rows"]] == list(NAMES)
    assert abs(sum(data["distributions"][0]["share"]) - 1) < 1e-9
    assert len(data["per_sample"][1]["kl"]) == 8
    assert "&lt;/script&gt;&lt;b&gt;far" in own and "toy acc" in own
    for row in data["rows"]:
        assert f"{1000 * row['kl']['mean']:.4g}" in own


def test_without_a_reference_there_is_no_divergence_to_show(tmp_path: Path) -> None:
    found = evaluation(reference=False)
    write_page(tmp_path / "page.html", found, compare(found))
    text = (tmp_path / "page.html").read_text()
    assert 'id="samples"' in text and 'id="distribution"' not in text


def test_the_page_says_first_what_each_artifact_costs(tmp_path: Path) -> None:
    found = evaluation(reference=True)
    text = render_page(found, compare(found))
    first = text[text.index('id="summary"') : text.index("</section>")]
    for row in compare(found).rows:
        assert row.change is not None
        mean, low, high = (f"{100 * x:+.2f}" for x in vars(row.change).values())
        assert f"{mean} % of perplexity ({low} to {high} %), KL" in first.replace("&#43;", "+")
        assert float(low) < float(mean) < float(high)
    assert "may cost" in first and "calibrate --sensitivity" in first


@pytest.mark.parametrize("reference", [True, False])
def test_the_worst_tokens_are_quoted_and_drawn_as_text(reference: bool) -> None:
    found = evaluation(reference=reference)
    result = compare(found)
    text = render_page(found, result)
    section = text[text.index('id="worst"') : text.index('id="samples"')]
    assert section.count("<li>") == (20 if reference else 10)  # the first is what others lose to
    assert "<b>\n" not in section and "\u202e" not in section and "\0" not in section
    worst = result.rows[-1].worst[0]
    shown = unescape(section)
    assert worst.token.replace(" ", "␣") in shown and worst.origin in shown
    for logprob in (worst.logprob, worst.reference_logprob, -0.5):
        assert f"{100 * np.exp(logprob):.3g} %" in shown.replace("\u00a0", " ")
    assert "no tokenizer" not in section


def test_without_a_tokenizer_tokens_are_shown_by_number() -> None:
    found = replace(evaluation(reference=True), decode=None)
    text = render_page(found, compare(found))
    assert "No artifact has a tokenizer" in text and "<mark>⟨" in text


def test_a_single_artifact_has_no_column_that_is_empty() -> None:
    found = evaluation(reference=False)
    found = replace(found, targets=found.targets[:1])
    text = render_page(found, compare(found))
    table = text[text.index("<table>") : text.index("</table>")]
    assert "change" not in table and ">-<" not in table
    perplexity = compare(found).rows[0].perplexity.mean
    assert f"Perplexity {perplexity:.4g} on held-out text" in text
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    means = [float(nll.mean()) for nll in found.targets[0].nll]
    assert json.loads(embedded)["per_sample"][0]["change"] == means
