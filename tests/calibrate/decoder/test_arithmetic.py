"""BF16 in hardware and in float32, and how many threads compute."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.decoder import arithmetic
from calibrate.decoder.arithmetic import (
    BF16_SETTING,
    bf16_matmuls,
    fit_threads,
    linear,
    stock_linears,
)
from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import load_model, resolve_dtype
from calibrate.journal.identity import THREADS
from calibrate.journal.journal import record_threads, recorded_threads
from calibrate.observe.sweep import observe_checkpoint
from calibrate.samples.batches import Batch
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from tests.models import GENERIC, KNOWN, write_model

IDS = torch.arange(3, 45)[None]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`chosen("float32")` is how BF16 is multiplied from then on."""

    def choose(way: str) -> None:
        monkeypatch.setenv(BF16_SETTING, way)
        bf16_matmuls.cache_clear()

    yield choose
    bf16_matmuls.cache_clear()


class Products(TorchDispatchMode):
    """The types that matrix products and attention were computed in."""

    KINDS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "dot", "mv")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.KINDS or name.startswith("_scaled_dot_product"):
            self.found |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = load_model(checkpoint, "bfloat16")(IDS, use_cache=False).logits
    return found


def layered_logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = LayeredModel(checkpoint, "bfloat16")
    states = model.embed(IDS)
    for _ in model.sweep():
        states = model.forward(states, None)
    return model.logits([states])[0]


@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 48), (2, 5, 48), (64, 48)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_float32_linear_is_that_of_torch(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(shape), torch.randn(32) if biased else None
    stored = torch.randn(48, 32)
    for weight in (stored.T, stored.T.contiguous()):
        with torch.inference_mode():
            found = linear(x, weight, bias)
        expected = torch.nn.functional.linear(x.double(), weight.double())
        expected += 0 if bias is None else bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(), (7, 1)])
def test_a_scale_multiplies_the_weight(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    module = arithmetic.Float32Linear(5, 7, bias=biased)
    x, scale = torch.randn(3, 5), torch.rand(shape)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, module.weight * scale, module.bias)
        module.scale = scale
        torch.testing.assert_close(module(x), expected)


def test_gradients_go_through_a_linear() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear(torch.ones(4, 2), weight).sum(), weight)
    assert gradient.eq(4).all()


def test_a_library_that_looks_for_torchs_linears_can_have_them(tiny_model: Path) -> None:
    model = load_model(Checkpoint.open(tiny_model), "float32")
    with torch.inference_mode():
        fast = model(IDS, use_cache=False).logits
        stock = stock_linears(model)(IDS, use_cache=False).logits
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 15 and {type(module) for module in linears} == {torch.nn.Linear}
    torch.testing.assert_close(fast, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi3", "qwen3_moe", "gemma2", "olmoe"])
@pytest.mark.parametrize("compute", [logits, layered_logits])
def test_no_product_is_left_to_slow_instructions(
    kind: str, compute: Any, chosen: Any, tmp_path: Path
) -> None:
    """Linears, attention, experts and the output head of a BF16 model, in float32 all."""
    model, settings = {**KNOWN, **GENERIC}[kind]
    checkpoint = Checkpoint.open(write_model(tmp_path / kind, model, **settings))
    chosen("float32")
    with Products() as products:
        found = compute(checkpoint)
    assert products.found - {torch.bool, torch.int32} == {torch.float32}
    assert found.dtype == torch.bfloat16


def test_it_is_the_same_computation_up_to_the_last_bits(
    checkpoint: Checkpoint, chosen: Any
) -> None:
    """Products of BF16 values are exact in float32: only the order of sums differs, and where
    attention rounds its probabilities."""
    found = {}
    for way in ("hardware", "float32"):
        chosen(way)
        found[way] = logits(checkpoint).float()
    exact = load_model(checkpoint, "float32")
    with torch.no_grad():
        reference = exact(IDS, use_cache=False).logits
    noise = {way: (x - reference).pow(2).mean().sqrt() for way, x in found.items()}
    apart = (found["hardware"] - found["float32"]).pow(2).mean().sqrt()
    assert 0 < noise["float32"] < 1.2 * noise["hardware"]
    assert apart < 1.5 * noise["hardware"]


def test_a_linear_rounds_once(chosen: Any, checkpoint: Checkpoint) -> None:
    chosen("float32")
    model = load_model(checkpoint, "bfloat16")
    linear = model.base_model.layers[0].mlp.down_proj
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    linear.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        model(IDS, use_cache=False)
        ((x, out),) = seen
        exact = torch.nn.functional.linear(x.float(), linear.weight.float())
    assert torch.equal(out, exact.bfloat16())


def test_float32_and_other_devices_are_left_alone(chosen: Any, checkpoint: Checkpoint) -> None:
    before = [load_model(checkpoint, "float32")(IDS).logits]
    chosen("float32")
    before.append(load_model(checkpoint, "float32")(IDS).logits)
    assert torch.equal(*before)


def test_what_the_setting_may_be(chosen: Any) -> None:
    ways: tuple[Literal["hardware", "float32"], ...] = ("hardware", "float32")
    for way in ways:
        chosen(way)
        assert bf16_matmuls() == way
    chosen("fast")
    with pytest.raises(ConfigError, match=r"^OCTET_BF16=fast: give 'hardware' or 'float32', or"):
        bf16_matmuls()


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_hardware_is_used_where_torch_uses_it(
    instructions: bool, used: bool, monkeypatch: pytest.MonkeyPatch, chosen: Any
) -> None:
    chosen("")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: used)
    assert bf16_matmuls() == ("hardware" if instructions and used else "float32")


