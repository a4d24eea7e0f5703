"""Hostile checkpoints and artifacts: what each does to a good one, and the line that answers it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrations import save_calibration

Change = Callable[[Path], None]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
INDEX = "model.safetensors.index.json"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "python-lm" / "model"


def write_checkpoint(path: Path) -> None:
    """A Llama of two small layers, with the example's tokenizer."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    from octet.model.spec import ModelSpec

    shapes = ModelSpec.from_config(CONFIG, "here").tensor_shapes()
    tensors = {name: Tensor("BF16", np.full(shape, 0x3C00, np.uint16)) for name, shape in shapes}
    write_tensors(path / "model.safetensors", tensors, {"format": "pt"})
    for file in EXAMPLE.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())


def write_calibration(path: Path, model: Path) -> None:
    """A calibration of it for `fp8`, without histograms."""
    checkpoint, recipe = Checkpoint.open(model), Recipe.load("fp8")
    scales: dict[str, Any] = {}
    for linear in checkpoint.spec.linears():
        scales[f"{linear.name}.weight_scale"] = np.ones((linear.out_features, 1), np.float32)
        scales[f"{linear.name}.input_scale"] = np.float32(1)
    for layer in range(2):
        for which in ("k", "v"):
            scales[f"model.layers.{layer}.self_attn.{which}_scale"] = np.float32(1)
    save_calibration(path, checkpoint, recipe, scales)
    files = json.loads((path / "manifest.json").read_text())["model"]["files"]
    identity = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    content = json.loads((path / "golden.json").read_text()) | {"weights_sha256": identity}
    sealed(written("golden.json", json.dumps(content)))(path)


# Changes of a checkpoint.


def config(**values: Any) -> Change:
    return written("config.json", json.dumps(CONFIG | values))


def of_experts(family: str, **values: Any) -> Change:
    return config(architectures=[f"{family}ForCausalLM"], num_experts_per_tok=2, **values)


