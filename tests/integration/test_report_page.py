"""The report's page in a real browser: it draws every plot, and no script fails.

Needs Chromium (`apt-get install chromium`, or Chrome); no other server. Run:
`pytest tests/integration/test_report_page.py`.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from calibrate.report.html import render_html
from tests.calibrate.report_data import budget, chunks, experts, make_report, sensitivity

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
INPUT = "model.layers.0.self_attn.q_proj.input"


def drawn(html: str, folder: Path) -> str:
    """The document after its scripts ran."""
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    page = folder / "report.html"
    page.write_text(html, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    command = [BROWSER, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    result = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return result.stdout


def test_a_browser_draws_every_plot(tmp_path: Path) -> None:
    report = make_report(
        counts=chunks(outlier={INPUT: 3e4}),
        sensitivity=sensitivity(),
        budget=budget(),
        experts=experts(),
    )
    dom = drawn(render_html(report.as_json()), tmp_path)
    assert 'data-ready="true"' in dom  # set after the last plot: no script failed before it
    labels = dict(re.findall(r'id="([\w-]+)" class="plot[^>]*aria-label="([^"]*)"', dom))
    assert labels.keys() >= {
        *("plot-distribution", "sqnr-inputs", "sqnr-small", "sqnr-cache", "sqnr-weights"),
        *("sqnr-outputs", "range-underflow"),
        *("plot-sensitivity", "plot-budget", "plot-experts"),
    }
    assert "The same for " in dom  # the scales of this report do not move: nothing to draw
    assert INPUT in labels["plot-distribution"]  # the worst is shown first
    assert not re.search(r"\d{4}|\de[+-]?\d", labels["plot-distribution"])  # 149,504, no 6.1e-5
    body = dom.split("<tbody>")[-1]
    assert body.count("<tr>") == len(report.tensors) + len(report.weights)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_browser_draws_what_is_known_of_scales_made_at_run_time(
    recipe: str, tmp_path: Path
) -> None:
    dom = drawn(render_html(make_report(recipe, convergence=None).as_json()), tmp_path)
    assert 'data-ready="true"' in dom
    assert "made at run time" in dom
