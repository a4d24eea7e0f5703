"""The committed example: what its README promises about the files, and what the model can do."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python-lm"
MODEL = EXAMPLE / "model"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"python_lm_{name}", EXAMPLE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_samples(split: str) -> list[dict[str, str]]:
    lines = (EXAMPLE / "samples" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_checkpoint_is_complete_and_small() -> None:
    _, info = AutoModelForCausalLM.from_pretrained(MODEL, output_loading_info=True)
    assert not any(info.values()), info
    assert (MODEL / "model.safetensors").stat().st_size < 16_000_000
    assert sum(path.stat().st_size for path in (EXAMPLE / "samples").iterdir()) < 3_000_000


def test_architecture_suits_fp8_kernels(model: PreTrainedModel) -> None:
    config = model.config
    assert 5_000_000 < model.num_parameters() < 8_000_000
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.head_dim == 64
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 1024
    projections = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(projections) == 7 * config.num_hidden_layers
    assert all(size % 128 == 0 for linear in projections for size in linear.weight.shape)


def test_samples_come_from_files_that_were_not_trained_on(tokenizer: Tokenizer) -> None:
    split_of = load_script("prepare").split_of
    trained = set((EXAMPLE / "training_files.txt").read_text().splitlines())
    assert len(trained) > 1000
    assert {split_of(name) for name in trained} == {"train"}
    for split, count in (("calibration", 512), ("heldout", 128)):
        samples = read_samples(split)
        assert len(samples) == len({sample["text"] for sample in samples}) == count
        assert not trained & {sample["source"] for sample in samples}
        assert {split_of(sample["source"]) for sample in samples} == {split}
        lengths = [len(e.ids) for e in tokenizer.encode_batch([s["text"] for s in samples])]
        assert min(lengths) >= 32
        assert max(lengths) <= 1000
        assert sum(384 <= length <= 512 for length in lengths) > count / 2


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self):\n\n        self.x = 'é—日本'  # ok\n\n\n\tx = 1234567\n",
        "  trailing  \n   \r\n\x00\x7f <|endoftext| >",
        "",
    ],
)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert AutoTokenizer.from_pretrained(MODEL)(text).input_ids == ids


def test_tokenizer_round_trips_every_sample(tokenizer: Tokenizer) -> None:
    texts = [
        sample["text"] for split in ("calibration", "heldout") for sample in read_samples(split)
    ]
    decoded = tokenizer.decode_batch([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    assert decoded == texts


def test_an_indentation_is_one_token(tokenizer: Tokenizer) -> None:
    for depth in (4, 8, 12, 16, 20):
        assert len(tokenizer.encode("\n" + " " * depth + "return").ids) == 3


def test_heldout_perplexity_is_the_recorded_one(
    model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    recorded = json.loads((EXAMPLE / "training.json").read_text())["heldout"]
    texts = [sample["text"] for sample in read_samples("heldout")[:16]]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    loss, predicted = load_script("evaluate").heldout_loss(model, ids)
    assert predicted == sum(map(len, ids)) - 16
    # 16 samples of 128: their mean differs from the whole set's by a few tenths of a nat.
    assert math.exp(loss) < 1.5 * recorded["perplexity"]


@pytest.mark.parametrize("prompt", ["def fibonacci(n):\n", "class Stack:\n    def __init__(self"])
def test_greedy_completion_compiles_as_python(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str
) -> None:
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False
    )
    lines = tokenizer.decode(tokens[0].tolist()).splitlines()
    longest = max(size for size in range(len(lines) + 1) if compiles("\n".join(lines[:size])))
    assert longest >= 3, "\n".join(lines)


def compiles(source: str) -> bool:
    try:
        compile(source, "completion", "exec")
    except SyntaxError:
        return False
    return True
