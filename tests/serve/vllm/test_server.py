"""Starting vLLM on a checkpoint, with a stand-in for its command (integration has the real one)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ArtifactError, BackendError, ConfigError
from serve.vllm.command import in_blocks, scale_variables
from serve.vllm.process import last_line
from serve.vllm.server import VllmServer
from tests.command import octet
from tests.layout import ROOT
from tests.serve.vllm.exports import write_export

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Writes how it was started; then is healthy, or ends as $FAULT says, or when its parent is gone.
COMMAND = """#!{python} -S
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
with open({calls!r}, "w") as file:
    json.dump({{"words": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)}}, file)
if "--fault" in sys.argv:
    print("ValueError: no such cache")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"data": [{{"id": "m", "max_model_len": 200}}]}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open({calls!r} + "-prompts", "a") as file:
            file.write(json.dumps(body["prompt"]) + chr(10))
        self.answer({{}})
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def write_section(checkpoint: Path, section: Any) -> None:
    config = {"quantization_config": section}
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.fixture
def command(tmp_path: Path) -> str:
    path = tmp_path / "vllm"
    path.write_text(COMMAND.format(python=sys.executable, calls=str(tmp_path / "calls")))
    path.chmod(0o755)
    return str(path)


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_runs_as_long_as_the_block(checkpoint: Path, command: str, tmp_path: Path) -> None:
    options = {"command": command, "options": ["--seed", "1"], "environment": {"HUB": "off"}}
    with VllmServer(checkpoint, log=tmp_path / "log", **options) as server:  # type: ignore[arg-type]
        call = json.loads((tmp_path / "calls").read_text())
        assert call["words"][:2] == ["serve", str(checkpoint)] and call["env"]["HUB"] == "off"
        assert call["words"][-2:] == ["--seed", "1"] and server.url.endswith(
            call["words"][call["words"].index("--port") + 1]
        )
        assert alive(call["pid"])
    assert not alive(call["pid"])


