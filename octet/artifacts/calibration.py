"""The artifact of the first stage: scales, histograms and golden records of one checkpoint.

manifest.json               Manifest: recipe, hashes of model, tokenizer and samples, versions
observations.json        the tensor that each histogram describes, and its consumer modules
histograms.safetensors   for each observed tensor, the bins that occur and their counts
mean_squares.safetensors float32 [K] of each channel of linears' inputs
scales.safetensors       float32, multipliers: real = stored * scale [* global scale]
golden.json              GoldenSet
weights.safetensors      the tensors that an algorithm such as SmoothQuant changed, if any
report.json, report.html, convergence.json, ...   for people; no code computes from them
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, TypeAdapter

from octet.artifacts.golden import GOLDEN_FILE, GoldenSet
from octet.artifacts.manifest import Manifest, write_artifact
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.numerics.counting import BINS
from octet.recipe import KvCacheDtype
from octet.storage.files import read_json
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = [
    "BINS",
    "WEIGHTS_FILE",
    "Calibration",
    "Content",
    "Observation",
    "StoredHistograms",
    "pack_histogram",
]

FILES = ("observations.json", "histograms.safetensors", "scales.safetensors", GOLDEN_FILE)
MEAN_SQUARES_FILE = "mean_squares.safetensors"
WEIGHTS_FILE = "weights.safetensors"  # tensors that an algorithm changed; most have none

# A file's text, a file to copy, or a function that writes it into a given directory.
Content: TypeAlias = str | Path | Callable[[Path], None]


class Observation(BaseModel):
    """The tensor that one histogram describes.

    `kind` is "input" (of linears), "key" or "query" (after RoPE) or "value". `code_dtype` is the
    16-bit type whose magnitude codes are the bins. `consumers` are module names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["input", "key", "value", "query"]
    consumers: tuple[str, ...]
    code_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    observed_dtype: str  # dtype of the activations; float32 was rounded to bfloat16 first


