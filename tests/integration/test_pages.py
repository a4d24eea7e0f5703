"""Every page in a real browser, wide and narrow, light and dark: axe-core finds nothing grave, no
console message, no request to elsewhere, and nothing wider than the window.

Needs Chromium (`apt-get install chromium`, or Chrome) and .integration/browser. Run:
`pytest tests/integration/test_pages.py`.
"""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.report.html import render_html
from octet.statistics import Interval
from serve.run import DrainingServer, bind, serve_gateway
from tests.calibrate.report_data import budget, chunks, experts, make_report, sensitivity
from tests.fake_servers import FakeOpenAI, running
from tests.integration.conftest import EXAMPLE, octet, require
from tests.integration.servers import layout
from tests.integration.servers.process import free_port
from tests.integration.test_report_page import BROWSER, INPUT
from tests.serve.conftest import configured, serving_gateway
from tests.serve.gateway.test_reload import one_pool
from tests.serve.http.test_admin import ADMIN, KEY
from tests.serve.proof.fake_proofs import WORSE, served, write_proofs
from verify.bench.figures import Bench, Cell, Spread
from verify.bench.html import write_page as write_bench
from verify.bench.load import FIGURES
from verify.evaluation.comparison import Comparison, compare
from verify.evaluation.evaluator import evaluate
from verify.evaluation.html import write_page as write_evaluation
from verify.evaluation.targets.checkpoint import CheckpointTarget

SCRIPT = Path(__file__).with_name("page_in_browser.py")
EVIL = "</script><b>http://elsewhere.example/x.png"  # a name that would show if it were not escaped


def look(*urls: str, steps: Sequence[tuple[str, str, str]] = ()) -> list[dict[str, Any]]:
    """Returns what is wrong with each page, at each width and in each colour scheme.

    Before that, takes `steps` on it (`page_in_browser.py`).
    """
    require(layout.BROWSER)
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    command = [str(layout.python(layout.BROWSER)), "-P", str(SCRIPT), BROWSER, *urls]
    command += ["--steps", json.dumps(steps)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    assert len(found) == 4 * len(urls)
    return found


def assert_clean(found: list[dict[str, Any]]) -> None:
    wrong = [
        f"{page['where']}: {kind}: {page[kind]}"
        for page in found
        for kind in ("console", "errors", "requests", "overflow", "axe")
        if page[kind]
    ]
    assert wrong == [], "\n".join(wrong)


def test_the_browser_finds_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><html lang=en><title>x</title><main><p style='width: 2000px; color: #ccc;"
        " background: #ddd'>pale</p><img src=http://127.0.0.1:9/x.png><script>console.log(1);"
        "undefined.x</script>"
    )
    for one in look(page.as_uri()):
        assert one["overflow"] > 0 and one["requests"] == ["http://127.0.0.1:9/x.png"]
        assert "1" in one["console"] and "undefined" in one["errors"][0]
        assert {x.split(": ")[1] for x in one["axe"]} >= {"color-contrast", "image-alt"}


@pytest.mark.parametrize("recipe", ["fp8-static", "fp8", "nvfp4"])
def test_report(recipe: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = (
        {"convergence": None}
        if recipe != "fp8-static"
        else {
            "counts": chunks(outlier={INPUT: 3e4}),
            "sensitivity": sensitivity(),
            "budget": budget(),
            "experts": experts(),
        }
    )
    report = make_report(**parts) if recipe == "fp8-static" else make_report(recipe, **parts)
    (tmp_path / "report.html").write_text(render_html(report.as_json()), "utf-8")
    assert_clean(look((tmp_path / "report.html").as_uri()))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """The example in bfloat16 and in float32, against itself; and the page of it."""
    model = EXAMPLE / "model"
    reference = CheckpointTarget(model)
    sequences = reference.sequences(EXAMPLE / "samples" / "heldout.jsonl", count=4, max_length=128)
    targets = [CheckpointTarget(model, dtype="bfloat16"), CheckpointTarget(model)]
    found = evaluate(targets, reference, sequences, k=20)
    found = replace(found, targets=(found.targets[0], replace(found.targets[1], name=EVIL)))
    task = {"toy acc": Interval(0.5, 0.4, 0.6)}
    result = compare(found, [task, task])
    page = tmp_path_factory.mktemp("evaluation") / "evaluation.html"
    write_evaluation(page, found, result)
    return result, page


def test_evaluation(comparison: tuple[Comparison, Path]) -> None:
    result, page = comparison
    worst = result.rows[0].worst
    assert len(worst) == 10 and worst[0].kl == result.rows[0].kl_max
    assert all(one.before and one.token for one in worst)
    assert_clean(look(page.as_uri()))


def test_benchmark(comparison: tuple[Comparison, Path], tmp_path: Path) -> None:
    def cell(scale: float, ratio: float | None) -> Cell:
        figures = {name: Spread(1234.5 * scale, 1200.0 * scale, 1300.0 * scale) for name in FIGURES}
        ratios = {name: Spread(ratio, ratio, ratio) for name in FIGURES} if ratio else None
        memory = Spread(2.0**33, 2.0**33, 2.0**33)
        return Cell(figures, ratios, memory, None, 3)

    names = ("http://127.0.0.1:8001", EVIL)
    cells = tuple((cell(scale, None), cell(2 * scale, 2.0)) for scale in (0.01, 1.0, 3.0))
    loads = ("1x512x128", "16x512x128", "256x512x128")
    warnings = ("requests of 128 tokens ended early",)
    for quality in (comparison[0], None):
        page = tmp_path / f"bench-{'quality' if quality else 'speed'}.html"
        write_bench(page, Bench(names, loads, 3, 64, cells, (None, 4096), quality, warnings))
    assert_clean(look(*(path.as_uri() for path in sorted(tmp_path.glob("*.html")))))


def test_plan(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    size = ("--gpu", "h100", "--context", 512, "--concurrency", 64, "--price", 2)
    octet("plan", EXAMPLE / "model", *size, "--html", page)
    assert_clean(look(page.as_uri()))


@pytest.fixture
async def upstream() -> AsyncIterator[FakeOpenAI]:
    async with running(FakeOpenAI()) as server:
        yield server


@pytest.mark.parametrize("down", [False, True])
async def test_status(upstream: FakeOpenAI, down: bool, tmp_path: Path) -> None:
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstream))
    async with serving_gateway(gateway) as served:
        if down:
            await upstream.stop()
        found = await asyncio.to_thread(look, f"{served.url}/status")
    assert_clean(found)


