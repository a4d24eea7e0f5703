"""An `Exam` made of the golden records of an export or a calibration."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from octet.artifacts.serving_path import Power, bound_of, power_text, prompts_for
from octet.errors import ArtifactError
from octet.hardware.devices import find_device
from octet.proof.declared import Declared, declared_paths
from octet.proof.judge import judge
from octet.proof.reference import Proofs, load_proofs
from octet.proof.responses import Response
from octet.proof.verdict import LeftOut, Verdict
from serve.backends.base import Backend
from serve.config.proof import Proof
from serve.engine.tokenizer import Tokenizer
from serve.proof.client_view import Defaults, client_view
from serve.proof.engine_report import Inspection, engine_report, structural_findings
from serve.proof.plan import Slices, fits, order, parts_of, simulated
from serve.proof.probe import ClientView, Probed, probe

__all__ = ["GoldenExam"]

# One thread for the whole process: a judgement takes 0.2 s of one core in many small steps of NumPy
# and Python, and several at once would starve the event loop.
_JUDGES = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")


class GoldenExam:
    """Judges backends by the golden records of an export or a calibration. An `Exam`."""

    def __init__(
        self,
        proofs: Proofs,
        declared: Declared,
        bound: float,
        directory: Path,
        power: float | None = None,
    ) -> None:
        """`directory` is the artifact's. `bound`, in nats, applies if `declared` has no simulation.

        Then only the mean is judged. Raises ArtifactError if the prompts do not suffice for
        `power`, a relative change of perplexity.
        """
        self.proofs = proofs
        self.declared = declared
        self._directory = directory
        self.identity = proofs.identity
        self.label = f"{len(proofs.golden.records)} golden records: {declared.label}"
        if not declared.paths:
            self.label += (
                f"; it was not simulated, so only the mean divergence is tested, with a bound of"
                f" {bound:g} nats, and no cause is named"
            )
        elif self.power:
            self.label += f"; {self.power}"
        self.least = 0 if power is None else self._needed(power)
        self.key = (proofs.identity, declared, bound, power)
        self._bound = bound
        self._tokenizer = _tokenizer(directory)
        self._defaults: Defaults | None = None  # read when needed

    @property
    def power(self) -> str:
        """Describes the smallest faults that are refused; empty if that is not known."""
        return power_text(self._power) if self._power else ""

    @property
    def _power(self) -> tuple[Power, ...]:
        proofs = self.proofs
        own = (proofs.kv_cache, "quantized") == (self.declared.kv_cache, self.declared.weights)
        return proofs.power if own else ()

    def _needed(self, power: float) -> int:
        """Returns the number of answers that `power` needs."""
        needed, there = prompts_for(self._power, power), len(self.proofs.golden.records)
        if needed is not None and needed <= there:
            return needed
        if needed is None:
            why = "the artifact does not state its power for this configuration"
        else:
            why = f"about {needed:,} prompts are needed, and it has {there}; {self.power}"
        raise ArtifactError(
            f"{self._directory}: proof.power of {100 * power:.2g} % cannot be reached: {why}; raise"
            " it, or leave it out"
        )

    @classmethod
    def load(cls, directory: Path, config: Proof, *, embedded: bool = False) -> Self:
        """Loads the golden records in `directory`; `embedded`: for the engine in this process.

        Raises ArtifactError for files that are missing, damaged, or of another release.
        """
        proofs = load_proofs(directory, config.key)
        weights = "original" if proofs.weights == "original" else config.weights
        engine = config.engine
        if engine is None and embedded:
            engine = "tensorrt" if proofs.manifest.kind == "engine" else "onnxruntime"
        declared = declared_paths(
            proofs.scenarios,
            proofs.recipe,
            config.kv_cache or proofs.kv_cache,
            weights=weights,
            engine=engine,
            device=None if config.device is None else find_device(config.device),
        )
        if config.activations is not None:
            declared = declared.rounding(config.activations)
        bound, _ = bound_of(proofs.recipe, quantized=weights == "quantized")
        return cls(proofs, declared, bound, directory, config.power)

    def parts(self, seed: int, context: int | None) -> list[tuple[int, ...]]:
        first = simulated(self.proofs.scenarios)
        return list(parts_of(order(self.proofs.golden, seed, context=context, first=first)))

    def left_out(self, context: int | None, failed: Collection[int] = ()) -> LeftOut | None:
        lengths = [len(record.prompt_token_ids) for record in self.proofs.golden.records]
        out = [
            length
            for record, length in enumerate(lengths)
            if record in failed or not fits(length, context)
        ]
        return LeftOut(len(out), len(lengths), min(out)) if out else None

    def slicing(self, seed: int, context: int | None) -> Callable[[int], tuple[int, ...]]:
        return Slices(self.proofs.golden, seed, context=context).next

    async def inspect(self, backend: Backend) -> Inspection:
        report = await engine_report(backend)
        if report is None:
            return Inspection()
        findings = await asyncio.to_thread(
            structural_findings, report, self.proofs, self.declared, self._directory
        )
        return Inspection(findings, report.settings)

    async def probe(
        self, backend: Backend, records: Sequence[int], *, concurrency: int, timeout_s: float
    ) -> Probed:
        return await probe(
            backend,
            self.proofs.golden,
            records,
            concurrency=concurrency,
            timeout_s=timeout_s,
            tokenizer=self._tokenizer,
            vocab_size=self.proofs.manifest.model.spec.vocab_size,
        )

    async def client_view(self, backend: Backend, *, timeout_s: float) -> ClientView:
        if self._defaults is None:
            self._defaults = await asyncio.to_thread(
                Defaults.load, self._directory, self.proofs.manifest
            )
        return await client_view(backend, self.proofs.golden, self._defaults, timeout_s=timeout_s)

    async def judge(self, responses: Sequence[Response], checks: int) -> Verdict:
        """Judges in a thread beside the event loop, one judgement at a time."""
        proofs = self.proofs
        judgement = partial(
            judge,
            proofs.golden,
            proofs.scenarios,
            self.declared,
            responses,
            looks=checks,
            bound=self._bound,
        )
        return await asyncio.get_running_loop().run_in_executor(_JUDGES, judgement)


def _tokenizer(directory: Path) -> Tokenizer | None:
    """Loads the tokenizer if there is one; servers that name tokens by id need none."""
    return Tokenizer.load(directory) if (directory / "tokenizer.json").exists() else None
