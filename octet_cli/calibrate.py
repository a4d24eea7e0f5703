"""`octet calibrate`, `rescale` and `recover`: observe a model, and find scales for a recipe."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError, GpuError, OctetError
from octet.interrupts import held_back
from octet.limit import Limit
from octet.recipe import KvCacheDtype, Recipe
from octet.tables import Stacked
from octet_cli.options import (
    RECIPES,
    Force,
    Json,
    MaxKl,
    MaxPplChange,
    Model,
    ModelOption,
    Out,
    Source,
    TextField,
    console_for,
    wrote,
)

if TYPE_CHECKING:
    from calibrate.options import Options
    from export.source import Source as Opened
    from octet.hardware.choice import Choice
    from octet.hardware.devices import Device

__all__ = ["calibrate", "chosen_for", "chosen_recipe", "recover", "rescale"]

KvOption = Annotated[
    KvCacheDtype | None,
    typer.Option("--kv-cache", "--kv", help="Format of the cache, if not the recipe's."),
]
Predict = Annotated[
    bool,
    typer.Option(
        "--predict/--no-predict", help="Predict the divergence of each way of serving the model."
    ),
]
Samples = Annotated[
    Path, typer.Option("--samples", help="JSONL, text, folder of texts, Parquet or data set.")
]
Count = Annotated[int, typer.Option("--count", "-n", min=1, help="Samples to run.")]
MessagesField = Annotated[
    str, typer.Option(help="Field of each sample that holds its conversation.")
]
MaxLength = Annotated[int, typer.Option(min=1, help="Tokens in a row, at most.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a forward pass.")]
Where = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")]
Spill = Annotated[
    Path | None, typer.Option(help="Directory for activations that memory cannot hold.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard what an interrupted run has computed.")
]
FewSamples = Annotated[
    bool, typer.Option("--allow-few-samples", help="Accept fewer than 128 samples.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Pattern of module names to leave in full precision; may be repeated."),
]


def calibrate(
    model: Model,
    samples: Samples,
    out: Out,
    recipe: Annotated[
        str, typer.Option(help=f"{RECIPES}, a YAML file, or auto: what runs best on --for.")
    ] = "fp8",
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="GPUs that will serve it, h100 or h100,l40s: limits are measured as they compute,"
            " and --recipe auto chooses for them (default: this machine's).",
        ),
    ] = None,
    kv_cache: KvOption = None,
    exclude: Exclude = None,
    name: Annotated[
        str | None, typer.Option(help="Name to serve the model under (default: its directory's).")
    ] = None,
    count: Count = 256,
    held_out: Annotated[
        Path | None, typer.Option(help="Samples for golden records and budget, not for scales.")
    ] = None,
    text_field: TextField = "text",
    messages_field: MessagesField = "messages",
    max_length: MaxLength = 512,
    long: Annotated[
        Literal["cut", "split", "refuse"], typer.Option(help="What to do with a longer sample.")
    ] = "cut",
    pack: Annotated[
        bool, typer.Option("--pack", help="Join samples into full rows instead of padding.")
    ] = False,
    batch_size: BatchSize = 8,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Arithmetic of the forward pass.")
    ] = "auto",
    device: Where = "auto",
    algorithm: Annotated[
        Literal["smoothquant", "awq", "gptq", "auto"] | None,
        typer.Option(help="Change the weights first, with NVIDIA's ModelOpt. auto: if it helps."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="kl=0.005 or ppl=1%: promote layers to a more precise format until it is met."
        ),
    ] = None,
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Measure what quantizing each layer costs.")
    ] = False,
    spill: Spill = None,
    restart: Restart = False,
    allow_few_samples: FewSamples = False,
    predict: Predict = True,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Observe a model on representative samples, and find its scales.

    If a run is interrupted, the same command continues where it stopped. If the model misses
    --max-kl or --max-ppl-change, the exit code is 1, OUT.refused has the report, and the same
    command continues, too. --restart begins anew, and so does --force if a run cannot continue.
    Under torchrun, processes share the samples.
    """
    from calibrate.options import Options
    from calibrate.quality.gate import Gate

    choice = None
    if recipe == "auto":
        console = console_for(as_json)
        choice = chosen_for(for_, kv_cache, small=budget is not None, console=console)
    chosen = chosen_recipe(recipe if choice is None else choice.recipe, kv_cache, exclude)
    options = Options(
        model=model,
        samples=samples,
        out=out,
        recipe=chosen,
        weight_only=_measured_for(for_, chosen, budget=budget is not None),
        chosen=None if choice is None else choice.details(),
        name=name,
        count=count,
        held_out=held_out,
        text_field=text_field,
        messages_field=messages_field,
        max_length=max_length,
        long=long,
        pack=pack,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        algorithm=algorithm,
        budget=None if budget is None else Limit.parse(budget),
        gate=Gate.parse(max_kl, max_ppl_change),
        sensitivity=sensitivity,
        spill=spill,
        restart=restart,
        allow_few_samples=allow_few_samples,
        predict=predict,
        force=force,
    )
    rounded = for_ is None and options.measures
    _run(options, as_json, _more_exact_here(chosen) if rounded else "")


