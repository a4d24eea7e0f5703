"""The options of a calibration, and the checks that need no library: the first to fail, at once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calibrate.quality.gate import Gate
from calibrate.quality.refused import check_refused, refused_directory
from calibrate.samples.sample import Fields
from calibrate.samples.source import Sampling
from calibrate.samples.stream import Stream, open_stream
from calibrate.samples.tokens import check_tokenizer_files
from octet.artifacts.manifest import Manifest, check_destination
from octet.errors import ArtifactError, ConfigError, UnsupportedError
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.model.gpt_oss import refuse_gpt_oss
from octet.recipe import Recipe

__all__ = [
    "Options",
    "ReplayOptions",
    "Trainable",
    "Training",
    "source_of",
    "validate",
    "validate_replay",
    "validate_rescale",
]

Trainable = Literal["weights", "norms", "scales"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The options of `octet recover`: what to train, from which calibration, and for how long."""

    calibration: Path
    train: tuple[Trainable, ...] = ("weights", "norms")
    epochs: int = 6  # passes over the samples
    learning_rate: float | None = None  # of Adam, at its highest; default: `rate`

    @property
    def rate(self) -> float:
        """The learning rate; of weight scales, relative to the scale."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 5e-3 if "scales" in self.train else 1.5e-5

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, apart from the calibration, as plain data."""
        return {
            "train": list(self.train),
            "epochs": self.epochs,
            "learning_rate": self.rate,
        }

    @property
    def key(self) -> str:
        """Identifies the calibration by its content, and the settings."""
        manifest = Manifest.load(self.calibration, "calibration", verify=False)
        return json.dumps([manifest.identity, self.settings])


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The options of a calibration: what to calibrate, on which samples, and how."""

    model: Path  # directory of a checkpoint
    out: Path
    recipe: Recipe
    chosen: Mapping[str, Any] | None = None  # why `recipe` was chosen, if nobody named it
    # Schemes whose linears get their inputs unrounded in all measurements and in a training, as
    # `octet.hardware.support.pattern_of` names them: the GPUs that will serve run them weight-only.
    weight_only: tuple[str, ...] = ()
    name: str | None = None  # of the model when served; default: its directory's name
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the forward pass
    device: Literal["auto", "cpu", "cuda"] = "auto"
    algorithm: Literal["smoothquant", "awq", "gptq", "auto", "recover"] | None = None
    training: Training | None = None  # of "recover"
    budget: Limit | None = None  # layers move to better formats until it is met
    gate: Gate | None = None  # fails a recipe that costs more
    sensitivity: bool = False  # measure each layer's cost
    spill: Path | None = None  # for activations that memory cannot hold
    restart: bool = False  # discard the work of an interrupted run
    predict: bool = True  # simulate each serving path on the golden prompts
    force: bool = False  # replace an artifact in `out`

    @property
    def minimum(self) -> int:
        """Returns the least number of samples: 1 if no scale or format depends on them."""
        decide = self.recipe.takes_from_samples or self.algorithm is not None
        return super().minimum if decide or self.budget is not None else 1

    @property
    def measures(self) -> bool:
        """Decides whether the quantized model runs on held-out samples, to measure its cost."""
        return self.sensitivity or self.budget is not None or self.gate is not None

    @property
    def chooses(self) -> bool:
        """Decides whether held-out samples choose formats or an algorithm."""
        return self.budget is not None or self.algorithm == "auto"

    @property
    def progress(self) -> Path:
        """Directory that keeps finished work until `out` is written."""
        return self.out.absolute().with_name(f"{self.out.name}.progress")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The options of `octet replay`: a calibration, a stream, and the rule of delayed scaling."""

    calibration: Path
    samples: Path
    history: int = 1024  # steps
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0  # powers of two
    model: Path | None = None  # in place of the path that the calibration recorded
    text_field: str = "text"
    messages_field: str = "messages"
    max_length: int = 512  # tokens of a sample, at most
    batch_size: int = 8  # samples of a step
    device: Literal["auto", "cpu", "cuda"] = "auto"
    divergence: bool = False  # measure that of each rule, with the whole model in memory


