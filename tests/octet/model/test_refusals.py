"""Each path or model that Octet cannot take is named in one line, before anything expensive.

`MODELS` and `PATHS` are tables: what a user gives, and the line that answers it.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octet.errors import OctetError
from octet.model.checkpoint import Checkpoint
from octet.storage import files
from octet.storage.tensors import Tensor, write_tensors
from tests.command import octet

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


def config(architecture: str, model_type: str = "", **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **SIZES, **more}


MLA = "has multi-head latent attention"
STATE = "has state-space, linear-attention or convolution layers"
ELSEWHERE = "keeps its decoder layers in"
QUANTIZED = "quantized already, with"


def quantized(**section: Any) -> dict[str, Any]:
    return config("LlamaForCausalLM", "llama", quantization_config=section)


# Real models by the config.json that matters -> the error after the path.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V2-Lite": (
        config("DeepseekV2ForCausalLM", "deepseek_v2", kv_lora_rank=512, q_lora_rank=None),
        f"DeepseekV2ForCausalLM {MLA} (kv_lora_rank 512), whose cache holds no keys and values:"
        " Octet takes models that cache those",
    ),
    "DeepSeek-V3, FP8": (
        config(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            kv_lora_rank=512,
            quantization_config={"quant_method": "fp8"},
        ),
        f"DeepseekV3ForCausalLM {MLA} (kv_lora_rank 512)",  # not: give the original
    ),
    "MiniCPM3": (
        config("MiniCPM3ForCausalLM", "minicpm3", kv_lora_rank=256, q_lora_rank=768),
        f"MiniCPM3ForCausalLM {MLA} (kv_lora_rank 256)",
    ),
    "GLM-4.7-Flash": (config("Glm4MoeLiteForCausalLM", kv_lora_rank=512), MLA),
    "Kimi-K2": (config("KimiK2ForCausalLM", "kimi_k2", kv_lora_rank=512), MLA),
    "OPT-125m": (
        config("OPTForCausalLM", "opt", ffn_dim=3072),
        f"OPTForCausalLM {ELSEWHERE} model.decoder.layers: Octet takes models with"
        " model.layers.<i>.self_attn, as Llama has them",
    ),
    "GPT-2": (
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12},
        f"GPT2LMHeadModel {ELSEWHERE} transformer.h",
    ),
    "GPT-J": (config("GPTJForCausalLM", "gptj"), f"{ELSEWHERE} transformer.h"),
    "BLOOM": (config("BloomForCausalLM", "bloom"), f"{ELSEWHERE} transformer.h"),
    "Falcon-7B": (config("FalconForCausalLM", "falcon"), f"{ELSEWHERE} transformer.h"),
    "MPT-7B": (config("MptForCausalLM", "mpt"), f"{ELSEWHERE} transformer.blocks"),
    "Pythia-70m": (config("GPTNeoXForCausalLM", "gpt_neox"), f"{ELSEWHERE} gpt_neox.layers"),
    "StarCoder": (config("GPTBigCodeForCausalLM", "gpt_bigcode"), f"{ELSEWHERE} transformer.h"),
    "Mamba-130m": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
        f"MambaForCausalLM {STATE} (model_type mamba): Octet takes models of attention layers",
    ),
    "Falcon-Mamba": (config("FalconMambaForCausalLM", "falcon_mamba"), STATE),
    "Jamba": (config("JambaForCausalLM", "jamba", mamba_d_state=16), f"{STATE} (mamba_d_state 16)"),
    "Nemotron-H": (config("NemotronHForCausalLM", "nemotron_h", ssm_state_size=128), STATE),
    "Granite-4.0-H": (
        config("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["mamba", "mamba"]),
        f"{STATE} (layer_types: mamba)",
    ),
    "RWKV": (config("RwkvForCausalLM", "rwkv"), STATE),
    "RecurrentGemma": (config("RecurrentGemmaForCausalLM", "recurrent_gemma"), STATE),
    "LFM2": (config("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"]), STATE),
    "Qwen3-Next": (
        config("Qwen3NextForCausalLM", "qwen3_next", linear_num_key_heads=16),
        f"{STATE} (linear_num_key_heads 16)",
    ),
    "MiniMax-01": (
        config("MiniMaxForCausalLM", layer_types=["full_attention", "linear_attention"]),
        f"{STATE} (layer_types: linear_attention)",
    ),
    "T5": (
        config("T5ForConditionalGeneration", "t5", is_encoder_decoder=True),
        "T5ForConditionalGeneration has an encoder and a decoder: Octet takes models of a decoder",
    ),
    "Whisper": (config("WhisperForConditionalGeneration", is_encoder_decoder=True), "an encoder"),
    "LLaVA": (
        config("LlavaForConditionalGeneration", "llava", vision_config={}, text_config={}),
        "LlavaForConditionalGeneration reads more than text (vision_config): save its language"
        " model as a ...ForCausalLM checkpoint, and give that",
    ),
    "Gemma 3 with vision": (
        config("Gemma3ForConditionalGeneration", "gemma3", vision_config={}),
        "reads more than text (vision_config)",
    ),
    "Phi-4-multimodal": (
        config("Phi4MultimodalForCausalLM", vision_config={}),
        "reads more than text",
    ),
    "BERT": (
        config("BertForMaskedLM", "bert"),
        "BertForMaskedLM fills gaps in a text and generates none: give the ...ForCausalLM",
    ),
    "a classifier": (config("LlamaForSequenceClassification", "llama"), "classifies texts"),
    "a reward model": (config("Qwen2ForRewardModel", "qwen2"), "scores texts and generates none"),
    "an embedding model": (
        config("Qwen3Model", "qwen3"),
        "architecture Qwen3Model is not supported; supported: LlamaForCausalLM, Mistral",
    ),
    "GPTQ": (
        quantized(quant_method="gptq", bits=4),
        f"{QUANTIZED} gptq (4 bits): Octet quantizes the original, so give that (BF16, FP16 or"
        " FP32); to serve this one as it is, start vLLM on it",
    ),
    "AWQ": (quantized(quant_method="awq", bits=4), f"{QUANTIZED} awq (4 bits)"),
    "bitsandbytes": (
        quantized(quant_method="bitsandbytes", load_in_4bit=True),
        f"{QUANTIZED} bitsandbytes (4 bits)",
    ),
    "FP8": (quantized(quant_method="fp8", fmt="e4m3"), f"{QUANTIZED} fp8 (e4m3)"),
    "compressed-tensors": (
        quantized(quant_method="compressed-tensors", format="float-quantized"),
        f"{QUANTIZED} compressed-tensors (float-quantized)",
    ),
    "its older key": (
        config("LlamaForCausalLM", "llama", compression_config={"format": "pack-quantized"}),
        f"{QUANTIZED} an unnamed method (pack-quantized)",
    ),
    "ModelOpt": (
        quantized(quant_method="modelopt", quant_algo="NVFP4"),
        f"{QUANTIZED} modelopt (NVFP4)",
    ),
    "MXFP4 of another architecture": (quantized(quant_method="mxfp4"), f"{QUANTIZED} mxfp4:"),
    "no method": (config("LlamaForCausalLM", quantization_config=4), f"{QUANTIZED} an unnamed"),
}


def refusal(path: Path) -> str:
    """Returns the line that refuses `path`, without the path."""
    with pytest.raises(OctetError) as refused:
        Checkpoint.open(path)
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_by_config_json_alone(name: str, tmp_path: Path) -> None:
    given, line = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert refusal(tmp_path).startswith(f"{tmp_path}: ") and line in refusal(tmp_path)


def test_the_command_refuses_in_one_line_and_little_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["DeepSeek-V2-Lite"][0]))
    samples = tmp_path / "s.jsonl"
    samples.write_text('{"text": "x"}\n' * 128)
    started = time.process_time()
    done = octet("calibrate", tmp_path, "--samples", samples, "--out", tmp_path / "out")
    assert time.process_time() - started < 1
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "out").exists()
    assert re.fullmatch(
        f"error: {tmp_path}: DeepseekV2ForCausalLM {re.escape(MLA)}.*\n", done.stderr
    )


LLAMA = json.dumps(config("LlamaForCausalLM", "llama"))
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def with_config(path: Path, text: str = LLAMA) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(text)
    return path


def holding(name: str, content: str | bytes = b"") -> Callable[[Path], Path]:
    """Makes a checkpoint's directory with config.json and one file more."""

    def make(path: Path) -> Path:
        with_config(path)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def bare(name: str) -> Callable[[Path], Path]:
    """Makes a directory with one file, which is not config.json."""

    def make(path: Path) -> Path:
        path.mkdir()
        (path / name).write_text("{}")
        return path

    return make


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.mkdir()
        (path / name).write_bytes(content)
        return path / name

    return make


