"""Evaluates a checkpoint in transformers, as the reference for quantized models.

Each sample is scored by itself: tokens 1 to T-1, given those before. A batch has several samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from calibrate.decoder.loading import load_model, resolve_dtype
from calibrate.samples.batches import make_batches
from calibrate.samples.source import load_samples
from calibrate.samples.tokenizer_check import tokenizer_as_served
from calibrate.samples.tokens import encode, load_tokenizer
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from verify.evaluation.sequences import Sequences
from verify.evaluation.target import Answer

__all__ = ["CheckpointTarget"]

_ELEMENTS = 1 << 24  # logits converted to log-probabilities at a time: 64 MB


class CheckpointTarget:
    """A `Target`: the checkpoint's weights as stored, GEMMs in `dtype`."""

    lasting = True

    def __init__(
        self,
        path: Path,
        *,
        dtype: Literal["auto", "bfloat16", "float32"] = "float32",
        batch_size: int = 8,
    ) -> None:
        """Raises CheckpointError or UnsupportedError if the checkpoint cannot be run."""
        self.name = str(path)
        self.checkpoint = Checkpoint.open(path)
        self.dtype = resolve_dtype(dtype, self.checkpoint)
        self.longest: int | None = self.checkpoint.spec.max_positions
        self.vocabulary: int | None = self.checkpoint.spec.vocab_size
        self._batch_size = batch_size

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """Hashes of the weights, and the dtype; reads the whole checkpoint."""
        return self.checkpoint.weight_hashes | {"compute dtype": self.dtype}

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.checkpoint)

    def encode(self, text: str) -> list[int] | None:
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def sequences(
        self,
        samples: Path,
        *,
        count: int | None = None,
        text_field: str = "text",
        max_length: int = 512,
    ) -> Sequences:
        """Tokenizes the first `count` samples (all if None) of anything that `load_samples` reads.

        Raises SampleError if none of them predicts anything.
        """
        file = load_samples(samples, text_field)
        chosen, _ = file.first(count)
        spec = self.checkpoint.spec
        # Its warnings are the calibration's to give.
        self.tokenizer, _ = tokenizer_as_served(self.tokenizer, self.checkpoint, chosen)
        encoded = encode(chosen, self.tokenizer, vocab_size=spec.vocab_size)
        texts = [None if sample.messages else sample.text for sample in chosen]
        return Sequences.of(
            samples,
            file.sha256,
            zip((sample.origin for sample in chosen), texts, encoded, strict=True),
            max_length=min(max_length, spec.max_positions),
        )

    def answers(self, samples: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, Answer]]:
        model = load_model(self.checkpoint, self.dtype)
        device = _device(model)
        model = model.to(device)
        names = [str(index) for index in range(len(samples))]
        for batch in make_batches(samples, names, batch_size=self._batch_size):
            with torch.inference_mode():
                logits = model(batch.token_ids.to(device), use_cache=False).logits
            for row, ids, size, name in zip(
                logits, batch.token_ids.to(device), batch.lengths, batch.origins, strict=True
            ):
                yield int(name), self._answer(row[: size - 1], ids[1:size], k)

    def _answer(self, logits: torch.Tensor, following: torch.Tensor, k: int) -> Answer:
        """Builds the answer from logits [P, V] and the token ids [P] that follow."""
        parts = []
        rows = max(1, _ELEMENTS // logits.shape[1])
        for start in range(0, len(following), rows):
            logprobs = logits[start : start + rows].float().log_softmax(-1)
            chosen = logprobs.gather(1, following[start : start + rows, None])[:, 0]
            top = logprobs.topk(k, dim=1)
            found = (chosen, top.indices.int(), top.values)
            parts.append(tuple(tensor.cpu().numpy() for tensor in found))
        answer = Answer(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        if not answer.finite:
            raise NumericsError(
                f"{self.name}: NaN or Inf in its logits, from NaN or Inf in weights"
            )
        return answer


def _device(model: Any) -> torch.device:
    """Chooses the GPU if there is one that has memory for the weights twice over."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    wanted = 2 * sum(x.numel() * x.element_size() for x in model.parameters())
    return torch.device("cuda" if torch.cuda.mem_get_info()[0] > wanted else "cpu")