def recover(
    calibration: Source,
    samples: Samples,
    out: Out,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Samples that decide whether it helped, and for golden records."),
    ] = None,
    train: Annotated[
        Literal["all", "weights", "norms", "scales"],
        typer.Option(
            help="Train the quantized weights, the norms, both (all), or the weights' scales."
        ),
    ] = "all",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the samples.")] = 6,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-8, max=1.0, help="Of Adam, at its highest (default: 1.5e-5; 0.005 for scales)."
        ),
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="GPUs that will serve it, h100 or h100,l40s (default: those of the calibration, or"
            " this machine's): if they run the recipe weight-only, activations are not rounded.",
        ),
    ] = None,
    count: Count = 256,
    model: ModelOption = None,
    text_field: TextField = "text",
    messages_field: MessagesField = "messages",
    max_length: MaxLength = 512,
    batch_size: BatchSize = 8,
    device: Where = "auto",
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    spill: Spill = None,
    restart: Restart = False,
    allow_few_samples: FewSamples = False,
    predict: Predict = True,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train the quantized weights of a calibration to answer as the original model does.

    The result is a calibration with weights of its own. It is written only if the divergence on
    held-out text is lower than before, with 95 % confidence. An interrupted run continues where it
    stopped when the same command is given again. A model that does not fit in memory is trained
    layer by layer. Under torchrun, processes share the samples.
    """
    from calibrate.options import Options, Training, source_of
    from calibrate.quality.gate import Gate

    manifest = Manifest.load(calibration, "calibration", verify=False)
    options = Options(
        model=source_of(calibration, manifest, model),
        samples=samples,
        out=out,
        recipe=manifest.recipe,
        name=manifest.model.name,
        count=count,
        held_out=held_out,
        text_field=text_field,
        messages_field=messages_field,
        max_length=max_length,
        batch_size=batch_size,
        device=device,
        algorithm="recover",
        training=Training(
            calibration=calibration,
            train=("weights", "norms") if train == "all" else (train,),
            epochs=epochs,
            learning_rate=learning_rate,
        ),
        weight_only=_trained_for(for_, manifest),
        gate=Gate.parse(max_kl, max_ppl_change),
        spill=spill,
        restart=restart,
        allow_few_samples=allow_few_samples,
        predict=predict,
        force=force,
    )
    _run(options, as_json)


def _run(options: "Options", as_json: bool, hint: str = "") -> None:
    """Runs a calibration, and says what it wrote, or what an interrupted run kept.

    The first of several processes prints `hint` once the options are known to be valid.
    """
    from calibrate.options import validate

    validate(options)  # before torch is loaded
    console = console_for(as_json)
    if hint and console is not None and os.environ.get("RANK", "0") == "0":
        console.print(hint, highlight=False, markup=False)
    with held_back():
        from calibrate.decoder.arithmetic import fit_threads
        from calibrate.journal.journal import recorded_threads
        from calibrate.pipeline import run

    fit_threads(None if options.restart else recorded_threads(options.progress))
    try:
        calibration = run(options, console=console)
    except (KeyboardInterrupt, GpuError):
        if options.progress.exists():
            print(f"kept {options.progress}: the same command continues there", file=sys.stderr)
        raise
    if calibration is not None:  # only the first of several processes writes
        _wrote(options.out, calibration.manifest, options.model, as_json)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads can outlive their group, and abort the interpreter while it shuts down:
        # torchrun would treat that as a failure, and stop the other processes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def rescale(
    calibration: Source,
    out: Out,
    recipe: Annotated[
        str | None,
        typer.Option(help=f"{RECIPES}, or a YAML file (default: the calibration's own)."),
    ] = None,
    kv_cache: KvOption = None,
    exclude: Exclude = None,
    histograms: Annotated[
        Path | None,
        typer.Option(
            "--histograms",
            exists=True,
            file_okay=False,
            help="Live activations, counted by servers, instead of the samples'.",
        ),
    ] = None,
    te_state: Annotated[
        Path | None,
        typer.Option(
            "--te-state",
            exists=True,
            dir_okay=False,
            help="Scales of activations from Transformer Engine's amax history: a .pt file.",
        ),
    ] = None,
    model: ModelOption = None,
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    predict: Predict = True,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Derive new scales from a calibration, without its samples.

    They may be for another recipe, for live traffic, or from the amax history of a training.
    --max-kl and --max-ppl-change limit what quantization costs on the golden prompts.
    """
    if all(given is None for given in (recipe, kv_cache, exclude, histograms, te_state)):
        raise ConfigError(
            "nothing to change: give --recipe, --kv-cache, --exclude, --histograms or --te-state"
        )
    from calibrate.options import validate_rescale
    from calibrate.quality.gate import Gate

    gate = Gate.parse(max_kl, max_ppl_change)
    base = recipe or Manifest.load(calibration, "calibration", verify=False).recipe
    chosen = chosen_recipe(base, kv_cache, exclude)
    validate_rescale(  # before torch is loaded
        calibration, out, recipe=chosen, model=model, gate=gate, force=force
    )
    with held_back():
        from calibrate.decoder.arithmetic import fit_threads
        from calibrate.rescale import rescale as derive

    fit_threads()
    derived = derive(
        calibration,
        out,
        recipe=chosen,
        model=model,
        gate=gate,
        histograms=histograms,
        te_state=te_state,
        predict=predict,
        force=force,
        console=console_for(as_json),
    )
    _wrote(out, derived.manifest, model, as_json)


