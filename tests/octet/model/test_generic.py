"""Decoders that Octet does not know: their linears by the names of the tensors."""

from pathlib import Path

import pytest

from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from tests.models import GENERIC, write_model
from tests.octet.published import QWEN3_8B


@pytest.mark.parametrize("name", GENERIC)
def test_the_linears_of_an_unknown_architecture_are_those_of_its_layers(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(write_model(tmp_path, *GENERIC[name][:1], **GENERIC[name][1]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = {
        module: tuple(linear.weight.shape)
        for module, linear in model.named_modules()
        if type(linear).__name__ == "Linear" and not module.endswith(("lm_head", "_gate"))
    }
    linears = list(checkpoint.spec.linears())
    dense = [x for x in linears if ".experts." not in x.name]  # which transformers fuses
    assert {x.name: (x.out_features, x.in_features) for x in dense} == expected
    sparse = checkpoint.spec.sparse_layers
    assert len(linears) - len(dense) == len(sparse) * 6 * 3
    assert sparse == {"olmoe": (0, 1), "qwen2_moe": (1,)}.get(name, ())
    assert linears == [x for index in range(2) for x in checkpoint.spec.linears(index)]
    attention = {
        x.input
        for x in checkpoint.spec.linears(1)
        if x.name.endswith(("q_proj", "k_proj", "v_proj"))
    }
    assert attention == {"model.layers.1.self_attn.q_proj.input"}
    (warning,) = checkpoint.warnings
    assert warning.startswith(f"{checkpoint.spec.architecture} is an architecture that Octet does")
    assert f"{len(linears)} in all (in layer 0: self_attn.q_proj," in warning


def shapes_below(prefix: str, *modules: str, layers: int = 36) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{i}.{x}.weight": (8, 8) for i in range(layers) for x in modules}


UNKNOWN = QWEN3_8B | {"architectures": ["NewForCausalLM"]}


def test_embeddings_norms_and_routers_are_no_linears() -> None:
    modules = ("self_attn.qkv", "mlp.gate", "mlp.router", "mlp.shared_gate", "embed_positions")
    spec = ModelSpec.from_config(UNKNOWN, "m", shapes_below("model.layers", *modules))
    assert {x.name.removeprefix("model.layers.2.") for x in spec.linears(2)} == {"self_attn.qkv"}


def test_layers_after_the_last_are_left_alone() -> None:
    """Those that predict further tokens, where transformers has none."""
    shapes = shapes_below("model.layers", "self_attn.q_proj", layers=37)
    spec = ModelSpec.from_config(
        UNKNOWN, "m", shapes | shapes_below("vision.layers", "fc", layers=9)
    )
    assert len(list(spec.linears())) == 36 and list(spec.linears(36)) == []


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (shapes_below("model.h", "attn.c_attn"), "named <prefix>.layers.<i>.*, and there are none"),
        (shapes_below("model.layers", "self_attn.q", layers=30), "there are none such"),
        (
            shapes_below("a.layers", "self_attn.q") | shapes_below("b.layers", "self_attn.q"),
            "there are 2 stacks of so many .a.layers, b.layers.",
        ),
        (shapes_below("model.layers", "mamba.in_proj"), "model.layers.0 has no self_attn"),
        (
            shapes_below("model.layers", "self_attn.q_proj", "mlp.experts.3.up_proj"),
            "the experts of layers 0 and 0 are not of one make",
        ),
        (
            shapes_below("model.layers", "self_attn.q_proj", "moe.experts.3.w1"),
            "layers.0.moe.experts.3.w1: of an architecture that Octet does not know, experts are",
        ),
    ],
)
def test_an_unknown_architecture_of_another_make_is_refused(
    shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"^somewhere: .*{message}"):
        ModelSpec.from_config(UNKNOWN, "somewhere", shapes)


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("granitemoe", {"head_dim": 16}, "model.layers.0.block_sparse_moe.input_linear.weight"),
    ],
)
def test_experts_in_one_tensor_are_refused_by_the_headers(
    kind: str, settings: dict[str, object], name: str, tmp_path: Path
) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
    write_model(tmp_path, kind, **more, **settings)
    with pytest.raises(UnsupportedError, match=f"{name} holds 4 experts in one tensor"):
        Checkpoint.open(tmp_path)
