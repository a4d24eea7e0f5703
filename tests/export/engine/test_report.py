"""The report of a build shows every character of what it says."""

import io
from typing import Any

from rich.console import Console

from export.engine.report import print_report

STATUS = "built, unproven: jinja2 is not installed: pip install 'octet-llm[serve]'"


def printed(width: int, products: dict[str, str], matmuls: int) -> str:
    stream = io.StringIO()
    details: dict[str, Any] = {
        "precision": {"of": "the graph", "products": products, "matmuls": matmuls},
        "builder": {"name": "TensorRT", "version": "11"},
        "scratch_bytes": 0,
        "targets": ["sm89"],
        "plan_bytes": 1_000_000,
        "build_seconds": 1.0,
        "status": STATUS,
    }
    print_report(Console(file=stream, width=width), details)
    return stream.getvalue()


def test_an_extra_in_brackets_is_no_markup() -> None:
    assert STATUS in printed(200, {"model.layers.0.x": "fp8"}, 1)


def test_a_narrow_terminal_shows_each_count_and_precision() -> None:
    text = printed(40, {f"model.layers.{i}.self_attn.q_proj": "fp8" for i in range(7)}, 21)
    assert max(map(len, text.splitlines())) <= 40 and "…" not in text
    assert [line.split()[-2:] for line in text.splitlines() if " 7 " in line or " 14 " in line] == [
        ["7", "fp8"],
        ["14", "float16"],
    ]
