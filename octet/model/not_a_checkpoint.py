"""Recognises what a path is instead of a checkpoint, and names the command that helps."""

import re
from pathlib import Path

from octet.errors import CheckpointError
from octet.storage.files import open_file

__all__ = [
    "explain_file",
    "explain_missing",
    "explain_without_config",
    "explain_without_weights",
    "is_hub_name",
]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_URL = re.compile(r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*")

# Weights that transformers cannot convert.
_FORMATS = {
    "*.pth": "their publisher's own format",
    "tf_model*.h5": "TensorFlow's format",
    "flax_model*.msgpack": "Flax's format",
    "*.onnx": "an ONNX graph",
}


def is_hub_name(path: Path) -> bool:
    """Returns True if a path that does not exist may be a name on the Hugging Face Hub."""
    return bool(_HUB_NAME.fullmatch(path.as_posix())) and not path.parent.exists()


def explain_missing(path: Path) -> CheckpointError:
    """Returns the error for a path that does not exist; recognises a name or URL on the Hub."""
    text = path.as_posix()
    url = _URL.fullmatch(text)
    name = url[1] if url else text
    if url is None and not is_hub_name(path):
        return CheckpointError(f"{path}: no such directory")
    return CheckpointError(
        f"{path}: no such directory; a model on the Hugging Face Hub has to be downloaded first:"
        f" hf download {name} --local-dir {name.rpartition('/')[2]}"
    )


def explain_file(path: Path) -> CheckpointError:
    """Returns the error for a file in place of a checkpoint's directory."""
    if _begins(path, b"GGUF"):
        return _gguf_file(path)
    return CheckpointError(f"{path}: not a directory; give the checkpoint's directory")


def explain_without_config(path: Path) -> CheckpointError:
    """Returns the error for a directory without config.json."""
    if error := _adapter(path) or _gguf(path):
        return error
    if (path / "snapshots").is_dir():  # the Hub's cache
        found = sorted(x for x in (path / "snapshots").iterdir() if (x / "config.json").exists())
        where = found[-1] if found else path / "snapshots" / "<revision>"
        return CheckpointError(f"{path}: a folder of the Hub's cache; give its snapshot: {where}")
    if (path / "manifest.json").exists() and (path / "scales.safetensors").exists():
        return CheckpointError(
            f"{path}: what `octet calibrate` wrote, not a checkpoint; `octet export` takes it"
        )
    if (path / "model_index.json").exists():
        return CheckpointError(f"{path}: a diffusion pipeline; Octet takes language models")
    if (path / "params.json").exists():
        return CheckpointError(
            f"{path}: weights in their publisher's own format (params.json); give the model's"
            " Hugging Face version, with config.json and model.safetensors"
        )
    within = sorted(x.parent for x in path.glob("*/config.json"))
    if within:
        more = f", or another of its {len(within)}" if len(within) > 1 else ""
        return CheckpointError(
            f"{path}: not a Hugging Face checkpoint: it has no config.json; did you mean"
            f" {within[-1]}{more}?"
        )
    return CheckpointError(
        f"{path}: not a Hugging Face checkpoint: it has no config.json; give the directory that has"
        " it, beside model.safetensors"
    )


def explain_without_weights(path: Path) -> CheckpointError:
    """Returns the error for a directory with config.json and without safetensors to open."""
    if error := _adapter(path) or _gguf(path):
        return error
    broken = sorted(x for x in path.glob("*.safetensors*") if x.is_symlink() and not x.exists())
    if broken:
        return CheckpointError(
            f"{broken[0]}: a link to {broken[0].readlink()}, which is missing; download it again,"
            " or copy the directory with its links followed: cp -rL"
        )
    found = next(iter(sorted(path.glob("pytorch_model*.bin*"))), None)
    if found is not None:
        loading = (
            f"AutoModelForCausalLM.from_pretrained('{path}', dtype='auto', trust_remote_code=False)"
            f".save_pretrained('{path}-safetensors')"
        )
        return CheckpointError(
            f"{path}: its weights are in PyTorch's format ({found.name}), and Octet reads"
            f' safetensors: python -c "from transformers import AutoModelForCausalLM; {loading}",'
            " and copy the tokenizer's files there"
        )
    for pattern, what in _FORMATS.items():
        found = next(iter(sorted(path.glob(pattern))), None)
        if found is not None:
            return CheckpointError(
                f"{path}: its weights are in {what} ({found.name}), and Octet reads safetensors;"
                " give the model's Hugging Face version with model.safetensors"
            )
    shards = sorted(path.glob("*.safetensors"))
    if shards:
        return CheckpointError(
            f"{path}: has {shards[0].name} but no model.safetensors and no"
            " model.safetensors.index.json, which names the shards; download those, too"
        )
    return CheckpointError(
        f"{path}: no model.safetensors and no model.safetensors.index.json: the weights are not"
        " there; download them, too"
    )


def _adapter(path: Path) -> CheckpointError | None:
    if not (path / "adapter_config.json").exists():
        return None
    return CheckpointError(
        f"{path}: a PEFT adapter (adapter_config.json), not a whole model; merge it into its base:"
        f" python -c \"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained('{path}')"
        f".merge_and_unload().save_pretrained('{path}-merged')\", and copy the tokenizer's files"
        " there"
    )


def _gguf(path: Path) -> CheckpointError | None:
    found = next(iter(sorted(path.glob("*.gguf"))), None)
    return None if found is None else _gguf_file(found)


def _gguf_file(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a GGUF file, which llama.cpp runs; give the directory of the Hugging Face"
        " checkpoint it was made from"
    )


def _begins(path: Path, magic: bytes) -> bool:
    try:
        with open_file(path) as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