@dataclass(frozen=True)
class Calibration:
    """A calibration directory, opened and verified.

    Keys of `scales`, by the scheme that the recipe has for the linear:

    - `<linear>.weight_scale`: [], [N, 1], [⌈N/128⌉, ⌈K/128⌉] or [N, ⌈K/g⌉]; what the scheme stores
      in E8M0 or E4M3 is a value of that format;
    - `<linear>.weight_global_scale` []: two-level schemes; one for linears that share an input;
    - `<linear>.input_scale` []: static activations;
    - `<linear>.input_global_scale` []: dynamic activations in two levels;
    - `<layer>.self_attn.k_scale` and `.v_scale` []: of the recipe's cache;
    - `<layer>.self_attn.k_scale_e5m2` and so on []: of every cache; and `.q_scale_e4m3` where
      queries were observed, which an engine with an E4M3 cache may round too.

    Keys of `observations` and `histograms`: `<first consumer>.input`, `<layer>.self_attn.key`,
    `<layer>.self_attn.value` and, if they were observed, `<layer>.self_attn.query`.
    """

    path: Path
    manifest: Manifest
    observations: dict[str, Observation]
    scales: dict[str, npt.NDArray[np.float32]]

    @cached_property
    def histograms(self) -> Mapping[str, npt.NDArray[np.int64]]:
        """Counts of each magnitude code, int64[32768]; each is read from disk on access."""
        return StoredHistograms(TensorFile.open(self.path / "histograms.safetensors"), summed=True)

    @cached_property
    def chunks(self) -> Mapping[str, npt.NDArray[np.int64]]:
        """Counts as int64[chunks, 32768]: one chunk per span of samples; one if not kept apart.

        "counts" in `convergence.json` holds the number of samples after which each span ends.
        """
        return StoredHistograms(TensorFile.open(self.path / "histograms.safetensors"), summed=False)

    @cached_property
    def mean_squares(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Mean square of each channel of linears' inputs, by observation; {} if not observed."""
        if MEAN_SQUARES_FILE not in self.manifest.files:
            return {}
        file = TensorFile.open(self.path / MEAN_SQUARES_FILE)
        return {name: file.read(name).float32() for name in file.names}

    @property
    def weight_scales(self) -> dict[str, npt.NDArray[np.float32]]:
        """The scales and global scales of weights, by their names in `scales`."""
        suffixes = (".weight_scale", ".weight_global_scale")
        return {name: scale for name, scale in self.scales.items() if name.endswith(suffixes)}

    def cache_scale(self, attention: str, which: str, kv_cache: KvCacheDtype) -> float | None:
        """Returns the scale of queries ("q"), keys ("k") or values ("v") for a `kv_cache` cache.

        None if it is not known.
        """
        scale = self.scales.get(f"{attention}.{which}_scale_{kv_cache}")
        if scale is None and which != "q" and kv_cache == self.manifest.recipe.kv_cache:
            scale = self.scales.get(f"{attention}.{which}_scale")
        if scale is None and which != "q" and kv_cache == "float16":
            return 1.0
        if scale is not None and scale.ndim:
            raise ArtifactError(
                f"{self.path}: {attention}.{which}_scale has shape {list(scale.shape)}, not [];"
                " calibrate again"
            )
        return None if scale is None else float(scale)

    def applied_to(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the weights that were calibrated: changed, and folded."""
        if (self.path / WEIGHTS_FILE).is_file():
            checkpoint = checkpoint.with_changes(self.path / WEIGHTS_FILE)
        return checkpoint.with_folds(self.manifest.folds)

    @cached_property
    def golden(self) -> GoldenSet:
        return GoldenSet.load(self.path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Opens and verifies a calibration.

        Raises ArtifactError for anything that is not a whole, unaltered calibration.
        """
        manifest = Manifest.load(path, "calibration")
        for name in FILES:
            if name not in manifest.files:
                raise ArtifactError(f"{path}: its manifest lists no {name}; calibrate again")
        try:
            raw = read_json(path / "observations.json")
            observations = TypeAdapter(dict[str, Observation]).validate_python(raw)
        except (OSError, ValueError) as error:  # pydantic's errors are of several lines
            detail = str(error).splitlines()[0]
            raise ArtifactError(
                f"{path / 'observations.json'}: not observations ({detail}); {manifest.remedy}"
            ) from None
        file = TensorFile.open(path / "scales.safetensors")
        scales = {name: file.read(name).float32() for name in file.names}
        return cls(path, manifest, observations, scales)

    @classmethod
    def save(
        cls,
        path: Path,
        manifest: Manifest,
        observations: Mapping[str, Observation],
        histograms: Mapping[str, npt.NDArray[np.int64]],
        scales: Mapping[str, npt.NDArray[np.float32]],
        golden: GoldenSet,
        *,
        mean_squares: Mapping[str, npt.NDArray[np.float32]] = MappingProxyType({}),
        extra_files: Mapping[str, Content] | None = None,
        force: bool = False,
    ) -> Self:
        """Writes the directory atomically.

        `histograms` are int64[32768], or [chunks, 32768] where spans of samples are kept apart;
        `mean_squares` are float32[K].
        `extra_files` are written beside the others, by name.
        """
        with write_artifact(path, force=force, kind="calibration") as writer:
            records: dict[str, Any] = {
                name: item.model_dump(mode="json") for name, item in observations.items()
            }
            (writer.path / "observations.json").write_text(
                json.dumps(records, indent=1) + "\n", "utf-8"
            )
            write_tensors(
                writer.path / "histograms.safetensors",
                {
                    key: part
                    for name in histograms
                    for key, part in pack_histogram(name, histograms[name])
                },
            )
            write_tensors(
                writer.path / "scales.safetensors",
                {name: Tensor.of(np.asarray(scale)) for name, scale in scales.items()},
            )
            if mean_squares:
                write_tensors(
                    writer.path / MEAN_SQUARES_FILE,
                    {name: Tensor.of(means) for name, means in mean_squares.items()},
                )
            golden.save(writer.path)
            for name, content in (extra_files or {}).items():
                if isinstance(content, Path):
                    shutil.copyfile(content, writer.path / name)
                elif isinstance(content, str):
                    (writer.path / name).write_text(content, "utf-8")
                else:
                    content(writer.path)
            writer.finish(manifest)
        return cls.load(path)


# Suffixes of a stored histogram's two tensors. Only bins that occur are stored: most of the 32,768
# are empty, and a model with experts has more than ten thousand histograms. The first calibrations
# held every bin, under the bare name.
_BINS, _COUNTS = ".bins", ".counts"


def pack_histogram(name: str, counts: npt.NDArray[np.int64]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that store [32768] or [chunks, 32768] counts.

    `<name>.bins` uint16[n] holds the bins that occur; `<name>.counts` [n] or [chunks, n] their
    counts, in the narrowest unsigned dtype that fits.
    """
    counts = counts[0] if len(counts) == 1 else counts
    bins = np.flatnonzero(counts.reshape(-1, BINS).any(axis=0))
    present = counts[..., bins]
    yield name + _BINS, Tensor.of(bins.astype(np.uint16))
    yield name + _COUNTS, Tensor.of(present.astype(np.min_scalar_type(present.max(initial=0))))


class StoredHistograms(Mapping[str, npt.NDArray[np.int64]]):
    """The histograms that `pack_histogram` stored in `file`, by name; each is read on access.

    Each is int64[32768] if `summed`, the sum over chunks, or else int64[chunks, 32768].
    """

    def __init__(self, file: TensorFile, *, summed: bool) -> None:
        self._file = file
        self._summed = summed
        self._stored = frozenset(file.names)
        self._names = tuple(
            name.removesuffix(_COUNTS) for name in file.names if not name.endswith(_BINS)
        )

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        if name + _COUNTS in self._stored:
            present = np.atleast_2d(self._file.read(name + _COUNTS).codes)
            counts = np.zeros((len(present), BINS), np.int64)
            counts[:, self._file.read(name + _BINS).codes] = present
        else:
            counts = np.atleast_2d(self._file.read(name).codes)
        return np.asarray(counts.sum(axis=0) if self._summed else counts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