def _wrote(out: Path, manifest: Manifest, model: Path | None, as_json: bool) -> None:
    """Says what was written, and which exports it allows."""
    exports = _possible_exports(out, model)
    wrote(out, manifest, as_json, exports=exports)
    if as_json:
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print("it can be exported:")
    for arguments, reason in exports.items():
        if reason is None:
            command, _, options = arguments.partition(" ")
            console.print(f"  octet export {command} {out} {options}".rstrip() + " --out DIR")
    refused = {arguments: reason for arguments, reason in exports.items() if reason is not None}
    if refused:
        console.print("it cannot:")
    for arguments, reason in refused.items():
        console.print(f"  octet export {arguments}: {reason}")


def chosen_for(
    devices: str | None, kv_cache: KvCacheDtype | None, *, small: bool, console: Console | None
) -> "Choice":
    """Chooses a recipe and a cache for the GPUs in `devices`, and prints the reasons as a table."""
    from octet.hardware.choice import choose

    choice = choose(_devices(devices), small=small, cache=kv_cache)
    if console is not None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("", *choice.devices, "", ""):
            table.add_column(title, overflow="fold")
        chosen = (choice.recipe.name, choice.recipe.kv_cache)
        for candidate in (*choice.weights, *choice.caches):
            mark = "chosen" if candidate.name in chosen else ""
            name = candidate.name if candidate in choice.weights else f"{candidate.name} cache"
            table.add_row(name, *candidate.cells, candidate.about, mark)
        console.print(Stacked(table))
        console.print(choice.reason, highlight=False, markup=False)
    return choice


def _measured_for(names: str | None, recipe: Recipe, *, budget: bool) -> tuple[str, ...]:
    """Returns the schemes that all GPUs of --for run weight-only.

    With a budget, these include the schemes that it may promote layers to.
    """
    from octet.hardware.support import weight_only

    if names is None:
        return ()
    pairs = list(recipe.pairs)
    if budget:
        from calibrate.quality.precision_levels import levels_above

        pairs += [x.pair for own in recipe.pairs for x in levels_above(own) if x.pair is not None]
    return weight_only(pairs, _devices(names))


