"""Writes the tables of compatibility.md that come from the hardware model.

python docs/compatibility.py
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from octet.hardware.devices import find_device
from octet.hardware.support import EngineName, Support, known_versions, support
from octet.recipe import PRESETS, KvCacheDtype

PAGE = Path(__file__).parent / "compatibility.md"
BEGIN, END = "<!-- begin: octet/hardware/support.yaml -->\n", "<!-- end -->\n"
GPUS = ("t4", "a100", "l40s", "h100", "b200", "rtx 5090", "mi300x", "mi355x", "gaudi3")
CPUS = ("cpu-amx", "cpu-avx512", "cpu")
CACHES: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3", "float16")
NAMES = {
    "t4": "7.5 T4",
    "a100": "8.0, 8.6 A100, A10",
    "l40s": "8.9 L40S, L4",
    "h100": "9.0 H100, H200",
}
NAMES |= {"b200": "10.0, 10.3 B200, B300", "rtx 5090": "12.0 RTX 5090", "mi300x": "gfx942 MI300X"}
NAMES |= {"mi355x": "gfx950 MI355X", "gaudi3": "Gaudi 3", "cpu-amx": "CPU, AMX"}
NAMES |= {"cpu-avx512": "CPU, AVX-512", "cpu": "other CPU"}
OTHERS: tuple[EngineName, ...] = (
    "tensorrt",
    "tensorrt-rtx",
    "onnxruntime",
    "sglang",
    "tensorrt-llm",
)


def main() -> None:
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + tables() + END + after, "utf-8")


def tables() -> str:
    """Returns the tables of all engines, in Markdown."""
    lines = ["", "### Weights in vLLM", ""]
    lines += [*weights("vllm", (*GPUS, *CPUS)), "", "### Caches in vLLM", ""]
    lines += [*caches("vllm", (*GPUS, *CPUS)), "", "### Weights in other engines", ""]
    lines += ["| engine | device | " + " | ".join(f"`{name}`" for name in PRESETS) + " |"]
    lines += ["|---|---|" + "---|" * len(PRESETS)]
    for engine in OTHERS:
        for device in (*GPUS, *CPUS):
            cells = [_cell(engine, device, _of_weights(name)) for name in PRESETS]
            if any(cell not in ("unknown", "refused") for cell in cells):
                lines.append(_row(engine, NAMES[device], *cells))
    return "\n".join([*lines, "", ""])


def weights(engine: EngineName, devices: Iterable[str]) -> Iterator[str]:
    """Yields the rows of a table of recipes."""
    yield "| device | " + " | ".join(f"`{name}`" for name in PRESETS) + " |"
    yield "|---|" + "---|" * len(PRESETS)
    for device in devices:
        yield _row(NAMES[device], *(_cell(engine, device, _of_weights(name)) for name in PRESETS))


def caches(engine: EngineName, devices: Iterable[str]) -> Iterator[str]:
    """Yields the rows of a table of caches, with the attention backend that is selected."""
    yield "| device | " + " | ".join(f"`{cache}`" for cache in CACHES) + " | without FlashInfer |"
    yield "|---|" + "---|" * (len(CACHES) + 1)
    for device in devices:
        cells = [_cell(engine, device, _of_cache(cache)) for cache in CACHES]
        without = ""
        if device in GPUS and find_device(device).vendor == "nvidia":
            found = [
                f"`{cache}`: {_cell(engine, device, _of_cache(cache, 'flashinfer'))}"
                for cache in ("e5m2", "e4m3")
            ]
            without = "; ".join(found)
        yield _row(NAMES[device], *cells, without)


Ask = Callable[[EngineName, str, str], tuple[str, bool]]


def _of_weights(recipe: str) -> Ask:
    def ask(engine: EngineName, device: str, version: str) -> tuple[str, bool]:
        found = support(find_device(device), engine, version, recipe, "float16")
        return found.weights, found.measured

    return ask


def _of_cache(cache: KvCacheDtype, *missing: str) -> Ask:
    def ask(engine: EngineName, device: str, version: str) -> tuple[str, bool]:
        found = support(find_device(device), engine, version, None, cache, missing=missing)
        if found.cache in ("unknown", "refused", "corrupt"):
            return found.cache, found.measured
        return _described(found), found.measured

    return ask


def _described(found: Support) -> str:
    parts = [found.attention or found.cache]
    parts += ["truncates"] if found.rounding == "truncate" else []
    parts += ["rounds queries"] if found.queries else []
    parts += ["may round queries"] if found.queries is None else []
    return ", ".join(parts)


def _cell(engine: EngineName, device: str, ask: Ask) -> str:
    """Returns what happens, with the versions where it changes; bold where we ran it."""
    answers = [(version, *ask(engine, device, version)) for version in known_versions(engine)]
    runs = [(text, list(of)) for text, of in groupby(answers, key=lambda answer: answer[1])]
    parts = []
    for text, of in runs:
        shown = f"**{text}**" if any(measured for *_, measured in of) else text
        since = "" if of[0] is answers[0] else f" from {of[0][0]}"
        parts.append(shown + since)
    return "; ".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
