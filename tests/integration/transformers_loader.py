"""Run by an interpreter with compressed-tensors: loads checkpoints by transformers' own quantizer.

    python transformers_loader.py JOBS

JOBS is a JSON file: a list of {"checkpoint", "answer", "tokens"}. `answer`.safetensors gets the
float32 `logits` [T, V] of the tokens, and the model's weights as they are once decompressed.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        model = AutoModelForCausalLM.from_pretrained(
            job["checkpoint"],
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=True),
        ).float()  # MXFP4 comes decompressed to bfloat16, whatever was asked for
        with torch.no_grad():
            logits = model(torch.tensor([job["tokens"]])).logits[0]
        weights = {name: x for name, x in model.named_parameters() if name.endswith(".weight")}
        found = {name: x.detach().clone().contiguous() for name, x in weights.items()}
        save_file(found | {"logits": logits.contiguous()}, f"{job['answer']}.safetensors")


if __name__ == "__main__":
    main()