def validate(options: Options) -> Checkpoint:
    """Opens the checkpoint; raises a subclass of OctetError for an option that cannot work.

    Imports neither torch nor transformers. Reads headers and configurations, but no tensor.
    """
    inputs = [options.model, options.samples]
    if options.training is not None:
        inputs.append(options.training.calibration)
    check_destination(options.out, force=options.force, inputs=inputs, kind="calibration")
    checkpoint = Checkpoint.open(options.model)
    spec, names = checkpoint.spec, checkpoint.spec.linear_names
    refuse_gpt_oss(spec, options.model)
    options.recipe.check_patterns(names)
    options.recipe.check_quantizes(names)
    if options.gate is not None:
        options.gate.check_spec(spec, options.model)
        check_refused(refused_directory(options.out))
    if spec.generic and (options.sensitivity or options.budget is not None):
        raise UnsupportedError(
            f"{options.model}: --sensitivity and --budget need an architecture that Octet knows,"
            f" which {spec.architecture} is not; leave them out"
        )
    if options.training is not None and (spec.generic or spec.sparse_layers):
        what = "experts" if spec.sparse_layers else f"the architecture {spec.architecture}"
        raise UnsupportedError(
            f"{options.model}: recover does not train models with {what}; calibrate with"
            " --algorithm gptq, or with --budget"
        )
    if options.training is not None and "scales" in options.training.train:
        _check_scales(options.recipe, names)
    if options.budget is not None and options.algorithm == "gptq":
        raise ConfigError(
            "gptq moves weights onto the scales of one recipe, which --budget would change: give"
            " one of the two, or use smoothquant"
        )
    check_tokenizer_files(checkpoint)
    options.check()
    return checkpoint


def _check_scales(recipe: Recipe, linears: Sequence[str]) -> None:
    """Raises ConfigError if weight scales are powers of two, which gradients cannot train."""
    for linear in linears:
        schemes = recipe.scheme_of(linear)
        if schemes is not None and schemes[0].scale_format == "e8m0":
            raise ConfigError(
                f"--train scales: recipe {recipe.name} stores the scales of {linear} as powers of"
                " two, which cannot move in small steps; give --train weights"
            )


def validate_rescale(
    calibration: Path,
    out: Path,
    *,
    recipe: Recipe,
    model: Path | None,
    gate: Gate | None,
    force: bool,
) -> Checkpoint:
    """Opens the checkpoint that `calibration` is of, as `validate` does; reads no tensor.

    `model` overrides the path that the calibration recorded.
    """
    inputs = [calibration, *([model] if model else [])]
    check_destination(out, force=force, inputs=inputs, kind="calibration")
    manifest = Manifest.load(calibration, "calibration", verify=False)
    checkpoint = Checkpoint.open(source_of(calibration, manifest, model))
    recipe.check_patterns(checkpoint.spec.linear_names)
    if gate is not None:
        gate.check_spec(checkpoint.spec, calibration)
        check_refused(refused_directory(out))
    return checkpoint


def validate_replay(options: ReplayOptions) -> tuple[Checkpoint, Stream]:
    """Opens the checkpoint that the calibration is of, and reads the stream once, line by line.

    Raises ConfigError for a recipe whose activations and cache have no static scale.
    """
    manifest = Manifest.load(options.calibration, "calibration", verify=False)
    if not manifest.recipe.has_static_scales:
        raise ConfigError(
            f"{options.calibration}: recipe {manifest.recipe.name} scales activations at run time,"
            " per token or group, which a histogram cannot judge. Derive static scales:"
            f" octet rescale {options.calibration} --recipe fp8-static -o static"
        )
    checkpoint = Checkpoint.open(source_of(options.calibration, manifest, options.model))
    check_tokenizer_files(checkpoint)
    if options.divergence and checkpoint.spec.generic:
        raise UnsupportedError(
            f"{checkpoint.path}: --divergence needs an architecture that Octet knows, which"
            f" {checkpoint.spec.architecture} is not; leave it out"
        )
    return checkpoint, open_stream(
        options.samples, Fields(options.text_field, options.messages_field)
    )


def source_of(calibration: Path, manifest: Manifest, model: Path | None) -> Path:
    """Returns `model`, or else the checkpoint's directory that the calibration recorded.

    Raises ArtifactError if that is no longer there.
    """
    where = model or Path(str(manifest.details.get("source", "(not recorded)")))
    if model is None and not where.is_dir():
        raise ArtifactError(
            f"{calibration}: its checkpoint {where} is not there; say where with --model"
        )
    return where
