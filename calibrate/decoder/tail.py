"""The rest of a decoder, from one layer on, for what was computed once up to there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from calibrate.decoder.experts import experts_one_by_one
from calibrate.decoder.partial import run_layers
from calibrate.samples.batches import Batch, real
from octet.model.spec import ModelSpec

__all__ = ["Tail"]


class Tail:
    """What each batch is before decoder layer `layer`, and what the layers from there make of it.

    It holds one set of activations [B, T, H], in the model's dtype and on its device.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> None:
        """Before layer 0: the embeddings."""
        self.layer = 0
        self._model, self._spec, self._batches = model, spec, batches
        embed, device = model.get_input_embeddings(), model.device
        self._inputs: list[Tensor] = [embed(batch.token_ids.to(device)) for batch in batches]

    @torch.inference_mode()
    def move_to(self, layer: int) -> None:
        """Runs the model as it computes now up to before `layer`; it only goes forward."""
        if layer < self.layer:
            raise ValueError(f"before layer {self.layer} already, cannot go back to {layer}")
        with experts_one_by_one(self._model, self._spec):
            for index in range(self.layer, layer):
                with run_layers(self._model.base_model, range(index, index + 1)):
                    for at, x in enumerate(self._inputs):
                        self._inputs[at] = self._run(x)
        self.layer = layer

    def states(self, index: int, inputs: Tensor | None = None) -> Tensor:
        """The last hidden states [tokens, H] of batch `index`, as the model computes now.

        `inputs` [B, T, H] stand in for what the batch is before `layer`.
        """
        x = self._inputs[index] if inputs is None else inputs
        with run_layers(self._model.base_model, range(self.layer, self._spec.layers)):
            return real(self._run(x), self._batches[index])

    def _run(self, x: Tensor) -> Tensor:
        states: Tensor = self._model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state
        return states
