"""Runs ModelOpt's algorithms on our samples and returns the tensors of the checkpoint that change.

| algorithm   | in ModelOpt | what it changes              | for                            |
|-------------|-------------|------------------------------|--------------------------------|
| smoothquant | smoothquant | scales of input channels     | any recipe                     |
| awq         | awq_lite    | scales of input channels     | weights of 4 bits in groups    |
| gptq        | gptq        | weights, moved onto the grid | any recipe                     |

The channel scales that smoothquant and awq find are folded into the layers before (see
`calibrate.algorithms.smoothing`). The changed checkpoint computes what the original does, and needs
nothing special to be served. Our observers then run on it, and the recipe's scales come from them.

ModelOpt's own rounding to FP4 and MX formats needs CUDA. So ModelOpt runs with a backend of ours,
`calibrate.decoder.rounding`, which rounds as serving will. Its smoothquant accepts only INT8 and is
configured for INT8; the result depends on no format. The whole model is in memory.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from calibrate.algorithms.changed import Changed, in_stored_dtype
from calibrate.algorithms.modelopt_backend import BACKEND, attach_rounding, register_backend
from calibrate.algorithms.smoothing import fold, power_of_two, shared_vector, sites
from calibrate.decoder.arithmetic import stock_linears
from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.samples.batches import Batch
from calibrate.scales.weights import weight_scales
from octet.errors import NumericsError, UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar
from octet.recipe import Recipe, TensorScheme
from octet.storage.tensors import Tensor

__all__ = ["Algorithm", "apply_algorithm"]

Algorithm = Literal["smoothquant", "awq", "gptq"]
Schemes: TypeAlias = dict[str, tuple[TensorScheme, TensorScheme]]  # weights, activations; by linear
Float32Array = NDArray[np.float32]

# smoothquant's alpha: how much of the difficulty moves from activations to weights. 0.5 is the
# paper's (arXiv 2211.10438). ModelOpt's own default, 1, moves all of it: on the example model with
# outliers in every norm, fp8-static then costs 0.9 % of perplexity, and 0.3 % with 0.5.
_SETTINGS: dict[Algorithm, dict[str, Any]] = {
    "smoothquant": {"method": "smoothquant", "alpha": 0.5},
    "awq": {"method": "awq_lite"},
    "gptq": {"method": "gptq", "layerwise": {"enable": True}},
}


def apply_algorithm(
    checkpoint: Checkpoint,
    algorithm: Algorithm,
    recipe: Recipe,
    batches: Sequence[Batch],
    *,
    dtype: ComputeDtype,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> Changed:
    """Runs ModelOpt's `algorithm` for `recipe` on `batches`, the model in `dtype` on `device`.

    Raises UnsupportedError if ModelOpt is missing, if the model has experts, or if the recipe has
    nothing for the algorithm to work on. Raises NumericsError if the result is not finite.
    """
    list(sites(checkpoint.spec))  # refuses experts
    schemes = _schemes(checkpoint, recipe, algorithm)
    with _quiet():
        quantization = _import_modelopt(algorithm)
        register_backend()
        model = stock_linears(load_model(checkpoint, dtype)).to(device)
        config = {"quant_cfg": _config(algorithm, schemes), "algorithm": None}
        quantization.quantize(model, config)
    scales = _grid(checkpoint, recipe) if algorithm == "gptq" else {}
    if algorithm != "smoothquant":
        attach_rounding(model, schemes, scales)

    # gptq runs the samples once per layer, awq twice.
    passes = {"smoothquant": 1, "awq": 2, "gptq": checkpoint.spec.layers}[algorithm]
    tokens = passes * sum(batch.tokens for batch in batches)
    with progress_bar(console, f"ModelOpt {algorithm}", tokens) as advance, _quiet():
        loop = _forward_loop(batches, advance)
        quantization.calibrate(model, _SETTINGS[algorithm], forward_loop=loop)
    details = {"modelopt": version("nvidia-modelopt"), **_SETTINGS[algorithm]}
    if algorithm == "gptq":
        return Changed(_moved(checkpoint, model, schemes), scales, details)
    vectors = _vectors(checkpoint, model, schemes)
    factors = {name: [float(v.min()), float(v.max())] for name, v in vectors.items()}
    return Changed(fold(checkpoint, vectors), {}, details | {"factors": factors})


def _schemes(checkpoint: Checkpoint, recipe: Recipe, algorithm: Algorithm) -> Schemes:
    """Returns the schemes of the linears that the algorithm works on; at least one."""
    schemes = {}
    for linear in checkpoint.spec.linears():
        scheme = recipe.scheme_of(linear.name)
        if scheme is not None and (algorithm != "awq" or scheme[0].format == "e2m1"):
            schemes[linear.name] = scheme
    if not schemes:
        what = "weights of 4 bits (nvfp4, mxfp4)" if algorithm == "awq" else "linears to quantize"
        raise UnsupportedError(
            f"recipe {recipe.name}: {algorithm} is for {what}, and it has none"
            + ("; smoothquant and gptq work with it" if algorithm == "awq" else "")
        )
    return schemes


def _config(algorithm: Algorithm, schemes: Schemes) -> list[dict[str, Any]]:
    """Builds ModelOpt's quant_cfg: a list in which later entries override earlier ones."""
    config: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, (weights, _) in schemes.items():
        weight: dict[str, Any] = {"num_bits": 8, "axis": 0}
        inputs: dict[str, Any] = {"num_bits": 8, "axis": None}
        if algorithm != "smoothquant":
            weight = {"num_bits": weights.format, "axis": None, "backend": BACKEND}
            inputs = {"num_bits": "input", "axis": None, "backend": BACKEND}
        if algorithm == "awq" and weights.group_size is not None:  # it uses groups' maxima
            # "dynamic": our backend receives the weight whole, not cut into groups.
            blocks = {-1: weights.group_size, "type": "dynamic"}
            weight = {"num_bits": weights.format, "block_sizes": blocks, "backend": BACKEND}
        config.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": weight})
        if algorithm != "awq":  # awq searches with unquantized activations
            config.append({"quantizer_name": f"{name}.input_quantizer", "cfg": inputs})
    return config


