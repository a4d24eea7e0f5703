"""`octet serve`: serves an artifact, a model, or the backends of a configuration."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ConfigError
from octet.recipe import PRESETS, Recipe
from octet.storage.files import sha256_file
from octet_cli.calibrate import chosen_recipe
from octet_cli.options import RECIPES

if TYPE_CHECKING:
    from serve.settings import Options

__all__ = ["serve"]


def serve(
    target: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint, an ONNX export or an engine; or a model to quantize."),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Behind --: options of `vllm serve`, which override Octet's."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML with pools of backends.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port (default: 8000).")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(help="Python of the environment that has vLLM (default: `vllm` on the PATH)."),
    ] = None,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback",
            help="If vLLM fails: try weight-only, then the original, then an ONNX export.",
        ),
    ] = False,
    way: Annotated[
        Literal["native", "weight-only", "original", "onnx"] | None,
        typer.Option(help="How to serve a checkpoint; with --fallback, what to try first."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory for kernel caches (default: where vLLM keeps them, in $HOME)."
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help=f"To quantize a model: {RECIPES}, or a YAML file.")
    ] = "fp8",
    samples: Annotated[
        Path | None, typer.Option(help="To quantize a model: the samples; see octet calibrate.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Where to keep the exports of a model (default: MODEL.RECIPE)."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, max=64, help="Processes that serve a --config, on one port."),
    ] = 1,
    proof: Annotated[
        bool,
        typer.Option(
            "--proof/--no-proof",
            help="Serve a backend only once its answers match its artifact.",
        ),
    ] = True,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the configuration, print a summary, and exit."),
    ] = False,
) -> None:
    """Serve OpenAI's API in front of vLLM, Triton, other OpenAI servers or the embedded engine.

    For a checkpoint, starts vLLM with the flags that it and the machine need, proves it, and starts
    it again if it ends. A model that is not quantized is calibrated and exported first; without a
    GPU, or without vLLM, the embedded engine serves it.
    """
    if (target is None) == (config is None):
        raise ConfigError("give either an export to serve, or --config FILE")
    if check and config is None:
        raise ConfigError("--check is for a configuration: give --config FILE")
    if workers > 1 and config is None:
        raise ConfigError("--workers is for a configuration: give --config FILE")
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(f"{arguments[0]}: give one export; options of vLLM go behind --")
    if check and config is not None:
        _check(config, proof=proof, workers=workers)
        return
    from serve.settings import Options, settings_of
    from serve.vllm.command import cache_variables

    options = Options(
        python=python,
        options=tuple(arguments or ()),
        environment={} if cache is None else cache_variables(cache.resolve()),
        fallback=fallback,
        way=way,
    )
    if target is not None and _is_model(target):
        target = _quantized(target, recipe, samples, out, options, (host, port))
    settings = settings_of(target, config, options)
    if workers > 1 and config is not None:
        from serve.workers import run_workers

        run_workers(settings, workers, config=config, host=host, port=port, proof=proof)
        return
    from serve.run import run  # loads the web server, after the mistakes in the settings

    run(settings, config=config, host=host, port=port, proof=proof)


def _is_model(target: Path) -> bool:
    return (target / "config.json").is_file() and not (target / MANIFEST_FILE).exists()


def _quantized(
    model: Path,
    recipe: str,
    samples: Path | None,
    out: Path | None,
    options: "Options",
    address: tuple[str | None, int | None],
) -> Path:
    """Calibrates and exports a model as far as `out` lacks it; returns the directory of exports.

    The steps run as commands of their own, so that this process never loads torch.
    """
    from serve.settings import cache_for, takes_vllm

    chosen = Recipe.load(recipe)
    kept = out or model.absolute().with_name(f"{model.absolute().name}.{chosen.name}")
    if (kept / MANIFEST_FILE).exists():
        raise ConfigError(f"{kept}: is an artifact; name another directory with --out, or serve it")
    with_vllm = takes_vllm(options)  # a missing vLLM is an error before minutes of calibration
    calibration = kept / "calibration"
    if (calibration / MANIFEST_FILE).exists():
        made = Manifest.load(calibration, "calibration", verify=False)
        source = Path(str(made.details.get("source")))
        names = {chosen.name}
        if recipe in PRESETS:  # with the cache that it may have been given, as below
            names.add(chosen_recipe(recipe, "e4m3", None).name)
        if made.recipe.name not in names or source.resolve() != model.resolve():
            raise ConfigError(
                f"{kept}: holds {source} as {made.recipe.name}; name another directory with --out"
            )
        _require_unchanged(model, samples, kept, made)
    elif samples is None:
        from octet.model.checkpoint import Checkpoint
        from octet.model.gpt_oss import refuse_gpt_oss

        refuse_gpt_oss(Checkpoint.open(model).spec, model)
        raise ConfigError(
            f"{model}: is not quantized; give --samples FILE to calibrate and prove it, or serve an"
            " export of it"
        )
    else:
        _require_free(*address)
        words = ["--samples", samples, "--recipe", recipe]
        if with_vllm and recipe in PRESETS:  # a file of the user's says which cache it wants
            kv_cache = cache_for(chosen, options)
            words += [] if kv_cache == chosen.kv_cache else ["--kv", kv_cache]
        _octet("calibrate", model, *words, "--out", calibration)
    wanted = {"checkpoint": with_vllm, "onnx": options.fallback or not with_vllm}
    for kind, needed in wanted.items():
        if needed and not (kept / kind / MANIFEST_FILE).exists():
            _octet("export", kind, calibration, "--out", kept / kind)
    return kept


def _require_unchanged(model: Path, samples: Path | None, kept: Path, made: Manifest) -> None:
    """Raises ConfigError if `model` is another than it was when `kept` was made; warns for samples.

    Hashes what was written or replaced since, which is nothing as a rule: weights take long to
    read. Files that are gone do not matter, as the export is served.
    """
    began = (kept / "calibration" / MANIFEST_FILE).stat().st_mtime
    remedy = f"name another directory with --out, or remove {kept} to calibrate again"
    for name, known in (made.model.files | made.model.tokenizer).items():
        path = model / name
        if not path.exists():
            continue
        found = path.stat()  # a copy may keep the time of the original, and not of its inode
        if max(found.st_mtime, found.st_ctime) > began and sha256_file(path) != known:
            raise ConfigError(f"{path}: has changed since {kept} was made from it; {remedy}")
    if samples is None or not samples.is_file() or made.samples is None:
        return
    if sha256_file(samples) != made.samples.sha256:
        print(
            f"warning: {kept} was made with other samples than {samples}; {remedy}", file=sys.stderr
        )


def _require_free(host: str | None, port: int | None) -> None:
    """Raises ConfigError if the address is in use, before a calibration of minutes."""
    from serve.config.gateway import Listen
    from serve.run import bind

    bind(host or Listen().host, Listen().port if port is None else port).close()


def _octet(*words: object) -> None:
    """Runs a command of octet; ends with its exit code if it fails."""
    code = subprocess.run(
        [sys.executable, "-m", "octet", *map(str, words)], stdin=subprocess.DEVNULL, check=False
    ).returncode
    if code:
        raise typer.Exit(code)


def _check(config: Path, *, proof: bool, workers: int) -> None:
    """Prints a summary of the configuration, or all its problems and exits 2."""
    from serve.check import check
    from serve.config.load import Refused

    try:
        print("\n".join(check(config, proof=proof, workers=workers)))
    except Refused as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        raise typer.Exit(2) from None
