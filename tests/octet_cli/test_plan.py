"""`octet plan`, from the command line to what it prints."""

import json
from pathlib import Path

import pytest

from tests.command import octet
from tests.octet.plan.shapes import write_config

GOAL = ("--gpu", "h100", "--context", "32k", "--concurrency", 64)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_the_page_and_the_json_agree(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a narrow terminal, too, where no figure may be cut short."""
    monkeypatch.setenv("COLUMNS", str(columns))
    model, page = write_config(tmp_path / "Llama-3.1-8B"), tmp_path / "page.html"
    done = octet("plan", model, *GOAL, "--price", 2, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["gpu"] == "H100" and data["context"] == 32768 and data["concurrency"] == 64
    row = next(x for x in data["rows"] if (x["recipe"], x["kv_cache"]) == ("fp8", "e4m3"))
    shown = octet("plan", model, *GOAL, "--price", 2, "--html", page)
    assert shown.returncode == 0, shown.stderr
    for text in (f"{row['memory']['blocks']:,}", f"≤ {row['tokens_per_s']:,.0f}"):
        assert text in shown.stdout and text in page.read_text()
    said = " ".join(shown.stdout.split())
    assert "≤ is a roofline" in said and "…" not in said
    assert "vllm serve --max-model-len 32768 --max-num-seqs 64" in said


def test_a_benchmark_replaces_the_bound(tmp_path: Path) -> None:
    served = {"recipe": "fp8", "kv_cache": "e4m3", "tensor_parallel": 2}
    figures = {"tokens_per_s": {"median": 1000.0, "low": 990.0, "high": 1010.0}}
    bench = {"served": [None, served], "gpu": "NVIDIA H100 80GB HBM3", "loads": ["64x4096x128"]}
    bench["cells"] = [[{}, {"figures": figures}]]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    model = write_config(tmp_path / "model")
    done = octet("plan", model, *GOAL, "--bench", tmp_path / "bench.json", "--json")
    assert done.returncode == 0, done.stderr
    rows = {(x["recipe"], x["kv_cache"]): x for x in json.loads(done.stdout)["rows"]}
    assert rows["fp8", "e4m3"]["basis"] == "extrapolated"
    assert rows["fp8", "e5m2"]["basis"] == "roofline"
    assert rows["fp8", "e4m3"]["tokens_per_s"] < rows["fp8", "e5m2"]["tokens_per_s"]
