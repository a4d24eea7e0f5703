"""The artifacts that the tests of the writers make, for those of the readers."""

from tests.calibrate.conftest import checkpoint, model, prompts_chosen_once
from tests.export.conftest import calibrations, decoders, graphs
from tests.serve.conftest import exports

__all__ = [
    "calibrations",
    "checkpoint",
    "decoders",
    "exports",
    "graphs",
    "model",
    "prompts_chosen_once",
]