def written(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content

    def change(path: Path) -> None:
        (path / name).write_bytes(data)

    return change


def replaced(name: str, make: Callable[[Path], None]) -> Change:
    """Puts something that `make` makes in place of a file."""

    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        make(path / name)

    return change


def sparse(name: str, size: int = 1 << 40) -> Change:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return replaced(name, make)


def link(name: str, target: str) -> Change:
    return replaced(name, lambda path: path.symlink_to(target))


def header(content: bytes | dict[str, Any], data: bytes = b"") -> Change:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return written("model.safetensors", len(text).to_bytes(8, "little") + text + data)


def entry(dtype: Any, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def index(weight_map: Any) -> Change:
    return written(INDEX, json.dumps({"weight_map": weight_map}))


def many(count: int, form: bytes = b'"%x":1') -> bytes:
    return b",".join(form % number for number in range(count))


DEEP = "[" * 100_000
W = "model.layers.0.self_attn.q_proj.weight"

# Name -> the change, and what the error of `Checkpoint.open` says.
CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "10^8 layers": (config(num_hidden_layers=10**8), "claims num_hidden_layers 100000000, and"),
    "10^20 layers": (config(num_hidden_layers=10**20), "claims num_hidden_layers 1000000000000"),
    "-1 layers": (config(num_hidden_layers=-1), "layers: Input should be greater than 0"),
    "10^8 layers with windows": (
        config(architectures=["MistralForCausalLM"], num_hidden_layers=10**8, sliding_window=8),
        "claims num_hidden_layers 100000000",
    ),
    "10^8 experts": (
        of_experts("Mixtral", num_local_experts=10**8),
        "claims num_hidden_layers 2, num_local_experts 100000000, and",
    ),
    "10^20 experts": (
        of_experts("Qwen3Moe", num_experts=10**20, moe_intermediate_size=8),
        "num_experts 100000000000000000000, and",
    ),
    "10^8 layers of an unknown architecture": (
        config(architectures=["OtherForCausalLM"], num_hidden_layers=10**8),
        "claims num_hidden_layers 100000000",
    ),
    "10^20 hidden": (config(hidden_size=10**20), "config.json says"),
    "10^400 hidden": (
        config(architectures=["GemmaForCausalLM"], hidden_size=10**400),
        "impossible sizes .int too large",
    ),
    "10^20 positions": (config(max_position_embeddings=10**20), "max_positions: Input should be"),
    "a number of 5000 digits": (
        written("config.json", '{"hidden_size":' + "9" * 5000 + "}"),
        "config.json: not valid JSON .Exceeds the limit",
    ),
    "no heads": (config(num_attention_heads=0), "heads: Input should be greater than 0"),
    "negative heads": (config(num_key_value_heads=-1), "kv_heads: Input should be greater"),
    "sizes of another kind": (config(hidden_size=[16]), "hidden_size: Input should be a valid"),
    "hidden size as text, of Gemma": (
        config(architectures=["GemmaForCausalLM"], hidden_size="x"),
        "impossible sizes",
    ),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps: Input should be a finite"),
    "theta infinite": (
        written("config.json", json.dumps(CONFIG)[:-1] + ', "rope_theta": 1e999}'),
        "rope_theta: Input should be a finite",
    ),
    "rotary factor NaN": (
        config(architectures=["Phi3ForCausalLM"], partial_rotary_factor=float("nan")),
        "partial_rotary_factor is nan, not above 0",
    ),
    "architecture with escapes": (
        config(architectures=["\x1b[2J\x1b]0;x\x07\nForCausalLX"]),
        r"architecture \\x1b\[2J\\x1b\]0;x\\x07 ForCausalLX is not supported",
    ),
    "architecture of a million letters": (
        config(architectures=["x" * 10**6]),
        r"architecture xxx.* \.\.\. .*by their tensors",
    ),
    "architectures as an object": (config(architectures={"a": 1}), "architecture .none."),
    "eos as an object": (config(eos_token_id={"a": 1}), "eos_token_ids.0: Input should be"),
    "two values of a key": (
        written("config.json", json.dumps(CONFIG)[:-1] + ', "hidden_size": 32}'),
        "key 'hidden_size' has two values",
    ),
    "nested config": (written("config.json", '{"a":' + DEEP), "nested too deeply"),
    "config as a list": (written("config.json", "[]"), "expected a JSON object"),
    "empty config": (written("config.json", ""), "not valid JSON"),
    "config in Latin-1": (written("config.json", b'{"a":"\xe4"}'), "can't decode byte 0xe4"),
    "config in UTF-16": (written("config.json", "{}".encode("utf-16")), "can't decode byte"),
    "config of 11 million lists": (
        written("config.json", b'{"a":[' + b"[]," * 11_000_000 + b"[]]}"),
        "more than 1,118,481 arrays, objects and keys",
    ),
    "config of a million keys": (
        written("config.json", b"{" + many(1_000_000) + b"}"),
        "claims|lacks|architecture .none. is not supported",
    ),
    "config of a terabyte": (sparse("config.json"), "larger than the 32 MiB"),
    "config as a FIFO": (replaced("config.json", os.mkfifo), "config.json: a FIFO or a device"),
    "config as a device": (link("config.json", "/dev/zero"), "config.json: a FIFO or a device"),
    "config as a directory": (replaced("config.json", Path.mkdir), "config.json: Is a directory"),
    "config as a loop": (link("config.json", "config.json"), "config.json: Too many levels|no con"),
    "another file as a FIFO": (
        replaced("generation_config.json", os.mkfifo),
        "generation_config.json: a FIFO or a device",
    ),
    "tokenizer as a FIFO": (replaced("tokenizer.json", os.mkfifo), "tokenizer.json: a FIFO or a"),
    "tokenizer of a terabyte": (sparse("tokenizer.json"), "tokenizer.json: larger than the 256"),
    "merges as a device": (link("merges.txt", "/dev/zero"), "merges.txt: a FIFO or a device"),
    "weights as a FIFO": (
        replaced("model.safetensors", os.mkfifo),
        "model.safetensors: a FIFO or a device",
    ),
    "weights as a device": (
        link("model.safetensors", "/dev/zero"),
        "model.safetensors: a FIFO or a device",
    ),
    "weights as a directory": (
        replaced("model.safetensors", Path.mkdir),
        "model.safetensors: Is a directory",
    ),
    "weights of a terabyte of zeros": (
        sparse("model.safetensors"),
        "the safetensors header|tensor",
    ),
    "header longer than the file": (
        written("model.safetensors", (2**64 - 1).to_bytes(8, "little") + b"{}"),
        "its header claims 18446744073709551615 bytes",
    ),
    "nested header": (header(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "header of lists": (header(b'{"a":[' + b"[]," * 11_000_000 + b"[]]}"), "more than 1,118,481"),
    "header of keys": (header(b"{" + many(1_000_000) + b"}"), "header is damaged"),
    "header of dimensions": (
        header(b'{"a":{"dtype":"U8","shape":[' + b"1," * 16_000_000 + b'1],"data_offsets":[0,1]}}'),
        "shape of a tensor is too large",
    ),
    "header of long numbers": (
        header(
            b'{"a":{"dtype":"U8","shape":['
            + (b"9" * 4000 + b",") * 8000
            + b'1],"data_offsets":[0,1]}}'
        ),
        "must be integers in range",
    ),
    "float offsets": (header({W: entry("U8", [4], 0.0, 4.0)}, b"1234"), "must be integers"),
    "offsets that overflow": (header({W: entry("U8", [4], 0, 2**64)}, b"1234"), "in range"),
    "negative offsets": (header({W: entry("U8", [1], 0, -1)}, b"1234"), "in range"),
    "shape that wraps to nothing": (
        header({W: entry("U8", [2**33, 2**31], 0, 0)}),
        "shape of a tensor is too large",
    ),
    "empty shape that numpy cannot hold": (
        header({W: entry("U8", [2**33, 2**31, 0], 0, 0)}),
        "shape of a tensor is too large",
    ),
    "negative shape": (header({W: entry("U8", [-2, -2], 0, 4)}, b"1234"), "in range"),
    "shape of truth": (header({W: entry("U8", [True, 4], 0, 4)}, b"1234"), "must be integers"),
    "shape of NaN": (
        header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234"),
        "must be integers",
    ),
    "100 dimensions": (header({W: entry("U8", [1] * 100, 0, 1)}, b"1"), "too large"),
    "overlapping tensors": (
        header({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, b"1234"),
        "tensor b does not fit its shape",
    ),
    "a gap between tensors": (
        header({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)}, b"123456"),
        "tensor b does not fit its shape",
    ),
    "a gap before the first tensor": (
        header({"a": entry("U8", [2], 4, 6)}, b"123456"),
        "tensor a does not fit its shape",
    ),
    "bytes after the last tensor": (
        header({"a": entry("U8", [2], 0, 2)}, b"123456"),
        "the header describes",
    ),
    "unknown dtype": (header({W: entry("Q9", [4], 0, 4)}, b"1234"), "unknown dtype Q9"),
    "dtype as a list": (header({W: entry(["U8"], [4], 0, 4)}, b"1234"), "unknown dtype"),
    "two tensors of one name": (
        header(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{}}', b"1"),
        "key 'a' has two values",
    ),
    "name with escapes": (
        header({"\x1b[2J": entry("U8", [4], 0, 4)}, b"1234"),
        "no name of a tensor",
    ),
    "name of a million letters": (
        header({"x" * 10**6: entry("U8", [4], 0, 4)}, b"1234"),
        "no name of a tensor",
    ),
    "header as a list": (header(b"[1]"), "header is damaged"),
    "header in Latin-1": (header(b'{"\xe4":1}'), "header is damaged"),
    "no tensors": (header(b"{}"), "missing"),
    "index out of the directory": (
        index({W: "../model.safetensors"}),
        "does not name files beside",
    ),
    "index of another kind": (index([1]), "does not name files beside it"),
    "index of lists": (index({W: ["model.safetensors"]}), "does not name files beside it"),
    "index of a million files": (
        index({f"t{n}": f"f{n}" for n in range(300_000)}),
        "named by model.safetensors.index.json is missing",
    ),
    "index as a FIFO": (replaced(INDEX, os.mkfifo), "index.json: a FIFO or a device"),
    "index of a terabyte": (sparse(INDEX), "larger than the 32 MiB"),
    "nested index": (written(INDEX, '{"weight_map":' + DEEP), "nested too deeply"),
    "quantization of another kind": (config(quantization_config=[1]), "quantized already"),
}


def unknown(**names: tuple[int, ...]) -> Change:
    """Makes the checkpoint one of an unknown architecture, with these tensors."""

    def change(path: Path) -> None:
        config(architectures=["OtherForCausalLM"], num_hidden_layers=1)(path)
        tensors = {name: Tensor("U8", np.zeros(shape, np.uint8)) for name, shape in names.items()}
        write_tensors(path / "model.safetensors", tensors)

    return change


_Q = "model.layers.0.self_attn.q_proj.weight"
CHECKPOINTS |= {
    "expert 999999999": (
        unknown(**{_Q: (1, 1), "model.layers.0.mlp.experts.999999999.up_proj.weight": (1, 1)}),
        "not of one make",
    ),
    "layer of 400 digits": (
        unknown(**{f"model.layers.{'9' * 400}.self_attn.q_proj.weight": (1, 1)}),
        "there are none such",
    ),
}


# Changes of a calibration.


def sealed(change: Change) -> Change:
    """Records the hashes of the changed files in the manifest, as whoever forges one would."""

    def forge(path: Path) -> None:
        change(path)
        manifest = json.loads((path / "manifest.json").read_text())
        for name in manifest["files"]:
            if (path / name).is_file():
                content = (path / name).read_bytes()
                manifest["files"][name] = hashlib.sha256(content).hexdigest()
        _seal(path, manifest)

    return forge


def _seal(path: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("identity", None)
    text = json.dumps(manifest, sort_keys=True)
    manifest["identity"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def manifest(**values: Any) -> Change:
    """Sets fields of the manifest, by their path with __, and its hash."""

    def change(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        for place, value in values.items():
            *outer, last = place.split("__")
            section = content
            for key in outer:
                section = section[key]
            section[last] = value
        _seal(path, content)

    return change


def listed(name: str, content: bytes = b"x") -> Change:
    """Lists another file in the manifest, with the hash of `content`."""

    def change(path: Path) -> None:
        found = json.loads((path / "manifest.json").read_text())
        found["files"][name] = hashlib.sha256(content).hexdigest()
        _seal(path, found)

    return change


def golden(**record: Any) -> Change:
    """Changes the golden record, or with `records` all of them."""

    def change(path: Path) -> None:
        content = json.loads((path / "golden.json").read_text())
        if "records" in record:
            content |= record
        else:
            content["records"][0] |= record
        (path / "golden.json").write_text(json.dumps(content))

    return sealed(change)


def scales(name: str, tensor: Tensor) -> Change:
    """Adds or replaces a scale."""

    def change(path: Path) -> None:
        from octet.storage.tensors import TensorFile

        file = TensorFile.open(path / "scales.safetensors")
        tensors = {key: file.read(key) for key in file.names} | {name: tensor}
        write_tensors(path / "new", tensors)
        os.replace(path / "new", path / "scales.safetensors")

    return sealed(change)


_TOP = {"token_ids": [1, 2], "logprobs": [-0.1, -3.0]}
_SCALE = "model.layers.0.self_attn.q_proj.weight_scale"

# Name -> the change, and what the error of reading it says.
ARTIFACTS: dict[str, tuple[Change, str]] = {
    "nested manifest": (written("manifest.json", '{"a":' + DEEP), "nested too deeply"),
    "manifest as a list": (written("manifest.json", "[]"), "schema version None"),
    "manifest in Latin-1": (written("manifest.json", b'{"a":"\xe4"}'), "can't decode byte"),
    "manifest as a FIFO": (replaced("manifest.json", os.mkfifo), "no manifest|FIFO|neither"),
    "manifest as a directory": (replaced("manifest.json", Path.mkdir), "Is a directory|neither"),
    "manifest of a terabyte": (sparse("manifest.json"), "larger than the 32 MiB"),
    "manifest of lists": (
        written("manifest.json", b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"),
        "more than 1,118,481",
    ),
    "manifest with a file outside": (listed("../../etc/passwd"), "lists ../../etc/passwd, which"),
    "manifest with an absolute file": (listed("/etc/passwd"), "lists /etc/passwd, which is not"),
    "manifest with a name of escapes": (
        listed("\x1b[2Jx"),
        r"\\x1b\[2Jx",
    ),
    "manifest with two values of a key": (
        written("manifest.json", '{"kind":"engine","kind":"calibration"}'),
        "key 'kind' has two values",
    ),
    "version 10^20": (manifest(schema_version=10**20), "written by a newer Octet"),
    "version NaN": (manifest(schema_version=float("nan")), "schema version nan"),
    "model of 10^8 layers": (manifest(model__spec__layers=10**8), "too many"),
    "model of 10^20 experts": (manifest(model__spec__experts=10**20), "too many"),
    "model of 10^20 positions": (
        manifest(model__spec__max_positions=10**20),
        "max_positions: Input should be less",
    ),
    "model with epsilon infinite": (
        manifest(model__spec__rms_norm_eps=float("inf")),
        "rms_norm_eps: Input should be a finite",
    ),
    "source of another kind": (manifest(details__source=5), "."),
    "source that is a device": (manifest(details__source="/dev/zero"), "."),
    "source with a NUL": (manifest(details__source="a\0b"), "."),
    "cache of another kind": (manifest(details__kv_cache={"a": 1}), "."),
    "algorithm of another kind": (manifest(details__algorithm=[1]), "."),
    "warnings of another kind": (manifest(details__warnings=5), "."),
    "nested golden records": (sealed(written("golden.json", "[" * 10**5)), "nested too deeply"),
    "golden records as a FIFO": (replaced("golden.json", os.mkfifo), "golden.json: missing"),
    "golden records of a terabyte": (sparse("golden.json", 1 << 33), "."),
    "golden record without answers": (golden(tops=[]), "golden.json: not a golden set"),
    "golden record of uneven answers": (
        golden(tops=[_TOP | {"logprobs": [-0.1]}]),
        "golden.json: not a golden set",
    ),
    "golden record NaN": (
        golden(tops=[_TOP | {"logprobs": [float("nan"), -3.0]}]),
        "golden.json: not a golden set",
    ),
    "golden record of negative tokens": (
        golden(prompt_token_ids=[-1]),
        "golden.json: not a golden set",
    ),
    "golden record of tokens 10^20": (
        golden(prompt_token_ids=[10**20]),
        "golden.json: not a golden set",
    ),
    "golden record without a prompt": (
        golden(prompt_token_ids=[]),
        "golden.json: not a golden set",
    ),
    "observations of another kind": (
        sealed(written("observations.json", "[1]")),
        "observations.json: not observations",
    ),
    "observations with escapes": (
        sealed(written("observations.json", '{"\\u001b[2J": 1}')),
        "observations.json: not observations",
    ),
    "observations as a FIFO": (replaced("observations.json", os.mkfifo), "missing"),
    "scales with a nested header": (
        sealed(
            replaced("scales.safetensors", lambda p: p.write_bytes(b"\x10" + b"\0" * 7 + b"[" * 16))
        ),
        "scales.safetensors: the safetensors header",
    ),
    "scale NaN": (
        scales(_SCALE, Tensor.of(np.full((16, 1), np.nan, np.float32))),
        "not positive and finite",
    ),
    "scale of another shape": (
        scales(_SCALE, Tensor.of(np.ones((2, 2), np.float32))),
        "has shape",
    ),
    "scale of integers": (scales(_SCALE, Tensor.of(np.array(7, np.int64))), "."),
    "cache scale of another shape": (
        scales("model.layers.0.self_attn.k_scale", Tensor.of(np.ones(3, np.float32))),
        "k_scale",
    ),
    "weights of another model": (
        sealed(
            replaced(
                "weights.safetensors",
                lambda p: write_tensors(p, {"a": Tensor.of(np.ones(1, np.float32))}) and None,
            )
        ),
        "a is no tensor of",
    ),
}


def quantization(**section: Any) -> Change:
    return config(quantization_config=section)


def _group(**weights: Any) -> dict[str, Any]:
    return {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"} | weights}}


# Name -> the change, and what the reader of `octet verify` says of the quantization.
QUANTIZED: dict[str, tuple[Change, str]] = {
    "blocks of nothing": (
        quantization(quant_method="fp8", weight_block_size=[0, 0]),
        "blocks of 0 x 0",
    ),
    "blocks of infinity": (
        quantization(quant_method="fp8", weight_block_size=[float("inf"), 1]),
        "cannot convert float infinity",
    ),
    "one block size": (quantization(quant_method="fp8", weight_block_size=[128]), "unpack"),
    "negative blocks": (
        quantization(
            quant_method="compressed-tensors",
            config_groups=_group(strategy="block", block_structure=[-1, 1]),
        ),
        "blocks of -1 x 1",
    ),
    "ignored numbers": (
        quantization(quant_method="fp8", ignored_layers=[5]),
        "5 is no name of a module",
    ),
    "a pattern that is none": (
        quantization(
            quant_method="compressed-tensors",
            config_groups=_group(strategy="tensor"),
            ignore=["re:("],
        ),
        "missing .*unterminated",
    ),
    "groups as a list": (
        quantization(quant_method="compressed-tensors", config_groups=[1]),
        "cannot be read",
    ),
    "layers as numbers": (
        quantization(
            quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": 1}
        ),
        "cannot be read",
    ),
    "a method with escapes": (quantization(quant_method="\x1b[2J"), r"\\x1b\[2j"),
    "ModelOpt's file as nested lists": (written("hf_quant_config.json", DEEP), "nested too deeply"),
}