def test_a_bf16_checkpoint_is_observed_in_bf16_on_every_cpu(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    assert resolve_dtype("auto", checkpoint) == "bfloat16"
    assert resolve_dtype("float32", checkpoint) == "float32"


def test_an_artifact_says_how_it_was_computed(
    checkpoint: Checkpoint, batch: Batch, chosen: Any
) -> None:
    chosen("float32")
    facts = observe_checkpoint(checkpoint, [batch], dtype="bfloat16").facts
    assert facts["bf16_matmuls"] == "float32"
    assert facts["torch_threads"] == torch.get_num_threads()
    assert facts["device"].startswith("cpu (")
    assert (facts["processes"], facts["batches"]) == (1, 1)


class TestThreads:
    @pytest.fixture(autouse=True)
    def a_machine(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Of 8 cores, idle."""
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(arithmetic, "usable_cores", lambda: 8)
        monkeypatch.setattr(arithmetic, "idle_cores", lambda: 8.0)
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    def test_idle_cores_compute(self) -> None:
        fit_threads()
        assert torch.get_num_threads() == 8

    @pytest.mark.parametrize(
        ("taken_s", "expected"),
        [
            ({8: 1.0, 4: 2.0}, 8),  # busy, and yet worth it
            ({8: 9.0, 4: 3.0, 2: 1.0, 1: 1.5}, 2),
            ({8: 9.0, 4: 3.0, 2: 2.0, 1: 1.0}, 1),
            ({8: 1.0, 4: 0.95}, 8),  # not by enough to tell
        ],
    )
    def test_where_others_compute_a_probe_decides(
        self, taken_s: dict[int, float], expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arithmetic, "idle_cores", lambda: 1.5)
        monkeypatch.setattr(arithmetic, "_probe", taken_s.__getitem__)
        fit_threads()
        assert torch.get_num_threads() == expected

    def test_the_probe_takes_a_moment(self) -> None:
        assert 0 < arithmetic._probe(1) < 30

    def test_a_run_that_is_continued_takes_the_threads_that_it_had(self) -> None:
        fit_threads(3)
        assert torch.get_num_threads() == 3

    def test_torchruns_own_setting_is_no_choice_of_the_user(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setattr(arithmetic, "idle_cores", lambda: pytest.fail("ranks must agree"))
        fit_threads()
        assert torch.get_num_threads() == 8
        record_threads(tmp_path / "out.progress" / "steps", {THREADS: "3"})
        fit_threads(recorded_threads(tmp_path / "out.progress"))
        assert torch.get_num_threads() == 3

    def test_what_the_user_sets_is_respected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        monkeypatch.setattr(arithmetic, "usable_cores", lambda: 5)
        fit_threads(3)
        assert torch.get_num_threads() == 5