def _grid(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Float32Array]:
    """Returns the scales of the unchanged weights, which gptq keeps."""
    scales = {}
    for name, weight in weight_scales(checkpoint, recipe):
        scales[f"{name}.weight_scale"] = np.asarray(weight.scale)
        if weight.global_scale is not None:
            scales[f"{name}.weight_global_scale"] = np.asarray(weight.global_scale)
    return scales


def _vectors(checkpoint: Checkpoint, model: Any, schemes: Schemes) -> dict[str, Float32Array]:
    """Returns powers of two [K] to multiply inputs by, from ModelOpt's pre-quantization scales."""
    vectors = {}
    for site in sites(checkpoint.spec):
        found = []
        for linear in site.linears:
            if linear not in schemes:
                continue
            scale = model.get_submodule(linear).input_quantizer._pre_quant_scale
            vector = scale.detach().float().reshape(-1).cpu().numpy()
            if not (np.isfinite(vector).all() and (vector > 0).all()):
                raise NumericsError(
                    f"{linear}: ModelOpt's pre-quantization scale is not positive and finite;"
                    " use more samples, or calibrate without --algorithm"
                )
            found.append(vector)
        if found:
            vectors[site.input] = power_of_two(shared_vector(site, found))
    return vectors


def _moved(checkpoint: Checkpoint, model: Any, schemes: Schemes) -> dict[str, Tensor]:
    """Returns the weights that gptq moved, in the checkpoint's dtype."""
    tensors = {}
    for linear in schemes:
        name = f"{linear}.weight"
        values = model.get_parameter(name).detach().float().cpu().numpy()
        if not np.isfinite(values).all():
            raise NumericsError(f"{name}: gptq made NaN or Inf of it; use more samples")
        tensors[name] = in_stored_dtype(values, checkpoint.dtype(name))
    return tensors


def _forward_loop(
    batches: Sequence[Batch], advance: Callable[[int], None]
) -> Callable[[Any], None]:
    """Returns a loop over the samples without padding, which ModelOpt would count as tokens."""

    @torch.no_grad()
    def run(model: Any) -> None:
        for batch in batches:
            for token_ids in unpadded(batch):
                model(token_ids.to(model.device), use_cache=False, logits_to_keep=1)
            advance(batch.tokens)

    return run


def unpadded(batch: Batch) -> Iterator[torch.Tensor]:
    """Yields the batch's rows as int64 [b, t], as many at once as possible without padding.

    Rows are cut to the shortest of their group and lose less than a tenth of their tokens. One pass
    per row would take too long, because awq rounds every weight eleven times per forward pass.
    """
    order = sorted(range(len(batch.lengths)), key=lambda row: -batch.lengths[row])
    while order:
        longest = batch.lengths[order[0]]
        rows = [row for row in order if batch.lengths[row] > 0.9 * longest]
        order = order[len(rows) :]
        yield batch.token_ids[rows, : batch.lengths[rows[-1]]]


def _import_modelopt(algorithm: Algorithm) -> Any:
    try:
        import modelopt.torch.quantization as quantization
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        package = "nvidia-modelopt" if missing == "modelopt" else missing
        raise UnsupportedError(
            f"algorithm {algorithm} needs {package}: pip install 'octet-llm[modelopt]'"
        ) from None
    return quantization


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences ModelOpt's output and progress bars; our own report shows what matters."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        with contextlib.suppress(ModuleNotFoundError):  # `_import_modelopt` reports it better
            from modelopt.torch.utils.logging import no_stdout

            stack.enter_context(no_stdout())
        yield
