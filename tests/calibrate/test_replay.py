"""`octet replay`: a planted shift of domain, from the command line to its reports."""

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from calibrate.observe.histogram import Histogram
from calibrate.observe.sweep import observe_checkpoint
from calibrate.options import Options, ReplayOptions, validate_replay
from calibrate.pipeline import run
from calibrate.replay import _Runner, replay
from calibrate.report.over_time import Replay
from calibrate.report.over_time_page import render_page
from calibrate.samples.batches import make_batches
from calibrate.samples.tokens import load_tokenizer
from calibrate.scales.activations import measure
from calibrate.scales.over_time import RULES
from octet.artifacts.calibration import Calibration
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ConfigError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.numerics.formats import E4M3
from octet.recipe import Recipe
from octet.storage.tensors import Tensor
from tests.command import octet
from tests.models import Tensors, rewrite_model
from tests.shared import Shared

pytestmark = pytest.mark.usefixtures("one_thread")

LOUD = "Q"  # its embedding has one channel, so that a norm makes it large
QUIET = ("the sum of two", "a list of names", "return the value", "for each line")
FIRST = "model.layers.0.self_attn.q_proj.input"


@pytest.fixture(scope="module")
def planted(tiny_model: Path, shared: Shared) -> Path:
    """A model, and in `calibration` its `fp8-static` scales of text without `LOUD`."""

    def build(path: Path) -> None:
        ids = load_tokenizer(Checkpoint.open(tiny_model))(LOUD)["input_ids"]

        def change(tensors: Tensors) -> Tensors:
            name = "model.embed_tokens.weight"
            codes = tensors[name].codes.copy()
            codes[ids] = 0
            codes[ids, 3] = 0x3F80  # 1 in BF16
            return tensors | {name: Tensor("BF16", codes)}

        path.mkdir(parents=True)
        rewrite_model(tiny_model, path / "model", change)
        texts = [f"{text} {number}" for text in QUIET for number in range(4)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (path / "samples.jsonl").write_text(lines)
        calibrate(path, "calibration", Recipe.load("fp8-static"))

    return shared.directory("planted-domains", build)


def calibrate(path: Path, name: str, recipe: Recipe) -> Path:
    run(
        Options(
            model=path / "model",
            samples=path / "samples.jsonl",
            out=path / name,
            recipe=recipe,
            count=12,
            allow_few_samples=True,
            predict=False,
        )
    )
    return path / name


def write_stream(path: Path, *domains: str) -> Path:
    """Writes four samples for each of `domains`, in order."""
    texts = {"loud": [f"{text} {LOUD}" for text in QUIET], "quiet": list(QUIET)}
    lines = [{"domain": domain, "text": text} for domain in domains for text in texts[domain]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replayed(planted: Path, stream: Path, **settings: Any) -> Replay:
    options = ReplayOptions(
        calibration=planted / "calibration",
        samples=stream,
        model=planted / "model",
        batch_size=2,
        **settings,
    )
    return replay(validate_replay(options), options)


@pytest.fixture(scope="module")
def shifted(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Replay:
    stream = write_stream(tmp_path_factory.mktemp("s") / "s.jsonl", "quiet", "quiet", "loud")
    return replayed(planted, stream, history=1, algorithm="most_recent")


def test_a_planted_shift_is_seen_where_it_is(shifted: Replay) -> None:
    assert shifted.ordered == ["loud", "quiet"]
    ratio, name = shifted.change("loud")
    assert name == FIRST and ratio > 1.5
    assert shifted.differing[0] == FIRST
    effects = shifted.tensors[FIRST].effects
    assert effects["loud", "frozen"].saturated > 0
    # only the first of the two steps of this domain has a scale of the other domain
    assert effects["loud", "delayed"].saturated > 0
    errors = {rule: effects["loud", rule].relative_error for rule in RULES}
    assert 5 * errors["current"] < errors["delayed"] < 0.8 * errors["frozen"]
    assert all(effects[domain, "current"].saturated == 0 for domain in shifted.domains)
    assert effects["quiet", "frozen"].saturated == 0
    assert shifted.compared[FIRST].worst == ("quiet", "loud")
    assert (shifted.domains["quiet"].steps, shifted.domains["loud"].samples) == (4, 4)


def test_the_figures_are_those_of_the_histogram_of_all_samples(
    planted: Path, shifted: Replay
) -> None:
    """Frozen scales are one scale, so folding steps must equal measuring all text at once."""
    checkpoint = Checkpoint.open(planted / "model")
    rows = load_tokenizer(checkpoint)([f"{text} {LOUD}" for text in QUIET])["input_ids"]
    batches = make_batches(rows, ["line"] * 4, batch_size=2)
    observed = observe_checkpoint(checkpoint, batches, dtype="bfloat16")
    for name, tensor in shifted.tensors.items():
        histogram = Histogram(observed.histograms[name].sum(axis=0), "bfloat16")
        np.testing.assert_array_equal(tensor.histogram("loud").counts, histogram.counts)
        quality, effect = measure(histogram, E4M3, tensor.frozen), tensor.effects["loud", "frozen"]
        assert effect.saturated == round(quality.saturated * histogram.total)
        assert effect.underflow == round(quality.underflow * histogram.total)


def test_a_replay_of_the_calibration_samples_finds_its_scales(
    planted: Path, tmp_path: Path
) -> None:
    """Each tensor's own scale of that domain is the frozen one, to the bit; nothing saturates."""
    lines = (planted / "samples.jsonl").read_text().splitlines()[:12]
    text = "".join(json.dumps({"domain": "same", **json.loads(line)}) + "\n" for line in lines)
    (tmp_path / "s.jsonl").write_text(text)
    found = replayed(planted, tmp_path / "s.jsonl")
    scales = Calibration.load(planted / "calibration").scales
    for name, tensor in found.tensors.items():
        assert found.compared[name].scales == {"same": tensor.frozen}
        assert tensor.frozen == float(scales[f"{name.removesuffix('.input')}.input_scale"])
        assert tensor.effects["same", "frozen"].saturated == 0
    assert found.change("same")[0] == 1.0
    assert "one domain" in found.notes[-1]


def test_divergence_follows_saturation(planted: Path, tmp_path: Path) -> None:
    """Rounding costs least with current scales, and most where frozen ones saturate."""
    stream = write_stream(tmp_path / "s.jsonl", "quiet", "loud")
    found = replayed(planted, stream, history=4, divergence=True)
    kl = {key: mean.mean for key, mean in found.kl.items()}
    assert set(kl) == {(domain, rule) for domain in ("loud", "quiet") for rule in RULES}
    assert all(0 < value < 1 for value in kl.values())
    assert kl["loud", "frozen"] > 2 * kl["loud", "current"]
    assert kl["quiet", "frozen"] < 2 * kl["quiet", "current"]
    error = found.kl["loud", "frozen"].error
    assert error is not None and 0 < error < kl["loud", "frozen"]


def test_an_interrupted_replay_reports_the_samples_until_then(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = write_stream(tmp_path / "s.jsonl", "quiet", "loud", "quiet")
    monkeypatch.setattr("calibrate.replay._TOGETHER", 1)  # step of two samples at a time
    counts, calls = _Runner.counts, iter([False, False, False, True])

    def interrupted(*given: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return counts(*given)

    monkeypatch.setattr(_Runner, "counts", interrupted)
    found = replayed(planted, stream)
    assert found.interrupted and found.as_json()["interrupted"]
    assert {name: domain.samples for name, domain in found.domains.items()} == {
        "quiet": 4,
        "loud": 2,
    }
    said = "interrupted after 6 of 12 samples"
    assert said in found.notes[0] and said in render_page(found)
    calls = iter([True])
    with pytest.raises(KeyboardInterrupt):  # nothing to report yet
        replayed(planted, stream)


@pytest.mark.parametrize("columns", [60, 100])
def test_the_command_the_page_and_the_json_agree(
    columns: int, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, page = write_stream(tmp_path / "s.jsonl", "quiet", "loud"), tmp_path / "page.html"
    base = ("replay", planted / "calibration", "--model", planted / "model", "--samples", stream)
    options = (*base, "--history", 4, "--margin", 1, "--batch-size", 2)
    done = octet(*options, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["delayed"] == {"history": 4, "algorithm": "max", "margin": 1}
    assert [row["domain"] for row in data["domains"]] == ["loud", "quiet"]
    assert data["tensors"][0]["tensor"] == FIRST
    loud = data["tensors"][0]["domains"]["loud"]
    assert loud["rules"]["frozen"]["saturated"] > 0 == loud["rules"]["current"]["saturated"]
    assert loud["with_scale_of"]["quiet"]["saturated"] > 0
    shown = octet(*options, "--html", page)
    assert shown.returncode == 0, shown.stderr
    said, text = " ".join(shown.stdout.split()), page.read_text()
    ratio = f"{data['domains'][0]['farthest_scale']['ratio']:.3g} times the calibration's"
    assert ratio in said and ratio in text.replace("&#x27;", "'")
    assert "quiet on loud" in said and "quiet on loud" in text
    assert "…" not in said and len(shown.stdout.splitlines()) < (75 if columns < 80 else 30)
    assert text.count("<svg") == 6 and "<script" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--algorithm", "mean"), "'mean' is not one of 'max', 'most_recent'"),
        (("--history", 0), "'--history': Input should be greater than or equal to 1"),
        (("--margin", 9), "'--margin': Input should be less than or equal to 8"),
        (("--samples", "none.jsonl"), "none.jsonl: no such file"),
        (("--html", "none/page.html"), "there is no directory none"),
    ],
)
def test_mistakes_end_in_one_line(
    options: tuple[Any, ...], said: str, planted: Path, tmp_path: Path
) -> None:
    stream = write_stream(tmp_path / "s.jsonl", "quiet")
    base = ("replay", planted / "calibration", "--model", planted / "model", "--samples", stream)
    done = octet(*base, *options)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_the_calibration_report_leads_to_it(planted: Path) -> None:
    for name in ("report.json", "report.html"):
        text = (planted / "calibration" / name).read_text()
        assert "`octet replay` shows what other text does to static scales" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named(planted: Path, tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "s.jsonl", "quiet")
    base = ("replay", planted / "calibration", "--model", planted / "model", "--samples", stream)
    done = octet(*base, "--device", "cuda")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--device cuda: torch finds no GPU" in done.stderr


def test_a_full_gpu_is_an_error_of_one_line(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    monkeypatch.setattr("calibrate.replay.RuleCosts", full)
    stream = write_stream(tmp_path / "s.jsonl", "quiet")
    with pytest.raises(ConfigError, match=r"^CUDA out of memory: .*leave out --divergence"):
        replayed(planted, stream, divergence=True)


def rescaled(planted: Path, out: Path, *options: str) -> None:
    base = (planted / "calibration", "--model", planted / "model", "--no-predict", "-o", out)
    done = octet("rescale", *base, *options)
    assert done.returncode == 0, done.stderr


def test_a_recipe_without_static_scales_is_refused(planted: Path, tmp_path: Path) -> None:
    """But its E4M3 cache has static scales, which are replayed alone."""
    stream = write_stream(tmp_path / "s.jsonl", "quiet", "loud")
    rescaled(planted, tmp_path / "dynamic", "--recipe", "fp8")
    base = ("--model", planted / "model", "--samples", stream)
    done = octet("replay", tmp_path / "dynamic", *base)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "recipe fp8 scales activations at run time, per token or group" in done.stderr
    assert f"octet rescale {tmp_path / 'dynamic'} --recipe fp8-static" in done.stderr
    rescaled(planted, tmp_path / "cache", "--recipe", "fp8", "--kv", "e4m3")
    done = octet("replay", tmp_path / "cache", *base, "--divergence", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    kinds = {row["tensor"].rpartition(".")[2] for row in data["tensors"]}
    assert kinds == {"key", "value"}
    assert data["domains"][0]["rules"]["frozen"]["kl"]["mean"] > 0


def test_nan_in_a_step_names_tensor_and_line(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's channel overflows with `LOUD` alone; the model stands for the calibrated one."""
    block = "model.layers.0"

    def change(tensors: Tensors) -> Tensors:
        changed = dict(tensors)
        for projection in "qkv":  # do not read the channel
            name = f"{block}.self_attn.{projection}_proj.weight"
            codes = tensors[name].codes.copy()
            codes[:, 3] = 0
            changed[name] = Tensor("BF16", codes)
        codes = tensors[f"{block}.input_layernorm.weight"].codes.copy()
        codes[3] = (125 + 127) << 7  # 2^125 in BF16
        changed[f"{block}.input_layernorm.weight"] = Tensor("BF16", codes)
        return changed

    rewrite_model(planted / "model", tmp_path / "model", change)
    monkeypatch.setattr(ModelIdentity, "require", lambda self, checkpoint: None)
    stream = write_stream(tmp_path / "s.jsonl", "quiet", "loud")
    base = ("replay", planted / "calibration", "--model", tmp_path / "model", "--samples", stream)
    done = octet(*base, "-o", tmp_path / "p.html")
    assert done.returncode == NumericsError("").exit_code and not done.stdout
    last = done.stderr.splitlines()[-1]
    assert f"{FIRST} holds 0 NaN and" in last and "s.jsonl, line" in last
    assert not (tmp_path / "p.html").exists()


def test_a_margin_of_the_recipe_is_head_room(planted: Path, tmp_path: Path) -> None:
    """Scales are 8 times those without, and the planted shift saturates nothing."""
    recipe = tmp_path / "room.yaml"
    activations = "{granularity: tensor, margin: 3}"
    recipe.write_text(f"name: room\nweights: {{granularity: tensor}}\nactivations: {activations}\n")
    rescaled(planted, tmp_path / "room", "--recipe", str(recipe))
    before, after = (
        Calibration.load(x).scales for x in (planted / "calibration", tmp_path / "room")
    )
    inputs = [name for name in before if name.endswith(".input_scale")]
    assert inputs and all(after[name] == 8 * before[name] for name in inputs)
    assert all((after[x] == before[x]).all() for x in before if x not in inputs)
    stream = write_stream(tmp_path / "s.jsonl", "quiet", "loud")
    options = ReplayOptions(calibration=tmp_path / "room", samples=stream, model=planted / "model")
    found = replay(validate_replay(options), options)
    assert found.outcome("loud", "frozen").saturated == 0
    assert found.change("quiet")[0] <= 1  # the margin is in both scales
