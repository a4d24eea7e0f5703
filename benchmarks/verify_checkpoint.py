"""Verifying a checkpoint of a 3B Llama shape: peak memory and time, without next tokens.

The claim it checks: the peak resident set stays under 500 MB, whatever the size of the model.
Random weights and scales from their maxima, as in export_checkpoint. Exits with 1 over the limit.

    python benchmarks/verify_checkpoint.py [--output FILE] [--recipe fp8] [--directory DIR]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from card import conditions, report
from export_checkpoint import calibrate
from streaming_memory import CONFIG, write_checkpoint

from export.checkpoint.write import export_checkpoint
from octet.recipe import Recipe

LIMIT = 500e6  # bytes
RUN = """
import json, sys, time
from pathlib import Path
from verify.artifact import verify
calibration, out = map(Path, sys.argv[1:])
started = time.perf_counter()
found = verify(out, calibration=calibration)
seconds = time.perf_counter() - started
assert found.exit_code == 0, found.problems
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
elements = sum(row.elements for row in found.rows)
print(json.dumps({"seconds": seconds, "peak": peak, "elements": elements}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--directory", type=Path, help="where 12 GB are free")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octet-", dir=options.directory) as name:
        directory = Path(name)
        config = CONFIG | {"num_hidden_layers": options.layers}
        _, size = write_checkpoint(directory / "model", config)
        calibrate(directory, Recipe.load(options.recipe))
        export_checkpoint(directory / "calibration", directory / "out")
        written = sum(path.stat().st_size for path in directory.glob("out/*.safetensors"))
        load = os.getloadavg()[0]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
        command: list[str | Path] = [
            sys.executable,
            "-c",
            RUN,
            directory / "calibration",
            directory / "out",
        ]
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        found = json.loads(done.stdout)
    row = {
        "original_gb": size / 1e9,
        "export_gb": written / 1e9,
        "peak_resident_gb": found["peak"] / 1e9,
        "seconds": found["seconds"],
        "ns_per_quantized_weight": found["seconds"] / found["elements"] * 1e9,
    }
    card = conditions(
        model=f"Llama 3B shape, {options.layers} layers, random weights, BF16, in the page cache",
        recipe=options.recipe,
        load_before=round(load, 2),
        seconds="hashes of original and export, names, every tensor; no next tokens",
    )
    report("verify_checkpoint", card, [row], options.output)
    if found["peak"] > LIMIT:
        sys.exit(f"peak resident set {found['peak'] / 1e9:.2f} GB is over {LIMIT / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
