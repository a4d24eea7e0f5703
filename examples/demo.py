"""The whole pipeline on the example model: calibrate, export, evaluate, serve, complete.

    python examples/demo.py [--out out/demo]

Every step is a command that a user would type; it is printed before it runs.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(os.path.relpath(Path(__file__).parent / "python-lm"))
MODEL = EXAMPLE / "model"
OCTET = [sys.executable, "-m", "octet"]
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self',
)


def octet(*arguments: str | Path, capture: bool = False) -> str:
    """Runs one `octet` command, showing it; returns its standard output if captured."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ octet {' '.join(words)}", flush=True)
    process = subprocess.Popen(
        [*OCTET, *words], text=True, stdout=subprocess.PIPE if capture else None
    )
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:  # it was interrupted, too, and says how to continue
        process.wait()
        raise
    if process.returncode:
        sys.exit(process.returncode)
    return output or ""


@contextmanager
def server(export: Path) -> Iterator[str]:
    """`octet serve` on a free port, until the block ends; yields its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"\n$ octet serve {export} --port {port}", flush=True)
    process = subprocess.Popen([*OCTET, "serve", str(export), "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=45)  # longer than the server waits for running requests
        except subprocess.TimeoutExpired:
            process.kill()


def wait_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server stopped with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    sys.exit(f"the server was not ready within {timeout_s:.0f} s")


def complete(url: str) -> None:
    """Three prompts with the official client, the last one streamed."""
    from openai import OpenAI  # takes a second

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for prompt in PROMPTS[:-1]:
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=32, temperature=0)
        show(prompt, answer.choices[0].text, answer.choices[0].finish_reason)
    print("\n--- streamed " + "-" * 50 + f"\n{PROMPTS[-1]}", end="", flush=True)
    reason = None
    stream = client.completions.create(
        model=model, prompt=PROMPTS[-1], max_tokens=32, temperature=0, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
        reason = chunk.choices[0].finish_reason or reason
    print(f"\n[{reason}]")


def show(prompt: str, text: str, reason: str) -> None:
    print("\n" + "-" * 63 + f"\n{prompt}{text}\n[{reason}]", flush=True)


def perplexities(*targets: Path) -> list[float]:
    samples = EXAMPLE / "samples" / "heldout.jsonl"
    output = octet("evaluate", *targets, "--samples", samples, "--json", capture=True)
    return [float(row["perplexity"]["mean"]) for row in json.loads(output)["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    out: Path = parser.parse_args().out
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    samples = EXAMPLE / "samples"
    octet(
        *("calibrate", MODEL, "--samples", samples / "calibration.jsonl", "--count", "256"),
        *("--held-out", samples / "heldout.jsonl", "--recipe", "fp8"),
        *("--name", "python-lm", "--out", out / "calibration", "--force"),
    )
    for target in ("checkpoint", "onnx"):
        octet("export", target, out / "calibration", "--out", out / target, "--force")
    with server(out / "onnx") as url:
        complete(url)
    original, quantized = perplexities(MODEL, out / "onnx")
    print(
        "\nHeld-out perplexity over 128 samples"
        f"\n  BF16 weights, FP32 products {original:.4f}"
        f"\n  FP8 weights, E5M2 cache     {quantized:.4f}  ({quantized / original - 1:+.2%})"
        f"\n\nAll of it took {time.monotonic() - started:.0f} s. What was written is in {out}."
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; `make demo` again continues", file=sys.stderr)
        sys.exit(130)
