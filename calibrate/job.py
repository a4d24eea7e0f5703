"""A calibration that passed all checks of its input, and what it runs on."""

from dataclasses import dataclass

import torch
from rich.console import Console

from calibrate.decoder.loading import ComputeDtype
from calibrate.decoder.weights import LayerWeights
from calibrate.journal.distributed import Group
from calibrate.options import Options
from calibrate.samples.inputs import Inputs
from octet.model.checkpoint import Checkpoint

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """Holds what every step of a calibration gets; without a console, nothing is printed."""

    options: Options
    checkpoint: Checkpoint
    inputs: Inputs
    dtype: ComputeDtype
    device: torch.device
    weights: LayerWeights  # of the checkpoint, for everything that runs it layer by layer
    group: Group  # the processes that share the work
    console: Console | None
