"""Describes a checkpoint of any tool as a recipe and scales, such as a calibration of Octet has.

With these and the decoded weights, `calibrate.simulate` computes what a server of the checkpoint
answers, as it does for Octet's own exports.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec
from octet.numerics.scaling import Granularity
from octet.recipe import BLOCK, KvCacheDtype, Override, Recipe, TensorScheme
from verify.next_tokens import written_scales
from verify.reader.checkpoint import Written
from verify.reader.scheme import Inputs, Stored

__all__ = ["StoredRecipe", "stored_recipe"]

Pair = tuple[TensorScheme, TensorScheme]  # of weights and of activations


@dataclass(frozen=True)
class StoredRecipe:
    """A checkpoint's schemes and scales; keys of `scales` are those of `Calibration.scales`.

    With `weight_only`, engines do not round the activations of its linears.
    """

    recipe: Recipe
    scales: dict[str, NDArray[np.float32]]
    weight_only: bool


def stored_recipe(written: Written, spec: ModelSpec, kv_cache: KvCacheDtype) -> StoredRecipe:
    """Describes `written`, whose tensors have been checked, with a cache of `kv_cache`.

    Raises UnsupportedError for schemes that no engine of `octet.recipe` serves.
    """
    quantization = written.quantization
    assert quantization is not None
    stored = {
        linear: group.stored
        for linear in spec.linears()
        if (group := quantization.group_of(linear.name)) is not None
    }
    where = str(written.path)
    if not stored:
        raise UnsupportedError(f"{where}: its configuration quantizes no linear layer of a decoder")
    bare = {x.inputs is None for x in stored.values()}
    if len(bare) > 1:
        raise UnsupportedError(
            f"{where}: activations of some linear layers are rounded and of others not, which Octet"
            " does not simulate together"
        )
    pairs = {linear: _pair(x, where) for linear, x in stored.items()}
    usual = Counter(pairs.values()).most_common(1)[0][0]
    plain = [x.name for x in spec.linears() if x not in pairs]
    try:
        recipe = Recipe(
            name=usual[0].kind,
            weights=usual[0],
            activations=usual[1],
            kv_cache=kv_cache,
            exclude=(*Recipe.model_fields["exclude"].default, *plain),
            overrides=tuple(
                Override(match=linear.name, weights=pair[0], activations=pair[1])
                for linear, pair in pairs.items()
                if pair != usual
            ),
        )
    except ValidationError as error:
        raise _unserved(where, error) from None
    scales = written_scales(written, spec)
    for linear, x in stored.items():
        shape = (linear.out_features, linear.in_features)
        scales |= _weight_scales(written, linear.name, x, pairs[linear][0], shape)
    written.release()
    return StoredRecipe(recipe, scales, weight_only=bare == {True})


def _pair(stored: Stored, where: str) -> Pair:
    if stored.granularity == "block" and stored.tile != (BLOCK, BLOCK):
        raise UnsupportedError(
            f"{where}: weights in blocks of {stored.tile}, and engines serve {BLOCK} x {BLOCK}"
        )
    inputs = stored.inputs or _dynamic(stored)
    try:
        weights = TensorScheme(
            format=stored.elements,
            granularity=stored.granularity,
            group_size=stored.tile[1] if stored.tile else None,
            scale_format=stored.scale_format,
        )
        activations = TensorScheme.model_validate(
            {
                "format": inputs.elements,
                "granularity": inputs.granularity,
                "dynamic": inputs.dynamic,
                "group_size": inputs.group_size,
                "scale_format": inputs.scale_format,
            }
        )
    except ValidationError as error:
        raise _unserved(where, error) from None
    return weights, activations


def _dynamic(stored: Stored) -> Inputs:
    """Returns the activations that a recipe names beside weight-only weights.

    Engines do not round the activations of such linears, but a recipe has to name a scheme.
    """
    if stored.granularity in ("tensor", "channel"):
        return Inputs("e4m3", "token", dynamic=True)
    assert stored.tile is not None
    return Inputs(stored.elements, "group", True, stored.scale_format, stored.tile[1])


def _weight_scales(
    written: Written, module: str, stored: Stored, scheme: TensorScheme, shape: tuple[int, int]
) -> dict[str, NDArray[np.float32]]:
    wanted = Granularity.of(scheme.granularity, scheme.group_size).scale_shape(shape)
    scale = written.values(f"{module}.{stored.scale}").reshape(wanted)
    found = {f"{module}.weight_scale": np.array(scale, np.float32)}
    if stored.global_scale is not None:
        whole = written.values(f"{module}.{stored.global_scale}").reshape(-1)[0]
        whole = np.float32(1) / whole if stored.divides else whole
        found[f"{module}.weight_global_scale"] = np.asarray(whole, np.float32)
    return found


def _unserved(where: str, error: ValidationError) -> UnsupportedError:
    what = error.errors()[0]["msg"].removeprefix("Value error, ")
    return UnsupportedError(f"{where}: Octet does not simulate its configuration: {what}")
