"""The report of a build shows every character of what it says."""

import io

from rich.console import Console

from export.engine.report import print_report


def test_an_extra_in_brackets_is_no_markup() -> None:
    stream = io.StringIO()
    status = "built, unproven: jinja2 is not installed: pip install 'octet-llm[serve]'"
    details = {
        "precision": {"of": "the graph", "products": {"model.layers.0.x": "fp8"}, "matmuls": 1},
        "builder": {"name": "TensorRT", "version": "11"},
        "scratch_bytes": 0,
        "targets": ["sm89"],
        "plan_bytes": 1_000_000,
        "build_seconds": 1.0,
        "status": status,
    }
    print_report(Console(file=stream, width=200), details)
    assert status in stream.getvalue()
