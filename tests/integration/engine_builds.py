"""Builds engines and throws them away: `python -m tests.integration.engine_builds < jobs.json`.

Runs in the environment that has TensorRT-RTX (and no pytest). A job is a name and the keyword
arguments of `build_engine`; for each, a JSON object gives the manifest's details, with the peak of
this process's memory so far, or the error's line.
"""

import gc
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from export.engine.build import build_engine
from octet.errors import OctetError


def build(job: dict[str, Any]) -> dict[str, Any]:
    gc.collect()  # a graph and what reads its weights refer to each other
    calibration = Path(job.pop("calibration"))
    with tempfile.TemporaryDirectory(dir=calibration.parent) as directory:
        try:
            manifest = build_engine(calibration, Path(directory) / "engine", **job)
        except OctetError as error:
            return {"error": f"{type(error).__name__}: {error}"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return manifest.details | {"peak_bytes": peak}


def main() -> None:
    jobs: dict[str, dict[str, Any]] = json.load(sys.stdin)
    json.dump({name: build(job) for name, job in jobs.items()}, sys.stdout)


if __name__ == "__main__":
    main()