def _more_exact_here(recipe: Recipe) -> str:
    """Returns a hint if vLLM rounds less on this machine's GPUs than the limits assume; or ""."""
    from octet.hardware.machine import local_devices
    from octet.hardware.support import weight_only

    found = [device for device in local_devices() if device.vendor != "cpu"]
    exact = " and ".join(weight_only(recipe.pairs, found))
    return exact and (
        f"measuring with rounded activations; vLLM runs {exact} weight-only on {found[0].name}:"
        f" --for '{found[0].name}' measures that"
    )


def _trained_for(names: str | None, calibration: Manifest) -> tuple[str, ...]:
    """Returns the schemes that the GPUs of --for run weight-only.

    Without --for, those of the calibration's --for, or else of this machine. Raises ConfigError if
    these GPUs do not compute alike.
    """
    from octet.hardware.support import weight_only

    recipe = calibration.recipe
    if names is None and calibration.runs_weight_only:
        return calibration.runs_weight_only
    found = _devices(names)
    if names is None:  # a machine without a GPU trains for others
        found = tuple(device for device in found if device.vendor != "cpu")
    exact = weight_only(recipe.pairs, found)
    for device in found:
        more = [x for x in weight_only(recipe.pairs, [device]) if x not in exact]
        if more:
            other = next(x for x in found if more[0] not in weight_only(recipe.pairs, [x]))
            raise ConfigError(
                f"--for: {device.name} runs {more[0]} weight-only, and {other.name} does not: name"
                " GPUs that compute alike"
            )
    return exact


def _devices(names: str | None) -> "tuple[Device, ...]":
    """Returns the devices of --for, and without it those of this machine."""
    from octet.hardware.devices import find_device
    from octet.hardware.machine import local_devices

    if names is None:
        return local_devices()
    found = tuple(dict.fromkeys(find_device(x.strip()) for x in names.split(",") if x.strip()))
    if not found:
        raise ConfigError("--for names no GPU: give names such as h100,l40s")
    return found


def chosen_recipe(
    base: Recipe | str, kv_cache: KvCacheDtype | None, exclude: list[str] | None
) -> Recipe:
    """The recipe with these changes, and a name of its own if they change anything."""
    recipe = Recipe.load(base) if isinstance(base, str) else base
    changes: dict[str, object] = {}
    called = recipe.name
    if kv_cache is not None and kv_cache != recipe.kv_cache:
        changes["kv_cache"] = kv_cache
        called += f"+kv-{kv_cache}"
    added = [pattern for pattern in dict.fromkeys(exclude or ()) if pattern not in recipe.exclude]
    if added:
        changes["exclude"] = (*recipe.exclude, *added)
        called += "+exclude"
    return recipe.model_copy(update={**changes, "name": called})


def _possible_exports(calibration: Path, model: Path | None = None) -> dict[str, str | None]:
    """Returns the arguments of each `octet export`, and why it would be refused; None if it works.

    `model` overrides the path of the checkpoint. Reads headers and scales alone; the ONNX exports
    are left out where onnx is not installed.
    """
    from export.checkpoint.compressed_tensors import CompressedTensors
    from export.checkpoint.fp8 import Fp8
    from export.checkpoint.fused import check_fused
    from export.checkpoint.modelopt import ModelOpt
    from export.source import Source as Opened

    source = Opened.open(calibration, model, shards=False)
    checks: dict[str, tuple[Callable[[Opened], None], ...]] = {
        "checkpoint": (CompressedTensors().check, check_fused),
        "checkpoint --format modelopt": (ModelOpt().check, check_fused),
        "checkpoint --format fp8": (Fp8().check, check_fused),
    }
    with suppress(ModuleNotFoundError):
        from export.onnx.decoder import check_architecture
        from export.onnx.linear import check_groups
        from export.onnx.tensorrt_decoder import check_recipe

        graph = (lambda source: check_architecture(source.spec), check_groups)
        checks |= {"onnx": graph, "onnx --for tensorrt": (*graph, check_recipe)}
    return {arguments: _reason(source, found) for arguments, found in checks.items()}


def _reason(source: "Opened", checks: Sequence[Callable[["Opened"], None]]) -> str | None:
    try:
        for check in checks:
            check(source)
    except OctetError as error:
        return str(error)
    return None