def cache(path: Path) -> Path:
    root = path / "models--org--model"
    with_config(root / "snapshots" / "4f2a")
    return root


def dangling(path: Path) -> Path:
    (with_config(path) / "model.safetensors").symlink_to("../../blobs/0f3c")
    return path


def stored_as_bytes(path: Path) -> Path:
    import numpy as np

    shape = SIZES["hidden_size"], SIZES["hidden_size"]
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {name: Tensor("F8_E4M3", np.zeros(shape, np.uint8))}
    write_tensors(with_config(path) / "model.safetensors", tensors)
    return path


# What a user gives in place of a checkpoint -> a part of the line.
PATHS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a name on the Hub": (
        lambda _: Path("meta-llama/Llama-3.2-1B"),
        "meta-llama/Llama-3.2-1B: no such directory; a model on the Hugging Face Hub has to be"
        " downloaded first: hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B",
    ),
    "its URL": (
        lambda _: Path("https://huggingface.co/Qwen/Qwen3-8B/tree/main"),
        "downloaded first: hf download Qwen/Qwen3-8B --local-dir Qwen3-8B",
    ),
    "a directory that is absent": (lambda p: p / "m", "/m: no such directory"),
    "a folder of the Hub's cache": (
        cache,
        "models--org--model: a folder of the Hub's cache; give its snapshot: ",
    ),
    "a GGUF file": (
        file("model.Q4_K_M.gguf", b"GGUF\3\0\0\0"),
        "model.Q4_K_M.gguf: a GGUF file, which llama.cpp runs; give the directory of the Hugging"
        " Face checkpoint it was made from",
    ),
    "a folder of GGUF files": (bare("model.gguf"), "model.gguf: a GGUF file, which llama.cpp runs"),
    "GGUF beside config.json": (holding("model.gguf"), "model.gguf: a GGUF file"),
    "GGUF as safetensors": (holding("model.safetensors", b"GGUF\3\0\0\0" * 9), "a GGUF file, not"),
    "one file of weights": (
        file("model.safetensors", b""),
        "model.safetensors: not a directory; give the checkpoint's directory",
    ),
    "a PEFT adapter": (
        bare("adapter_config.json"),
        ": a PEFT adapter (adapter_config.json), not a whole model; merge it into its base:"
        ' python -c "from peft import',
    ),
    "an adapter with config.json": (holding("adapter_config.json", "{}"), "a PEFT adapter"),
    "PyTorch's weights": (
        holding("pytorch_model.bin"),
        "its weights are in PyTorch's format (pytorch_model.bin), and Octet reads safetensors:"
        ' python -c "from transformers import AutoModelForCausalLM;',
    ),
    "PyTorch's shards": (holding("pytorch_model-00001-of-00002.bin"), "PyTorch's format"),
    "Meta's own": (holding("consolidated.00.pth"), "publisher's own format (consolidated.00.pth)"),
    "an ONNX graph": (holding("model.onnx"), "its weights are in an ONNX graph (model.onnx)"),
    "TensorFlow's weights": (holding("tf_model.h5"), "TensorFlow's format (tf_model.h5)"),
    "Flax's weights": (holding("flax_model.msgpack"), "Flax's format (flax_model.msgpack)"),
    "the publisher's own format": (bare("params.json"), "their publisher's own format"),
    "a diffusion pipeline": (bare("model_index.json"), "a diffusion pipeline"),
    "a folder above": (
        lambda p: with_config(p / "checkpoint-500").parent,
        "no config.json; did you mean ",
    ),
    "an empty folder": (lambda p: p.mkdir() or p, "not a Hugging Face checkpoint: it has no"),
    "config.json alone": (
        with_config,
        "no model.safetensors and no model.safetensors.index.json: the weights are not there;",
    ),
    "shards without an index": (
        holding("model-00001-of-00002.safetensors"),
        "has model-00001-of-00002.safetensors but no model.safetensors and no",
    ),
    "a shard that is absent": (
        holding("model.safetensors.index.json", '{"weight_map": {"x": "a.safetensors"}}'),
        "shard a.safetensors named by model.safetensors.index.json is missing; download it, too",
    ),
    "a Git LFS pointer": (
        holding("model.safetensors", LFS),
        "model.safetensors: a Git LFS pointer, not the file itself: run `git lfs pull` in its"
        " directory",
    ),
    "config.json as a pointer": (lambda p: with_config(p, LFS), "config.json: a Git LFS pointer"),
    "the index as a pointer": (holding("model.safetensors.index.json", LFS), "a Git LFS pointer"),
    "a web page": (
        holding("model.safetensors", "<!DOCTYPE html><html>Access denied</html>"),
        "model.safetensors: a web page that was saved in place of the file; download it again",
    ),
    "a renamed PyTorch file": (
        holding("model.safetensors", b"PK\3\4\x00\x00\x08\x08" * 9),
        "a PyTorch or ZIP file under another name",
    ),
    "a link to nothing": (dangling, "model.safetensors: a link to ../../blobs/0f3c, which is miss"),
    "AutoAWQ's side file": (
        holding("quant_config.json", "{}"),
        f"{QUANTIZED} AutoAWQ (quant_config.json)",
    ),
    "ModelOpt's side file": (holding("hf_quant_config.json", "{}"), f"{QUANTIZED} ModelOpt"),
    "weights in 8 bits": (
        stored_as_bytes,
        f"{QUANTIZED} model.layers.0.self_attn.q_proj.weight stored as F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_no_checkpoint_is_recognised(name: str, tmp_path: Path) -> None:
    make, line = PATHS[name]
    assert line in refusal(make(tmp_path / "given"))


def test_the_command_that_converts_pytorch_weights_works(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")
    command = refusal(model).partition("python -c ")[2].partition(", and copy")[0]
    subprocess.run(f"{sys.executable} -c {command}", shell=True, check=True)
    converted = Checkpoint.open(tmp_path / "model-safetensors")
    assert set(converted.tensor_names) == set(Checkpoint.open(tiny_model).tensor_names)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with_config(tmp_path)

    def denied(*_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "read_file", denied)  # root may read anything
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'}: Permission denied"
