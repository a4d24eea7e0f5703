"""Records the sources of an artifact: a model, by the hashes of its files, and samples."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from octet.errors import ArtifactError
from octet.model.chat_template import (
    DEFAULT_TEMPLATE,
    GENERATION_CONFIG,
    TEMPLATE_FILE,
    template_of,
)
from octet.model.spec import ModelSpec
from octet.storage.files import XXH3, Digest, sha256_file, xxh3

if TYPE_CHECKING:
    from octet.model.checkpoint import Checkpoint  # loads numpy

__all__ = ["ModelIdentity", "SampleSet", "side_hashes"]


class ModelIdentity(BaseModel):
    """Identifies a model: its name, its sizes and the hashes of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    spec: ModelSpec
    files: dict[str, str]  # config.json and shards: file name -> SHA-256
    tokenizer: dict[str, str]
    # File name -> XXH3-128, of the files in `files`; {} if `xxhash` was not installed.
    checksums: dict[str, str] = Field(default_factory=dict)
    # `side_hashes`, with the default template if there is none; None: written by release 0.2.
    side: dict[str, str] | None = None

    @classmethod
    def of(cls, checkpoint: "Checkpoint", name: str | None = None) -> Self:
        side = side_hashes(checkpoint.path)
        if template_of(checkpoint.path) is None:
            side[TEMPLATE_FILE] = hashlib.sha256(DEFAULT_TEMPLATE.encode()).hexdigest()
        return cls(
            name=name or checkpoint.path.resolve().name,
            spec=checkpoint.spec,
            files=checkpoint.weight_hashes,
            tokenizer=checkpoint.tokenizer_hashes,
            checksums=checkpoint.weight_checksums,
            side=side,
        )

    def require(self, checkpoint: "Checkpoint", *, shards: bool = True) -> None:
        """Raises ArtifactError naming the first file of `checkpoint` that differs from this.

        Without `shards`, which take long to read, only checks that they exist: a caller that reads
        them anyway hashes them meanwhile, and calls `require_file`.
        """
        if shards:
            hashes: dict[str, str | None] = dict(checkpoint.weight_hashes)
        else:
            hashes = {
                shard.path.name: self.files.get(shard.path.name) for shard in checkpoint.shards
            }
            hashes["config.json"] = sha256_file(checkpoint.path / "config.json")
        hashes |= checkpoint.tokenizer_hashes
        for file in self.files | self.tokenizer:
            self.require_file(checkpoint.path / file, hashes.get(file))
        for file, _ in self.side_changes(checkpoint.path):
            raise ArtifactError(
                f"{checkpoint.path / file} has changed since calibration; calibrate again or"
                " restore it"
            )

    def side_changes(self, directory: Path) -> list[tuple[str, str]]:
        """Returns the side files in `directory` that are not this model's, and what is wrong.

        A missing chat template is no change: some kinds of export hold no file of the default one.
        """
        if self.side is None:
            return []
        before, now = self.side, side_hashes(directory)
        changed = [(name, "is not the original's") for name in now if now[name] != before.get(name)]
        if GENERATION_CONFIG in before.keys() - now.keys():
            changed.append((GENERATION_CONFIG, "missing: the original has it"))
        return changed

    def digest(self, name: str) -> Digest:
        """Returns a new hash object for the file `name`; pass its hex digest to `require_file`.

        XXH3-128 if recorded and installed, or else SHA-256. XXH3-128 detects accidental damage, not
        forgery.
        """
        fast = xxh3() if name in self.checksums else None
        return hashlib.sha256() if fast is None else fast

    def require_file(self, path: Path, digest: str | None) -> None:
        """Raises ArtifactError unless `digest` equals the recorded hash of the file of that name.

        `digest` is a SHA-256 or XXH3-128, as from `digest()`; None: the file is missing.
        """
        fast = digest is not None and digest.startswith(XXH3)
        known = self.checksums if fast else self.files | self.tokenizer
        if known.get(path.name) != digest:
            state = "is missing; it was there at" if digest is None else "has changed since"
            raise ArtifactError(f"{path} {state} calibration; calibrate again or restore it")


def side_hashes(directory: Path) -> dict[str, str]:
    """Returns SHA-256 of what decides about answers beside weights and tokenizer.

    These are generation_config.json, and the chat template in a file of its own.
    """
    found = {}
    for name in (GENERATION_CONFIG, TEMPLATE_FILE):
        if (directory / name).is_file():
            found[name] = sha256_file(directory / name)
    return found


class SampleSet(BaseModel):
    """Identifies the calibration samples, and records how they became tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    count: int
    tokens: int
    max_length: int
    batch_size: int
    # How texts became rows: packed or padded, truncation, chat template.
    facts: dict[str, Any] = Field(default_factory=dict)