LIVE: list[tuple[str, str, str]] = [("#connection", "await", "live")]
PLAYED: list[tuple[str, str, str]] = [
    *LIVE,
    ("#prompt", "type", "def route("),
    ("#tokens", "type", "12"),
    ("#send", "press", "Enter"),
    ("#outcome", "await", "tokens, the first after"),
    ("#facts", "await", "fp8/right"),
    ("#problems", "await", "kept; 0 of 100 MB"),
    ("#problems", "await", "paused by a failure; 0 kept; not kept: 1 failed"),
    ("#rows", "await", "%"),
    ("#admin-key", "type", KEY),
    ("#admin-key", "press", "Enter"),
    ("#done", "await", "Unlocked."),
    ("#problems", "await", "captured: No such file or directory"),
    ("button[data-action=prove]", "press", "Enter"),
    ("#done", "await", "is being proven"),
    (".backend", "await", "as expected"),
    ("button[data-action=drain]", "press", "Space"),
    ("#confirm-text", "await", "No other backend of this pool serves."),
    ("#confirm-no", "press", "Escape"),
    ("button[data-action=drain]", "press", "Space"),
    ("#confirm-title", "await", "Drain fp8 / right?"),
]


async def test_live_page(tmp_path: Path) -> None:
    """Two backends, one of them refused; a pool that cannot be reached; a capture that fails."""
    proofs = write_proofs(tmp_path / "proofs")
    gone = tmp_path / "gone"
    gone.mkdir()
    async with running(served()) as right, running(served(WORSE)) as wrong:
        backends = ", ".join(
            f"{{type: vllm, url: '{url}', model: fake, name: {name}}}"
            for url, name in ((right.url, "right"), (wrong.url, "wrong"))
        )
        text = f"""
            models:
              m: {{pool: fp8, fallback: [away], capture: {{file: {tmp_path}/m.jsonl, share: 1}}}}
              n: {{pool: fp8, capture: {{file: {gone}/n.jsonl, share: 1}}}}
            tiers: {{exact: {{max_kl: 0.01}}}}
            pools:
              fp8: {{precision: fp8, backends: [{backends}], proof: {{golden: {proofs}}}}}
              away: {{backends: [{{type: vllm, url: 'http://127.0.0.1:9'}}]}}
            {ADMIN}
        """
        async with serving_gateway(configured(tmp_path / "octet.yaml", text)) as gateway:
            gone.rmdir()
            body = {"model": "n", "prompt": "x", "max_tokens": 4}
            async with gateway.session.post("/v1/completions", json=body) as response:
                assert response.status == 200
            found = await asyncio.to_thread(look, f"{gateway.url}/ui", steps=PLAYED)
    assert_clean(found)
    assert len((tmp_path / "m.jsonl").read_text("utf-8").splitlines()) == len(found)


async def test_live_page_of_a_gateway_that_is_restarted(
    upstream: FakeOpenAI, tmp_path: Path
) -> None:
    port = free_port()  # which nobody else takes while the gateway is down
    path = tmp_path / "octet.yaml"

    async def restart_for_ever() -> None:
        while True:
            gateway = configured(path, one_pool(upstream))
            with bind("127.0.0.1", port) as listener:
                servers: list[DrainingServer] = []
                serving = serve_gateway(gateway, listener, on_started=servers.append)
                task = asyncio.create_task(serving)
                await asyncio.sleep(5)
                servers[0].handle_exit(signal.SIGTERM, None)
                assert await task  # an open page cuts nothing short, and delays nothing
            await asyncio.sleep(2)

    restarting = asyncio.create_task(restart_for_ever())
    await asyncio.sleep(1)
    steps = [*LIVE, ("#connection", "await", "not connected"), *LIVE]
    looking = asyncio.create_task(
        asyncio.to_thread(look, f"http://127.0.0.1:{port}/ui", steps=steps)
    )
    await asyncio.wait({looking, restarting}, return_when=asyncio.FIRST_COMPLETED)
    restarting.cancel()
    for page in await looking:
        assert page["errors"] == [] and page["axe"] == []
