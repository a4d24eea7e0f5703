"""A calibration directory: how it keeps histograms and other files, and that alterations show."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octet.artifacts.calibration import BINS, Calibration, Observation
from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.tensors import Tensor, TensorFile, write_tensors

NAME = "model.layers.0.mlp.down_proj.input"
GOLDEN = GoldenSet(weights_sha256="", compute_dtype="float32", software={}, records=())


def counts_of(*pairs: tuple[int, int]) -> NDArray[np.int64]:
    counts = np.zeros(BINS, np.int64)
    for code, count in pairs:
        counts[code] = count
    return counts


def save(
    path: Path,
    model: Path,
    histograms: dict[str, NDArray[np.int64]],
    extra_files: dict[str, str | Path] | None = None,
) -> Calibration:
    manifest = Manifest(
        kind="calibration",
        model=ModelIdentity.of(Checkpoint.open(model)),
        recipe=Recipe.load("fp8"),
        software={},
    )
    observations = {
        name: Observation(kind="input", consumers=(name,), observed_dtype="bfloat16")
        for name in histograms
    }
    scales = {"model.layers.0.mlp.down_proj.weight_scale": np.full((2, 1), 0.5, np.float32)}
    return Calibration.save(
        path, manifest, observations, histograms, scales, GOLDEN, extra_files=extra_files
    )


@pytest.mark.parametrize(
    "counts",
    [
        counts_of(),
        counts_of((0, 7)),
        counts_of((0, 255), (BINS - 1, 256)),
        counts_of((3, 2**32), (0x3F80, 1)),
        counts_of((3, 2**62)),
        np.arange(BINS, dtype=np.int64),
    ],
    ids=["empty", "zeros", "two bins", "past uint32", "past float64", "every bin"],
)
def test_histograms_come_back_exactly(
    tiny_model: Path, tmp_path: Path, counts: NDArray[np.int64]
) -> None:
    save(tmp_path / "out", tiny_model, {NAME: counts, "other": counts_of((1, 1))})
    loaded = Calibration.load(tmp_path / "out")
    assert list(loaded.histograms) == [NAME, "other"]
    assert loaded.histograms[NAME].dtype == np.int64
    np.testing.assert_array_equal(loaded.histograms[NAME], counts)
    with pytest.raises(KeyError):
        loaded.histograms["nothing"]


def test_spans_of_samples_are_kept_apart_and_summed(tiny_model: Path, tmp_path: Path) -> None:
    first, second = counts_of((0, 300), (9, 1)), counts_of((9, 70000), (0x3F80, 2))
    chunks = np.stack([first, np.zeros_like(first), second])
    calibration = save(tmp_path / "out", tiny_model, {NAME: chunks, "other": first})
    np.testing.assert_array_equal(calibration.chunks[NAME], chunks)
    np.testing.assert_array_equal(calibration.histograms[NAME], first + second)
    np.testing.assert_array_equal(calibration.chunks["other"], first[None])
    np.testing.assert_array_equal(calibration.histograms["other"], first)


def test_empty_bins_take_no_space(tiny_model: Path, tmp_path: Path) -> None:
    sparse = counts_of(*((code, 1000) for code in range(0x3C00, 0x3F80)))
    save(tmp_path / "out", tiny_model, {NAME: sparse})
    assert (tmp_path / "out" / "histograms.safetensors").stat().st_size < 5000


def test_histograms_as_the_first_calibrations_stored_them(tiny_model: Path, tmp_path: Path) -> None:
    calibration = save(tmp_path / "out", tiny_model, {NAME: counts_of((0, 1))})
    counts = counts_of((0, 3), (0x4000, 2**40))
    write_tensors(calibration.path / "histograms.safetensors", {NAME: Tensor.of(counts)})
    np.testing.assert_array_equal(calibration.histograms[NAME], counts)
    assert list(calibration.histograms) == [NAME]


def test_an_altered_histogram_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(out, tiny_model, {NAME: counts_of((0x3F80, 5))})
    path = out / "histograms.safetensors"
    file = TensorFile.open(path)
    tensors = {name: Tensor.of(file.read(name).codes.copy()) for name in file.names}
    tensors[f"{NAME}.counts"] = Tensor.of(np.array([6], np.uint8))
    write_tensors(path, tensors)  # a whole file, one count other than it was
    with pytest.raises(ArtifactError, match=r"histograms\.safetensors: altered") as error:
        Calibration.load(out)
    assert "\n" not in str(error.value)


def test_a_missing_histogram_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", tiny_model, {NAME: counts_of((0x3F80, 5))})
    (tmp_path / "out" / "histograms.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"histograms\.safetensors: missing"):
        Calibration.load(tmp_path / "out")


def test_extra_files_are_texts_or_copies_and_are_hashed(tiny_model: Path, tmp_path: Path) -> None:
    binary = tmp_path / "weights"
    binary.write_bytes(b"\x00\xff")
    extra: dict[str, str | Path] = {"report.json": "{}\n", "weights.safetensors": binary}
    save(tmp_path / "out", tiny_model, {NAME: counts_of((0, 1))}, extra)
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == b"\x00\xff"
    assert (tmp_path / "out" / "report.json").read_text() == "{}\n"
    (tmp_path / "out" / "report.json").write_text("{ }\n")
    with pytest.raises(ArtifactError, match=r"report\.json: altered"):
        Calibration.load(tmp_path / "out")
