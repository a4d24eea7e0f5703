"""Exports a model with ModelOpt: the peer's half of reference_models.py, in ModelOpt's environment.

    python benchmarks/reference_modelopt.py MODEL ROWS.json OUT CONFIG...

ROWS.json holds the token ids of the calibration samples. Rows of one length share a forward pass,
so none is padded. Each CONFIG becomes a checkpoint OUT/CONFIG, or a line in OUT/CONFIG.failed.
Needs nothing of Octet.
"""

import copy
import json
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

TOGETHER = 8  # rows in a forward pass


def main() -> None:
    import torch
    import transformers

    model, rows, out, names = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, trust_remote_code=False
    )
    loaded.to(device).eval()
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for ids in json.loads(rows.read_text()):
        by_length[len(ids)].append(ids)
    batches = [
        torch.tensor(same[start : start + TOGETHER], device=device)
        for _, same in sorted(by_length.items())
        for start in range(0, len(same), TOGETHER)
    ]
    seconds = {}
    for name in names:
        began = time.perf_counter()
        try:
            export(copy.deepcopy(loaded), name, batches, out / name)
        except Exception as error:  # a format that fails does not end the others
            (out / f"{name}.failed").write_text(f"{type(error).__name__}: {error}")
        seconds[name] = round(time.perf_counter() - began, 1)
    (out / "about.json").write_text(json.dumps(about() | {"seconds": seconds}))


def export(model: Any, name: str, batches: list[Any], out: Path) -> None:
    """Quantizes `model` with ModelOpt's configuration `name`, and writes the checkpoint."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    def forward(quantized: Any) -> None:
        for ids in batches:
            quantized.base_model(input_ids=ids, use_cache=False)

    with torch.inference_mode():
        mtq.quantize(model, copy.deepcopy(getattr(mtq, name)), forward_loop=forward)
        export_hf_checkpoint(model, export_dir=out)


def about() -> dict[str, str]:
    from importlib.metadata import version

    names = ("nvidia-modelopt", "torch", "transformers")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


if __name__ == "__main__":
    main()
