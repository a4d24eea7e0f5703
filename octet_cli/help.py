"""Formats the help: one style of metavar, and examples under every command.

A metavar is one word in capitals (PATH, N, TEXT), or the values to choose from; a flag has none.
"""

import shutil
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from octet.errors import ConfigError, nearest

__all__ = ["EXAMPLES", "Command", "Group", "examples_of"]

# Examples by command; those of a group are the ways into it.
EXAMPLES = {
    "octet": (
        "octet calibrate MODEL --samples samples.jsonl --out calibration",
        "octet export checkpoint calibration --out checkpoint",
        "octet verify checkpoint",
    ),
    "calibrate": (
        "octet calibrate Llama-3.2-1B --samples samples.jsonl --out calibration",
        "octet calibrate Llama-3.2-1B --samples samples.jsonl --recipe nvfp4 --kv e4m3 -o nvfp4",
        "octet calibrate Qwen3-8B --samples s.jsonl --recipe auto --for h100,l40s,b200 -o shared",
        "octet calibrate Qwen3-8B --samples chats.parquet -o calibration --max-ppl-change 1%",
    ),
    "rescale": (
        "octet rescale calibration --recipe fp8-static --out static",
        "octet rescale calibration --kv e4m3 --out e4m3",
        "octet rescale calibration --histograms live --out today",
        "octet rescale calibration --recipe fp8-static --te-state te-state.pt --out trained",
    ),
    "recover": (
        "octet recover calibration --samples samples.jsonl --held-out heldout.jsonl -o recovered",
        "octet recover calibration --samples samples.jsonl --train norms --epochs 4 -o recovered",
    ),
    "replay": (
        "octet replay calibration --samples stream.jsonl",
        "octet replay calibration --samples stream.jsonl --history 16 --margin 1 -o replay.html",
    ),
    "drift": (
        "octet drift calibration --live /var/lib/octet/live",
        "octet drift calibration --live live --json --metrics /var/lib/node_exporter/octet.prom",
    ),
    "export": (
        "octet export checkpoint calibration --out checkpoint",
        "octet export onnx calibration --out onnx",
    ),
    "export checkpoint": (
        "octet export checkpoint calibration --out checkpoint",
        "octet export checkpoint calibration --format modelopt --kv e4m3 --tp 2 -o checkpoint",
    ),
    "export onnx": (
        "octet export onnx calibration --out onnx",
        "octet export onnx calibration --for tensorrt --kv e4m3 --out onnx",
    ),
    "export triton": (
        "octet export triton calibration --out triton_models/llama",
        "octet export triton calibration --all --engine engine --out triton_models",
    ),
    "build-engine": (
        "octet build-engine calibration --out engine",
        "octet build-engine calibration --builder tensorrt-rtx --target sm89,sm120 --out engine",
    ),
    "golden": (
        "octet golden Qwen3-8B --quantized Qwen3-8B-FP8 --samples samples.jsonl -o pack",
        "octet verify http://127.0.0.1:8000 --golden pack",
    ),
    "verify": (
        "octet verify checkpoint",
        "octet verify http://127.0.0.1:8000 --golden checkpoint",
    ),
    "evaluate": (
        "octet evaluate Llama-3.2-1B checkpoint --samples heldout.jsonl",
        "octet evaluate http://127.0.0.1:8000 --reference Llama-3.2-1B --samples heldout.jsonl",
    ),
    "bench": (
        "octet bench Llama-3.2-1B checkpoint --tokenizer Llama-3.2-1B --load 16x1024x128",
        "octet bench http://a:8000 http://b:8000 --tokenizer Llama-3.2-1B --out runs",
    ),
    "doctor": (
        "octet doctor",
        "octet doctor checkpoint --python /opt/vllm/bin/python",
        "octet doctor --config gateway.yaml --json",
    ),
    "plan": (
        "octet plan Llama-3.1-8B --gpu h100 --context 32k --concurrency 64",
        "octet plan checkpoint --gpu l40s --context 8k --concurrency 16 --price 1.20 --html p.html",
    ),
    "prewarm": ("octet prewarm checkpoint --cache /var/cache/vllm",),
    "serve": (
        "octet serve Llama-3.2-1B --samples samples.jsonl --fallback",
        "octet serve checkpoint --python /opt/vllm/bin/python -- --max-model-len 8192",
        "octet serve onnx --port 8000",
        "octet serve --config gateway.yaml",
        "octet serve --config gateway.yaml --check",
    ),
    "prove": ("octet prove --kubernetes --selector app=vllm --golden checkpoint",),
    "deploy": ("octet deploy ray gateway.yaml",),
    "deploy ray": (
        "octet deploy ray gateway.yaml",
        "octet deploy ray gateway.yaml --address 10.0.0.5:6379",
    ),
    "rollout": (
        "octet rollout my-model next --steps 0.01,0.1,1",
        "octet rollout my-model --back",
    ),
    "keys": ("octet keys new alice",),
    "keys new": ("octet keys new alice",),
    "keys hash": ("octet keys hash < key.txt",),
}

