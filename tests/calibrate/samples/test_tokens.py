"""Texts and conversations become the tokens that the model is served with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from calibrate.samples import tokenizer_check
from calibrate.samples.sample import Sample
from calibrate.samples.tokenizer_check import tokenizer_as_served
from calibrate.samples.tokens import encode, load_tokenizer, tokenize
from octet.errors import CheckpointError, SampleError
from octet.model.checkpoint import Checkpoint

HI: dict[str, Any] = {"role": "user", "content": " Hi!\nBye. "}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "def f(): ..."}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role\nhere') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer(example_model: Path) -> Any:
    """The example's tokenizer as a chat model has it: adds BOS and EOS, brings a template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(example_model / "tokenizer.json"),
        bos_token="<|begin|>",
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=TEMPLATE,
    )
    bos, eos = (
        (name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|begin|>", "<|endoftext|>")
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|endoftext|>", special_tokens=[bos, eos]
    )
    return tokenizer


def ids_of(tokenizer: Any, *samples: Sample) -> list[list[int]]:
    return list(encode(samples, tokenizer, vocab_size=len(tokenizer)))


def test_a_conversation_has_the_tokens_of_the_chat_template(chat_tokenizer: Any) -> None:
    conversation = [HI, ANSWER, HI]
    (ids,) = ids_of(chat_tokenizer, Sample("", "line 1", tuple(conversation)))
    expected = chat_tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert ids == expected
    assert ids.count(chat_tokenizer.bos_token_id) == 1
    assert chat_tokenizer.eos_token_id not in ids  # the template writes none


def test_texts_and_conversations_keep_their_order(chat_tokenizer: Any) -> None:
    samples = [
        Sample(f"text {n}", f"line {n}", (HI, ANSWER) if n % 3 == 0 else ()) for n in range(150)
    ]
    together = ids_of(chat_tokenizer, *samples)
    assert together == [ids_of(chat_tokenizer, sample)[0] for sample in samples]
    assert together[1] == chat_tokenizer("text 1")["input_ids"]


def test_a_text_with_special_tokens_of_its_own_gets_no_second_ones(chat_tokenizer: Any) -> None:
    bos, eos = chat_tokenizer.bos_token_id, chat_tokenizer.eos_token_id
    plain, rendered, closed, twice = ids_of(
        chat_tokenizer,
        Sample("import os", "line 1"),
        Sample("<|begin|>import os", "line 2"),
        Sample("import os<|endoftext|>", "line 3"),
        Sample("<|begin|><|begin|>import os", "line 4"),
    )
    assert plain == rendered == closed
    assert (plain[0], plain[-1]) == (bos, eos)
    assert twice[:3] == [bos] * 3  # what is written twice is meant


def test_a_model_without_a_template_is_calibrated_as_it_is_served(
    tokenizer: Any, tiny_model: Path
) -> None:
    from serve.engine.tokenizer import Tokenizer

    (ids,) = ids_of(tokenizer, Sample("", "line 1", (HI,)))
    served = Tokenizer.load(tiny_model).chat_prompt([HI])
    assert list(served[: len(ids)]) == ids  # then the gateway opens the assistant's answer
    assert tokenizer.decode(ids) == "### User:\nHi!\nBye.\n\n"


def test_a_template_that_refuses_names_the_sample(chat_tokenizer: Any) -> None:
    system = Sample("", "line 7", ({"role": "system", "content": "x"},))
    with pytest.raises(SampleError, match=r"line 7: the chat template refuses .*: no system role$"):
        ids_of(chat_tokenizer, Sample("fine", "line 1"), system)


def test_a_lone_surrogate_that_only_the_template_reads(chat_tokenizer: Any) -> None:
    with pytest.raises(SampleError, match=r"line 7: the chat template refuses .*surrogates"):
        ids_of(chat_tokenizer, Sample("", "line 7", ({"role": "\ud800", "content": "x"},)))


@pytest.mark.parametrize("template", ["{% if", "{{ messages[9].content }}", "{{ 1 + 'a' }}"])
def test_a_broken_template_names_the_sample(template: str, example_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(example_model)
    tokenizer.chat_template = template
    with pytest.raises(SampleError, match="line 7: the chat template refuses"):
        ids_of(tokenizer, Sample("", "line 7", (HI,)))


def test_tokens_are_the_tokenizers_cut_at_the_limit(tokenizer: Any) -> None:
    text = "def f(x):\n    return x\n" * 5
    whole, cut = (
        tokenize([Sample(text, "line 1")], tokenizer, max_length=length, vocab_size=4096)[0]
        for length in (512, 7)
    )
    assert whole == tokenizer(text)["input_ids"]
    assert cut == whole[:7]


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Any) -> None:
    with pytest.raises(CheckpointError, match="do not belong together"):
        tokenize([Sample("import os", "line 1")], tokenizer, max_length=8, vocab_size=10)


def test_a_text_without_tokens_is_refused() -> None:
    def empty(texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in texts]}

    with pytest.raises(SampleError, match="line 3"):
        tokenize([Sample("?", "line 3")], empty, max_length=8, vocab_size=10)


