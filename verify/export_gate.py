"""Implements `--max-kl`, `--max-ppl-change` and `--gate` of exports.

It joins several stages, because no stage may import another.

| export                             | what is measured                                 |
|------------------------------------|--------------------------------------------------|
| checkpoint                         | a simulation with the weights in its files       |
| ONNX for ONNX Runtime              | the graph itself, if ONNX Runtime is installed   |
| engine                             | the plan itself, if it was proven                |
| other, or cannot run               | a simulation with the calibration's own scales   |
| Triton entry                       | as for the model that it holds                   |

All measurements are on the golden prompts, at every token: distributions for --max-kl, likelihoods
for --max-ppl-change. A graph or a plan prefills the prompts, and decodes their last tokens; the
worse result counts (`calibrate.quality.runner_cost`). In every case the upper end of a one-sided
95 % interval, clustered by prompt, is compared with the limit (`calibrate.quality.gate`).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError, GateError, UnsupportedError
from octet.interrupts import held_back
from octet.limit import DEFAULT_KL, parse_limits
from octet.recipe import KvCacheDtype, TensorScheme

if TYPE_CHECKING:
    from calibrate.quality.gate import Gate, Outcome
    from calibrate.quality.golden_cost import PromptCost
    from export.source import Source
    from serve.runner.protocol import Runner

__all__ = ["DefaultGate", "ExportGate", "export_gate"]


@dataclass(frozen=True)
class ExportGate:
    """Accepts or refuses an export from `calibration` (a `Judge` of `export.accuracy_gate`)."""

    gate: "Gate"
    calibration: Path
    model: Path | None  # the checkpoint's directory, if it has moved
    console: Console | None
    evidence: Callable[[Path], Path]  # `out` -> where to keep the report of a failure

    def __call__(self, directory: Path, manifest: Manifest, out: Path) -> dict[str, Any]:
        """Returns details for the manifest; keeps a report and raises GateError on a failure."""
        outcome = self._outcome(directory, manifest)
        if outcome.met:
            return {"gate": outcome.details()}
        evidence = self.evidence(out)
        self._keep(directory, manifest, outcome, evidence)
        raise outcome.error(out, evidence, again="`octet rescale`", budget="calibrate again")

    def written(self, out: Path) -> None:
        """Removes the report of an earlier failure, now that `out` has been written."""
        from calibrate.quality.refused import drop_refused

        drop_refused(self.evidence(out))

    def _outcome(self, directory: Path, manifest: Manifest) -> "Outcome":
        import torch

        from calibrate.decoder.arithmetic import fit_threads
        from calibrate.quality.golden_cost import judge_prompts
        from calibrate.quality.runner_cost import judge_answers
        from export.source import Source

        fit_threads()
        source = Source.open(self.calibration, self.model, shards=False)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        cost, how = self._cost(source, directory, manifest, device)
        runner = _runner(directory, manifest)
        if runner is None:
            return judge_prompts(self.gate, cost, how, self.console)
        from serve.engine.prompts import PromptSteps

        golden, longest = source.calibration.golden, runner.spec.max_positions
        prompts = [len(record.prompt_token_ids) for record in golden.records]
        outcome = judge_answers(
            self.gate,
            source.checkpoint,
            golden,
            PromptSteps(runner, len(prompts), max(prompts)),
            "the plan itself" if manifest.kind == "engine" else "the graph itself",
            longest=longest,
            device=device,
            console=self.console,
        )
        return outcome if outcome.met else outcome.blaming(cost.parts())

    def _cost(
        self, source: "Source", directory: Path, manifest: Manifest, device: str
    ) -> "tuple[PromptCost, str]":
        """Returns the simulation that measures the export, and a description of it."""
        from calibrate.quality.golden_cost import PromptCost

        golden, recipe = source.calibration.golden, source.recipe
        if manifest.kind != "checkpoint":
            cost = PromptCost(
                source.checkpoint,
                recipe,
                source.calibration.scales,
                golden,
                kv_cache=_cache(manifest),
                quantized=bool(manifest.details.get("quantized", True)),
                device=device,
            )
            return cost, "simulated in float32 with the calibration's scales"
        from verify.next_tokens import written_scales, written_weight
        from verify.reader.checkpoint import Written

        written = Written.open(directory)
        exact = source.calibration.manifest.runs_weight_only
        cost = PromptCost(
            source.checkpoint,
            recipe,
            written_scales(written, source.checkpoint.spec),
            golden,
            kv_cache=_cache(manifest),
            weights=lambda name: written_weight(written, name),
            weight_only=exact,
            device=device,
        )
        how = " weight-only" if exact else ""
        return cost, f"simulated{how} in float32 with the weights that were written"

    def _keep(self, directory: Path, manifest: Manifest, outcome: "Outcome", path: Path) -> None:
        from calibrate.quality.refused import EVIDENCE_FILE, keep_refused
        from verify.artifact import verify

        found = verify(directory, model=self.model, calibration=self.calibration).as_json()
        recorded = {key: found[key] for key in ("problems", "layers", "tensors")}
        kept = ("kv_cache", "format", "target", "expected_divergence", "proof")
        more = {key: manifest.details[key] for key in kept if key in manifest.details}
        with keep_refused(path) as refused:
            recipe = manifest.recipe.model_dump(mode="json")
            text = outcome.evidence(kind=manifest.kind, recipe=recipe, **more)
            (refused / EVIDENCE_FILE).write_text(text, "utf-8")
            (refused / "verification.json").write_text(
                json.dumps(recorded, indent=1) + "\n", "utf-8"
            )
            GoldenSet.load(directory).save(refused)


@dataclass(frozen=True)
class DefaultGate:
    """The judge of an export without limits of its own: what calibration predicts of its cost.

    It takes no time. The limit is `DEFAULT_KL` of the coarsest format in the recipe. It applies to
    the predicted mean KL of the serving path with the largest one. The upper end of the predicted
    range does not count: it is for a few prompts, and far above the mean if samples are short. With
    `off` it refuses nothing, and the manifest records that.
    """

    off: bool = False

    def __call__(self, directory: Path, manifest: Manifest, out: Path) -> dict[str, Any]:
        """Returns details for the manifest; raises GateError for a prediction over the limit."""
        expected = manifest.details.get("expected_divergence")
        if self.off:
            return {"gate": [{"default": True, "off": True, "text": "accuracy gate: off"}]}
        if not expected:
            return {}
        limit, name = max((DEFAULT_KL[scheme.kind], scheme.kind) for scheme in _schemes(manifest))
        path, mean = max(((label, x["mean"]) for label, x in expected.items()), key=lambda x: x[1])
        text = f"predicted KL of {mean:.2g} nats ({path}), of at most {limit:g} for {name}"
        if not mean <= limit:
            raise GateError(
                f"{out} is not written: its {text}; calibrate with --budget, take more bits, set a"
                " limit of your own with --max-kl, or write it all the same with --gate off"
            )
        judged = {"default": True, "metric": "kl", "limit": limit, "predicted": mean, "met": True}
        return {"gate": [judged | {"text": f"accuracy gate: {text}"}]}

    def written(self, out: Path) -> None:
        """Does nothing: a refusal leaves no report."""


def _schemes(manifest: Manifest) -> list[TensorScheme]:
    return [weights for weights, _ in manifest.recipe.pairs]


def export_gate(
    max_kl: str | None,
    max_ppl_change: str | None,
    calibration: Path,
    out: Path,
    *,
    model: Path | None,
    console: Console | None,
    entries: Sequence[Path] = (),
    off: bool = False,
) -> ExportGate | DefaultGate:
    """Returns the judge for these limits, or the default one; with `off`, one that accepts all.

    `entries` are those of a Triton repository that are to be written in place of `out`.

    Raises, before anything is exported, ConfigError for invalid limits and for too few golden
    prompts, UnsupportedError for an architecture that cannot be simulated, and ArtifactError if
    `calibration` is not a calibration.
    """
    limits = parse_limits(max_kl, max_ppl_change)
    if not limits:
        return DefaultGate(off)
    if off:
        raise ConfigError("--gate off leaves the gate out, and --max-kl or --max-ppl-change set it")
    manifest = Manifest.load(calibration, "calibration", verify=False)
    with held_back():
        from calibrate.quality.gate import Gate
        from calibrate.quality.golden_cost import check_prompts
        from calibrate.quality.refused import check_refused, refused_directory, refused_entry

    gate = Gate(limits)
    gate.check_spec(manifest.model.spec, calibration)
    check_prompts(gate, GoldenSet.load(calibration))
    evidence = refused_entry if entries else refused_directory
    for path in entries or (out,):
        check_refused(evidence(path))
    return ExportGate(gate, calibration, model, console, evidence)


def _runner(directory: Path, manifest: Manifest) -> "Runner | None":
    """Returns a runner for a graph or a plan; None for other kinds, or if it cannot run here."""
    if manifest.kind == "engine":
        runs = manifest.details.get("proof", {}).get("status") in ("proven", "weakly proven")
    else:
        runs = manifest.kind == "onnx" and manifest.details.get("target") == "onnxruntime"
    if not runs:
        return None
    try:
        from serve.engine.load import load_runner

        return load_runner(directory)
    except (ModuleNotFoundError, UnsupportedError):
        return None


def _cache(manifest: Manifest) -> KvCacheDtype:
    """Returns the cache dtype that the export is for; an engine's manifest has further details."""
    recorded = manifest.details.get("kv_cache", manifest.recipe.kv_cache)
    found: KvCacheDtype = recorded["dtype"] if isinstance(recorded, dict) else recorded
    return found
