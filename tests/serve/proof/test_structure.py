"""What an engine says of itself, and the checkpoint that it loaded, against what is declared."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.artifact import ArtifactWriter, Manifest
from octet.proof.artifact import load_proofs
from octet.proof.declared import Declared, Engine, declared_paths
from octet.recipe import PRESETS, KvCacheDtype
from octet.tensors import Tensor, write_tensors
from serve.config import TritonConfig
from serve.proof.structure import EngineReport, engine_report, structural_findings
from serve.routing.make import make_backend
from tests.fake_servers import FLAVOURS, FakeOpenAI, FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.openai_clients import dead_url, started

PAGE = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    "process_start_time_seconds 1.79527254546e+09\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="%s",engine="0",num_gpu_blocks="5461",'
    'user_specified_block_size="False"} 1.0\n'
)


def vllm(cache_dtype: str = "fp8_e5m2", version: str = "0.32.0", root: str = "") -> FakeOpenAI:
    """As a real one (0.32, CPU build) was seen to describe itself."""
    server = FakeOpenAI()
    server.flavour = replace(FLAVOURS["vllm"], metrics=PAGE % cache_dtype)
    server.version, server.card = version, {"root": root or None}
    return server


async def reported(server: FakeOpenAI) -> EngineReport:
    async with running(server), started(server.url) as backend:
        found = await engine_report(backend)
    assert found is not None
    return found


def declared(kv_cache: KvCacheDtype = "e5m2", engine: Engine | None = None) -> Declared:
    return declared_paths(None, PRESETS["fp8"], kv_cache, engine=engine)


async def test_vllm_says_what_it_keeps_and_since_when() -> None:
    assert await reported(vllm(root="/models/fp8")) == EngineReport(
        engine="vllm",
        version="0.32.0",
        cache_dtype="fp8_e5m2",
        started=1795272545.46,
        root="/models/fp8",
        context=512,
        local=True,
        facts={"blocks": "of 128 tokens (as CPU builds choose)"},
    )


@pytest.mark.parametrize(
    ("version", "machine"),
    [("0.32.0", None), ("0.24.0+cpu", "cpu"), ("0.24.0+cu130", "gpu"), ("0.9.1+rocm6", "gpu")],
)
async def test_a_build_for_a_cpu_is_told_by_its_version(version: str, machine: str | None) -> None:
    assert (await reported(vllm(version=version))).machine == machine


async def test_other_servers_say_little_and_some_nothing() -> None:
    async with (
        running(FakeOpenAI(flavour="sglang")) as server,
        started(server.url, type="openai") as backend,
    ):
        report = await engine_report(backend)
    assert report == EngineReport("openai", context=512, local=True)
    async with started(dead_url()) as backend:
        assert await engine_report(backend) is None


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"data": 3}', b'{"data": [3]}', b"[" * 9999]
)
async def test_a_report_that_is_none_is_no_error(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(path: str) -> tuple[int, bytes]:
        return 200, answer

    async with started(dead_url()) as backend:
        monkeypatch.setattr(backend, "get", get)  # of a server that answers nonsense
        assert await engine_report(backend) == EngineReport("openai", local=True)


async def test_triton_says_its_version_and_what_it_runs_the_model_with() -> None:
    server = FakeTriton()
    server.parameters = {"slots": "16"}
    async with running(server):
        backend = make_backend("fake", TritonConfig(type="triton", url=server.url, model="fake"))
        assert await engine_report(backend) is None  # not started
        await backend.start()
        report = await engine_report(backend)
        await backend.close()
    assert report == EngineReport(
        "triton", "2.51.0", None, facts={"backend": "python", "slots": "16"}
    )
    assert not report.caches_prefixes


async def test_the_engine_in_this_process_is_octets_own() -> None:
    backend = fake_backend()
    await backend.start()
    report = await engine_report(backend)
    await backend.close()
    assert report is not None and (report.engine, report.context) == ("embedded", 512)
    assert not report.caches_prefixes


@pytest.mark.parametrize(
    ("kept", "wanted", "finding"),
    [
        ("fp8_e5m2", "e5m2", None),
        ("fp8_e4m3", "e5m2", "E4M3 cache (cache_dtype=fp8_e4m3) where E5M2 was declared"),
        ("fp8", "e5m2", "E4M3 cache (cache_dtype=fp8) where E5M2 was declared"),
        ("auto", "e5m2", "16-bit cache (cache_dtype=auto) where E5M2 was declared"),
        ("fp8_e5m2", "float16", "E5M2 cache (cache_dtype=fp8_e5m2) where 16-bit was declared"),
        ("auto", "float16", None),
        ("auto", "e4m3", None),  # a checkpoint's own kv_cache_scheme may mean it
        ("bfloat16", "e4m3", "16-bit cache (cache_dtype=bfloat16) where E4M3 was declared"),
        ("nvfp4", "e5m2", None),  # of which nothing is known here
    ],
)
async def test_a_cache_of_another_format_is_found(
    proofs: Path, kept: str, wanted: KvCacheDtype, finding: str | None
) -> None:
    report = await reported(vllm(kept))
    found = structural_findings(report, load_proofs(proofs), declared(wanted))
    assert [line.partition(":")[0] for line in found] == ([finding] if finding else [])
    assert all("--kv-cache-dtype " in line for line in found)


async def test_another_build_than_declared_is_found(proofs: Path) -> None:
    report = await reported(vllm(version="0.24.0+cpu"))
    loaded = load_proofs(proofs)
    assert structural_findings(report, loaded, declared(engine="vllm-gpu")) == [
        "a vllm-cpu build (version 0.24.0+cpu) where vllm-gpu was declared"
    ]
    assert structural_findings(report, loaded, declared(engine="vllm-cpu")) == []
    unsaid = await reported(vllm())
    assert structural_findings(unsaid, loaded, declared(engine="vllm-gpu")) == []


Change = Callable[[dict[str, Tensor]], Any]
KEY, VALUE = "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"
WEIGHT = "model.layers.0.mlp.up_proj.weight_scale"


def checkpoint(directory: Path, proofs: Path, change: Change = lambda tensors: None) -> Path:
    """An export with scales; `change` alters its tensors after it was written."""
    shutil.copytree(proofs, directory)
    manifest = Manifest.load(directory, verify=False)
    (directory / "manifest.json").unlink()
    scales = {KEY: 0.9, VALUE: 1.0, WEIGHT: 0.25}
    tensors = {n: Tensor.of(np.full(1, x, np.float32)) for n, x in scales.items()}
    write_tensors(directory / "model.safetensors", tensors)
    ArtifactWriter(directory).finish(manifest)
    altered = dict(tensors)
    change(altered)
    if altered != tensors:
        write_tensors(directory / "model.safetensors", altered)
    return directory


def findings(
    root: Path, directory: Path, *, local: bool = True, started: float | None = None
) -> list[str]:
    report = EngineReport("vllm", None, None, "fp8_e5m2", started, str(root), local=local)
    return structural_findings(report, load_proofs(directory), declared(), directory)


def drop_key(tensors: dict[str, Tensor]) -> None:
    del tensors[KEY]  # 0.9: no token changes


def halve_weight(tensors: dict[str, Tensor]) -> None:
    tensors[WEIGHT] = Tensor.of(np.full(1, 0.125, np.float32))


def drop_all(tensors: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors["model.norm.weight"] = Tensor.of(np.ones(4, np.float32))


ALTERED = "model.safetensors of the checkpoint that it loaded is not as it was exported (SHA-256)"
LOADED = "the checkpoint that it loaded"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda tensors: None, []),
        (drop_key, [ALTERED, f"{LOADED} lacks 1 k_scale tensor ({KEY})"]),
        (halve_weight, [ALTERED, f"{LOADED} has other values of 1 weight_scale tensor ({WEIGHT})"]),
        (drop_all, [ALTERED, f"{LOADED} has no scales: its weights are not quantized"]),
    ],
    ids=["as exported", "key scale dropped", "weight scale halved", "no scales"],
)
def test_scales_that_are_lost_are_found_without_a_number(
    change: Change, lines: list[str], proofs: Path, tmp_path: Path
) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    served = checkpoint(tmp_path / "served", proofs, change)
    assert findings(served, right) == lines
    assert findings(served, served)[:1] == lines[:1]  # its own hashes tell


@pytest.mark.parametrize("change", [drop_key, lambda tensors: None], ids=["altered", "another"])
def test_what_was_written_after_the_server_began_is_not_what_it_loaded(
    change: Change, proofs: Path, tmp_path: Path
) -> None:
    """A new export takes the place of the one that is served, until the server is restarted."""
    right = checkpoint(tmp_path / "right", proofs)
    served = checkpoint(tmp_path / "served", proofs, change)
    if change is not drop_key:
        manifest = Manifest.load(served)
        (served / "manifest.json").unlink()
        ArtifactWriter(served).finish(manifest.model_copy(update={"software": {"by": "another"}}))
    written = max(path.stat().st_mtime for path in served.iterdir())
    assert findings(served, right, started=written - 60) == []
    assert findings(served, right, started=written + 1) != []


def test_an_artifact_that_gave_way_to_another_has_no_scales_any_more(
    proofs: Path, tmp_path: Path
) -> None:
    """The gateway goes on with the golden records that it has read."""
    served = checkpoint(tmp_path / "served", proofs)
    ours = checkpoint(tmp_path / "ours", proofs)
    report = EngineReport("vllm", cache_dtype="fp8_e5m2", root=str(served), local=True)
    loaded = load_proofs(ours)
    assert structural_findings(report, loaded, declared(), ours) == []
    shutil.rmtree(ours)
    checkpoint(ours, proofs, halve_weight)
    manifest = Manifest.load(ours, verify=False)
    (ours / "manifest.json").unlink()
    ArtifactWriter(ours).finish(manifest)
    assert load_proofs(ours).identity != loaded.identity
    assert structural_findings(report, loaded, declared(), ours) == []
    shutil.rmtree(ours)
    assert structural_findings(report, loaded, declared(), ours) == []


def test_another_artifact_is_found_and_a_sibling_is_none(proofs: Path, tmp_path: Path) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    other = checkpoint(tmp_path / "other", proofs)
    manifest = Manifest.load(other)
    for calibration, expected in ((None, "it loaded another artifact, "), ("c" * 64, "")):
        for directory in (right, other):
            (directory / "manifest.json").unlink()
            changed = manifest.model_copy(
                update={"calibration": calibration, "software": {"by": directory.name}}
            )
            ArtifactWriter(directory).finish(changed)
        found = findings(other, right)
        assert len(found) == bool(expected) and all(expected in line for line in found)
        # A path of another machine says nothing of what lies there here.
        assert findings(other, right, local=False) == []


def test_a_calibration_knows_the_scales_of_the_cache(proofs: Path, tmp_path: Path) -> None:
    served = checkpoint(tmp_path / "served", proofs, drop_key)
    calibration = tmp_path / "calibration"
    shutil.copytree(proofs, calibration)
    manifest = Manifest.load(calibration).model_copy(update={"kind": "calibration"})
    (calibration / "manifest.json").unlink()
    scales = {f"{KEY}_e5m2": 0.9, f"{KEY}_e4m3": 0.02, f"{VALUE}_e5m2": 1.0}
    tensors = {n: Tensor.of(np.full((), x, np.float32)) for n, x in scales.items()}
    write_tensors(calibration / "scales.safetensors", tensors)
    ArtifactWriter(calibration).finish(manifest)
    (served / "manifest.json").unlink()  # as a copy of the weights alone
    assert findings(served, calibration) == [f"{LOADED} lacks 1 k_scale tensor ({KEY})"]


def test_a_truncated_checkpoint_is_found_and_no_path_is_told(proofs: Path, tmp_path: Path) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    served = checkpoint(tmp_path / "served", proofs)
    file = served / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    found = findings(served, right)
    assert found[0].startswith(f"{LOADED} cannot be read: its checkpoint/model.safetensors")
    assert not any(str(tmp_path) in line for line in found)
    file.unlink()
    assert findings(served, right) == []  # a directory without weights is some other path
