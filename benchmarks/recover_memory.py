"""The peak memory of `octet recover` on a CPU: the whole model, norms alone, and layer by layer.

Writes a random Llama of 94 million weights (hidden 1024, 8 layers, MLP 2816, BF16) to a temporary
directory, calibrates it for `nvfp4`, trains it in each way and reads VmHWM, the peak that Linux
keeps of a process. All steps of the command are in it: golden records, training, counts and scales.
Training layer by layer begins where the command finds only 1 GB free, as it is told here. Random
weights have little to recover, so the command may refuse to write: the memory is the same.

    python benchmarks/recover_memory.py [--output FILE] [--directory DIR]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from card import conditions, report
from streaming_memory import CONFIG, short_samples, write_checkpoint

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
RUN = """
import sys
import calibrate.recover
from octet_cli.main import main
free = int(sys.argv.pop(1))
calibrate.recover.free_memory = lambda device: free
try:
    main()
finally:
    peak = [x for x in open("/proc/self/status") if x.startswith("VmHWM")][0]
    open({path!r}, "w").write(peak)
"""
WAYS = {
    "whole model": ("all", 1 << 40),
    "whole model, norms alone": ("norms", 1 << 40),
    "layer by layer": ("all", 10**9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where 2 GB are free")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octet-", dir=options.directory) as name:
        directory = Path(name)
        _, size = write_checkpoint(directory / "model", CONFIG | SHAPE)
        lines = list(short_samples(48))
        (directory / "samples.jsonl").write_text("".join(lines[:32]))
        (directory / "held-out.jsonl").write_text("".join(lines[32:]))
        run(directory, 1 << 40, "calibrate", str(directory / "model"), "--recipe", "nvfp4")
        rows = []
        for way, (train, free) in WAYS.items():
            started = time.perf_counter()
            peak = run(
                directory,
                free,
                *("recover", str(directory / "calibration"), "--train", train, "--epochs", "1"),
                *("--held-out", str(directory / "held-out.jsonl")),
            )
            rows.append(
                {"way": way, "peak_gb": peak / 1e9, "seconds": time.perf_counter() - started}
            )
    card = conditions(
        model=f"random Llama, 8 layers of 11.3 million weights, {size / 1e6:.0f} MB in BF16",
        samples="32 of 32 tokens, 8 in a batch; 16 held out",
        recipe="nvfp4",
        command="octet recover --epochs 1 --no-predict",
    )
    report("recover_memory", card, rows, options.output)


def run(directory: Path, free: int, command: str, *arguments: str) -> int:
    """Returns VmHWM of a command, in bytes; `free` is what it finds of memory."""
    peak = directory / "peak"
    peak.unlink(missing_ok=True)
    out = directory / ("calibration" if command == "calibrate" else "recovered")
    done = subprocess.run(
        [
            *(sys.executable, "-c", RUN.format(path=str(peak)), str(free), command, *arguments),
            *("--samples", str(directory / "samples.jsonl"), "--count", "32"),
            *("--max-length", "32", "--allow-few-samples", "--no-predict", "--device", "cpu"),
            *("--out", str(out), "--force", "--restart"),
        ],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    if done.returncode not in (0, 1):  # 1: the divergence is not lower
        sys.exit(f"octet {command} failed with exit code {done.returncode}")
    return int(peak.read_text().split()[1]) * 1024


if __name__ == "__main__":
    main()
