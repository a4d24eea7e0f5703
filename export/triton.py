"""calibration + checkpoint → an entry of a Triton model repository.

manifest.json, golden.json, config.pbtxt and the version `1`, which holds the whole model:
  python  1/model.py and 1/onnx: Octet's embedded engine on the ONNX export
  vllm    1/model.json and 1/checkpoint: Triton's vLLM backend on the exported checkpoint

Both take and give the vLLM backend's tensors, so that one client serves for either. Triton ignores
the files that it does not know.
"""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from export.triton_config import DataType, InstanceGroup, Kind, ModelConfig, Parameter, Tensor
from octet.artifact import Manifest, check_destination, write_artifact
from octet.errors import ConfigError
from octet.golden import GOLDEN_FILE
from octet.model import ModelSpec

__all__ = ["export_triton", "python_config", "vllm_config", "vllm_engine"]

VERSION = "1"
SLOTS = 16  # requests that the embedded engine decodes together

_VLLM_CACHE = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}


def export_triton(
    calibration: Path,
    out: Path,
    *,
    backend: Literal["python", "vllm"] = "python",
    model: Path | None = None,
    name: str | None = None,
    force: bool = False,
) -> Manifest:
    """Writes the entry `out`, a directory named as its model, in a model repository.

    vLLM's path to the checkpoint is relative to the repository's parent, so tritonserver has to be
    started there, or `model` in 1/model.json be made absolute. Raises ConfigError if `name` is not
    that of the directory: Triton would not load such an entry.
    """
    out = out.absolute()
    name = name or out.name
    if name != out.name:
        raise ConfigError(
            f"{out}: Triton wants the directory named as its model, '{name}';"
            f" use --out {out.parent / name}"
        )
    check_destination(out, force=force, inputs=[calibration])
    with write_artifact(out, force=force) as writer:
        version = writer.path / VERSION
        version.mkdir()
        if backend == "vllm":
            content = _write_vllm(calibration, version, model, out)
            config = vllm_config(name)
        else:
            content = _write_python(calibration, version, model)
            config = python_config(name)
        (writer.path / "config.pbtxt").write_text(config.pbtxt())
        shutil.copyfile(version / content.kind / GOLDEN_FILE, writer.path / GOLDEN_FILE)
        details = {"backend": backend, "name": name, "content": f"{VERSION}/{content.kind}"}
        manifest = content.model_copy(update={"kind": "triton", "details": details})
        return writer.finish(manifest)


def python_config(name: str) -> ModelConfig:
    """The Python backend's; `slots` and `threads` (0: one per core) are the engine's."""
    flag, string = DataType.BOOL, DataType.STRING
    return ModelConfig(
        name=name,
        backend="python",
        instance_group=(InstanceGroup(Kind.CPU),),
        input=(
            Tensor("text_input", string, optional=True),
            Tensor("input_ids", DataType.INT64, (-1,), optional=True),
            Tensor("stream", flag, optional=True),
            Tensor("sampling_parameters", string, optional=True),
            Tensor("exclude_input_in_output", flag, optional=True),
            Tensor("return_finish_reason", flag, optional=True),
            Tensor("return_logprobs", flag, optional=True),
            Tensor("return_num_input_tokens", flag, optional=True),
            Tensor("return_num_output_tokens", flag, optional=True),
        ),
        output=(
            Tensor("text_output", string, (-1,)),
            Tensor("finish_reason", string, (-1,)),
            Tensor("stop_reason", string, (-1,)),
            Tensor("logprobs", string, (-1,)),
            Tensor("num_input_tokens", DataType.UINT32),
            Tensor("num_output_tokens", DataType.UINT32, (-1,)),
        ),
        parameters={"slots": Parameter(str(SLOTS)), "threads": Parameter("0")},
    )


def vllm_config(name: str) -> ModelConfig:
    """The vLLM backend's, which declares its tensors itself."""
    return ModelConfig(name=name, backend="vllm", instance_group=(InstanceGroup(Kind.MODEL),))


def vllm_engine(checkpoint: str, spec: ModelSpec, kv_cache: str) -> dict[str, Any]:
    """vLLM's AsyncEngineArgs for a checkpoint of ours."""
    engine = {
        "model": checkpoint,
        "dtype": "auto",
        "kv_cache_dtype": _VLLM_CACHE[kv_cache],
        "max_model_len": spec.max_positions,
        "gpu_memory_utilization": 0.9,
    }
    if kv_cache == "e5m2":
        # The one CUDA backend that reads and writes E5M2; vLLM's others assert, or store E4M3.
        engine["attention_backend"] = "FLASHINFER"
    return engine


def _write_python(calibration: Path, version: Path, model: Path | None) -> Manifest:
    from export.onnx import export_onnx

    content = export_onnx(calibration, version / "onnx", model=model)
    template = files("export").joinpath("triton_model.py.txt")
    (version / "model.py").write_text(template.read_text())
    return content


def _write_vllm(calibration: Path, version: Path, model: Path | None, out: Path) -> Manifest:
    from export.checkpoint import export_checkpoint

    content = export_checkpoint(calibration, version / "checkpoint", model=model)
    path = f"{out.parent.name}/{out.name}/{VERSION}/checkpoint"
    engine = vllm_engine(path, content.model.spec, content.recipe.kv_cache)
    (version / "model.json").write_text(json.dumps(engine, indent=2) + "\n")
    return content