# What people type -> the command they mean, where the spelling does not tell.
_MEANT = {
    **dict.fromkeys(("create", "add", "make", "generate"), "new"),
    **dict.fromkeys(("quantize", "quantise", "observe"), "calibrate"),
    **dict.fromkeys(("convert", "save"), "export"),
    **dict.fromkeys(("build", "compile"), "build-engine"),
    **dict.fromkeys(("check", "validate"), "verify"),
    **dict.fromkeys(("eval", "perplexity"), "evaluate"),
    **dict.fromkeys(("diagnose", "preflight", "hardware"), "doctor"),
    **dict.fromkeys(("benchmark", "measure"), "bench"),
    **dict.fromkeys(("size", "sizing", "cost", "estimate"), "plan"),
    **dict.fromkeys(("run", "start", "gateway"), "serve"),
    **dict.fromkeys(("canary", "promote", "rollback"), "rollout"),
    **dict.fromkeys(("key", "api-key"), "keys"),
    "vllm": "checkpoint",
    "tensorrt": "onnx",
}


class Command(TyperCommand):
    """A command in this style."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.help is not None:  # a docstring's own line ends say nothing
            self.help = "\n\n".join(" ".join(part.split()) for part in self.help.split("\n\n"))

    def get_params(self, ctx: Any) -> Any:
        return _tidy(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _fit(self, ctx, formatter)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands in this style, which names the command that a wrong name may mean."""

    def get_params(self, ctx: Any) -> Any:
        return _tidy(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _fit(self, ctx, formatter)
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing and not cmd_name.startswith("-"):
            meant = _MEANT.get(cmd_name)
            hint = nearest(cmd_name, self.commands)
            if meant in self.commands:
                hint = f"; did you mean '{meant}'?"
            raise ConfigError(f"no command '{cmd_name}'{hint}")
        return found


def examples_of(command: str) -> str:
    """Returns the text under a command's help."""
    lines = "\n".join(f"  {line}" for line in EXAMPLES[command])
    return f"Examples:\n{lines}".replace("[", "\\[")


def _fit(command: Any, ctx: Any, formatter: Any) -> None:
    """Shows help as plain lines where the columns of its tables would not fit."""
    columns = shutil.get_terminal_size().columns
    if columns >= _NARROW:
        return
    formatter.width = columns - 1
    command.rich_markup_mode = None
    for shown in (command, *command.get_params(ctx)):
        if getattr(shown, "help", None):
            shown.help = shown.help.replace("\\[", "[")
    examples = command.epilog.replace("\\[", "[").splitlines()
    command.epilog = "\b\n" + "\n".join(examples)  # \b: keep these lines


def _tidy(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if parameter.metavar is None:
            parameter.metavar = _metavar(parameter)
        if isinstance(parameter, TyperArgument):  # its name tells its type
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
    return parameters


def _metavar(parameter: Any) -> str | None:
    if isinstance(parameter, TyperArgument):
        return str(parameter.name).upper()
    if getattr(parameter, "is_flag", False):
        return ""
    described = getattr(parameter, "type_descriptor", None)
    if described is None:  # another release of typer
        return None
    if described.is_choice:
        return "|".join(map(str, described.choices))
    return _WORDS.get(described.annotation, "TEXT")


_NARROW = 60  # columns
_WORDS = {Path: "PATH", int: "N", float: "X", str: "TEXT"}
