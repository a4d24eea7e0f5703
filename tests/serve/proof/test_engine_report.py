"""Tests what an engine reports about itself against the declared configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from octet.hardware.devices import Device, find_device
from octet.proof.declared import Declared, Engine, declared_paths
from octet.proof.reference import load_proofs
from octet.recipe import PRESETS, KvCacheDtype
from serve.members.factory import make_backend
from serve.proof.engine_report import EngineReport, engine_report, structural_findings
from tests.fake_servers import FLAVOURS, FakeOpenAI, FakeTriton, running
from tests.fakes import fake_backend, opened
from tests.serve.openai_clients import dead_url, started
from tests.triton_config import triton_at

PAGE = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    "process_start_time_seconds 1.79527254546e+09\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="%s",engine="0",num_gpu_blocks="5461",'
    'enable_prefix_caching="True",user_specified_block_size="False"} 1.0\n'
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


def declared(
    kv_cache: KvCacheDtype = "e5m2", engine: Engine | None = None, device: Device | None = None
) -> Declared:
    return declared_paths(None, PRESETS["fp8"], kv_cache, engine=engine, device=device)


async def test_vllm_says_what_it_keeps_and_since_when() -> None:
    report = await reported(vllm(root="/models/fp8"))
    assert report == EngineReport(
        engine="vllm",
        version="0.32.0",
        cache_dtype="fp8_e5m2",
        started=1795272545.46,
        root="/models/fp8",
        context=512,
        local=True,
        facts={"blocks": "of 128 tokens (as CPU builds choose)", "prefix caching": "on"},
    )
    assert report.settings == {
        "engine": "vllm",
        "version": "0.32.0",
        "cache": "fp8_e5m2",
        "context": 512,
        "prefix caching": "on",
    }


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
        backend = make_backend("fake", triton_at(server.url, model="fake"))
        assert await engine_report(backend) is None  # not started
        await backend.start()
        report = await engine_report(backend)
        await backend.close()
    assert report == EngineReport(
        "triton", "2.51.0", None, facts={"backend": "python", "slots": "16"}
    )
    assert not report.caches_prefixes


async def test_the_engine_in_this_process_is_octets_own() -> None:
    async with opened(fake_backend()) as backend:
        report = await engine_report(backend)
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
    assert structural_findings(report, loaded, declared(device=find_device("h100"))) == [
        "a build for CPUs (version 0.24.0+cpu) where H100 was declared"
    ]
    assert structural_findings(unsaid, loaded, declared(engine="vllm-gpu")) == []