def test_the_engine_is_forked_unless_the_user_wants_otherwise(
    checkpoint: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    for mine, expected in ((None, "fork"), ("spawn", "spawn")):
        if mine is not None:
            monkeypatch.setenv(name, mine)
        with VllmServer(checkpoint, log=tmp_path / "log", command=command):
            assert json.loads((tmp_path / "calls").read_text())["env"][name] == expected


@pytest.mark.parametrize(
    ("name", "serve_with"),
    [
        ("mine", "--trust-remote-code"),
        ("mine", "--kv-cache-dtype fp8_e5m2 --load-format pt"),
        ("--trust-remote-code", "--kv-cache-dtype fp8_e5m2"),
    ],
)
def test_an_export_brings_no_flag_that_runs_its_code(
    name: str, serve_with: str, tiny_model: Path, command: str, tmp_path: Path
) -> None:
    write_export(tmp_path / "export", tiny_model, name, serve_with)
    with pytest.raises(ArtifactError, match="not what an export records for vllm serve"):
        VllmServer(tmp_path / "export", log=tmp_path / "log", command=command)


def test_an_export_brings_its_own_flags(tiny_model: Path, command: str, tmp_path: Path) -> None:
    write_export(tmp_path / "export", tiny_model, "mine", "--kv-cache-dtype fp8_e5m2")
    with VllmServer(tmp_path / "export", log=tmp_path / "log", command=command):
        words = " ".join(json.loads((tmp_path / "calls").read_text())["words"])
    assert words.endswith(
        "--kv-cache-dtype fp8_e5m2 --tensor-parallel-size 2 --served-model-name mine"
    )


@pytest.mark.parametrize(
    ("section", "gpu", "mine", "expected"),
    [
        (BLOCKS, "H200, 9.0, 143771, 143000", None, "0"),
        (BLOCKS, "H200, 9.0, 143771, 143000", "1", "1"),
        (BLOCKS, "B200, 10.0, 183359, 183000", None, None),
        (BLOCKS | {"scale_fmt": "ue8m0"}, "H200, 9.0, 143771, 143000", None, None),
        ({"weight_block_size": None}, "H200, 9.0, 143771, 143000", None, None),
    ],
)
def test_hopper_keeps_the_scales_of_blocks_unless_the_user_wants_otherwise(
    section: dict[str, Any],
    gpu: str,
    mine: str | None,
    expected: str | None,
    tiny_model: Path,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{gpu}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if mine is not None:
        monkeypatch.setenv(name, mine)
    write_export(tmp_path / "export", tiny_model, "mine")
    write_section(tmp_path / "export", section)
    with VllmServer(tmp_path / "export", log=tmp_path / "log", command=command):
        env = json.loads((tmp_path / "calls").read_text())["env"]
    assert env.get(name) == expected


@pytest.mark.parametrize(
    "section",
    [
        BLOCKS,
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {"num_bits": 8},
            "config_groups": {
                "group_0": {"weights": {"strategy": "channel"}},
                "group_1": {"weights": {"strategy": "block"}},
            },
        },
    ],
    ids=lambda section: section["quant_method"],
)
def test_blocks_of_every_tool_keep_their_scales(section: dict[str, Any], checkpoint: Path) -> None:
    hopper, blackwell = (9, 0), (10, 0)
    assert scale_variables(checkpoint, [hopper]) == {}
    write_section(checkpoint, section)
    assert in_blocks(checkpoint)
    assert scale_variables(checkpoint, [hopper]) == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    for others in ([], [blackwell], [hopper, blackwell]):  # Blackwell has only powers of two
        assert scale_variables(checkpoint, others) == {}
    write_section(checkpoint, section | {"scale_fmt": "ue8m0"})  # as DeepSeek-V3.1
    assert in_blocks(checkpoint)
    assert scale_variables(checkpoint, [hopper]) == {}


@pytest.mark.parametrize(
    "section", [[], {"config_groups": []}, {"config_groups": {"a": 1, "b": {"weights": "block"}}}]
)
def test_a_quantization_of_no_known_form_has_no_blocks(section: Any, checkpoint: Path) -> None:
    write_section(checkpoint, section)
    assert not in_blocks(checkpoint)


def test_prewarm_sends_blocks_a_prompt_for_each_kernel(
    tiny_model: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'H200, 9.0, 143771, 143000'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sent = tmp_path / "calls-prompts"
    for name, lengths in (("channels", []), ("blocks", [*range(8, 64, 8), 64, 128, 192])):
        export = tmp_path / name
        write_export(export, tiny_model, "mine")
        write_section(export, BLOCKS if lengths else {})
        done = octet("prewarm", export, "--vllm", command, "--json")
        assert done.returncode == 0, done.stderr
        keep = {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if lengths else {}
        assert json.loads(done.stdout)["environment"] == keep
        prompts = [json.loads(line) for line in sent.read_text().splitlines()]
        sent.unlink()
        assert [len(prompt) for prompt in prompts] == [64, *lengths]
        assert len({tuple(prompt[:2]) for prompt in prompts}) == len(prompts)  # of no cache
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    done = octet("prewarm", export, "--vllm", command)
    assert "a first start compiles for minutes" in done.stderr and "/octet-prewarm-" in done.stderr
    assert done.stdout.endswith(
        "start vLLM with these environment variables:\n  VLLM_USE_DEEP_GEMM_E8M0=1\n"
    )


def test_one_that_ends_is_reported_with_the_cause_in_its_log(
    checkpoint: Path, command: str, tmp_path: Path
) -> None:
    server = VllmServer(checkpoint, log=tmp_path / "log", command=command, options=["--fault"])
    with pytest.raises(BackendError, match="code 1 before it was ready: ValueError: no such cache"):
        server.__enter__()


def test_the_cause_of_a_failure_is_found_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text, cause in (
        ("", "it wrote nothing"),
        ("INFO starts\n\nready\n", "ready"),
        ("vllm: error: unrecognized arguments: --no\n", "unrecognized arguments: --no"),
        ("WARNING errors like `OSError: too many` may come\nended\n", "ended"),
        (
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len (9) is greater\n  For further information visit x\n",
            "1 validation error for ModelConfig Value error, max_model_len (9) is greater",
        ),
    ):
        log.write_text(text)
        assert last_line(log).endswith(cause)


def test_what_cannot_start_is_refused(checkpoint: Path, command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        VllmServer(tmp_path, log=tmp_path / "log", command=command)
    with pytest.raises(ConfigError, match="no such command"):
        VllmServer(checkpoint, log=tmp_path / "log", command=str(tmp_path / "missing"))


def test_it_ends_with_a_parent_that_is_killed(
    checkpoint: Path, command: str, tmp_path: Path
) -> None:
    code = (
        "import os, sys, pathlib; from serve.vllm.server import VllmServer\n"
        f"with VllmServer(pathlib.Path({str(checkpoint)!r}), log=pathlib.Path(os.devnull),"
        f" command={command!r}):\n    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, check=False)
    pid = json.loads((tmp_path / "calls").read_text())["pid"]
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