def test_code_in_a_checkpoint_is_never_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would ask on the terminal whether to run it, and do so after a "y"."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    marker = tmp_path / "executed"
    (model / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
    }
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(Checkpoint.open(model))
    assert not marker.exists()


@pytest.fixture
def qwen2(tiny_model: Path, tmp_path: Path) -> Path:
    """Files for whose model_type transformers ignores how tokenizer.json splits text."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "qwen2"))
    edit(model / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    return model


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def served(model: Path, *texts: str) -> tuple[Any, tuple[str, ...]]:
    """Returns what `calibrate` and `evaluate` encode these samples with, and the warnings."""
    checkpoint = Checkpoint(model, {}, None, ())  # type: ignore[arg-type]
    samples = [Sample(text, f"line {line}") for line, text in enumerate(texts, 1)]
    return tokenizer_as_served(load_tokenizer(checkpoint), checkpoint, samples)


def test_tokenizer_json_decides_where_transformers_makes_another_one(qwen2: Path) -> None:
    text = "x = 12345"
    tokenizer, (warning,) = served(qwen2, "x", text)
    stored = Tokenizer.from_file(str(qwen2 / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == stored.encode(text).ids
    assert warning.startswith("two tokenizers: transformers' Qwen2Tokenizer (chosen by config.json")
    assert "tokenizer.json: line 2, token " in warning and " instead of " in warning
    assert "vLLM, SGLang and TensorRT-LLM load what transformers chooses" in warning


def test_the_command_of_the_warning_makes_the_two_agree(qwen2: Path) -> None:
    _, (warning,) = served(qwen2, "x = 12345")
    code = warning.partition('python -c "')[2].removesuffix('"')
    exec(code, {})  # "from transformers import AutoTokenizer; ..."
    tokenizer, warnings = served(qwen2, "x = 12345")
    assert type(tokenizer).__name__ == "Qwen2Tokenizer" and not warnings


def test_samples_on_which_they_agree_say_nothing(qwen2: Path, tiny_model: Path) -> None:
    assert served(qwen2, "x")[1] == () and served(tiny_model, "x = 12345")[1] == ()


def test_a_difference_that_no_class_of_transformers_avoids_is_refused(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As special tokens are that tokenizer_config.json adds and tokenizer.json does not."""
    auto = load_tokenizer(Checkpoint(qwen2, {}, None, ()))  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer_check, "_from_file", lambda path: auto)
    with pytest.raises(CheckpointError, match=r"Qwen2Tokenizer gives .*\. Make .* agree: python"):
        served(qwen2, "x = 12345")


def test_without_tokenizer_json_only_other_engines_serve(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer = load_tokenizer(Checkpoint.open(model))
    (model / "tokenizer.json").unlink()
    samples = [Sample("x", "line 1")]
    _, (warning,) = tokenizer_as_served(tokenizer, Checkpoint.open(model), samples)
    assert "vLLM serves it, but `octet serve` cannot; write it with python" in warning


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("version https://git-lfs.github.com/spec/v1\nsize 9\n", "json: a Git LFS pointer"),
        ('{"version": "1.0"}', "no usable tokenizer in .*tokenizer.json.*; copy all"),
        ("{", "no usable tokenizer in .*tokenizer.json.*; copy all"),
    ],
)
def test_a_tokenizer_that_is_damaged_is_refused(
    content: str, line: str, tiny_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=line):
        load_tokenizer(Checkpoint.open(model))
