"""Build the tokenizer, the token arrays and the sample files from Python's standard library.

    python examples/python-lm/prepare.py

The corpus is the standard library of the interpreter that runs this script: CPython 3.11 for the
committed files. Files are split whole, by a hash of their path, so no text that the model was
trained on reaches a sample. Writes, beside this script,

    model/tokenizer.json, model/tokenizer_config.json
    samples/calibration.jsonl   512 lines of {"text": ..., "source": "json/decoder.py"}
    samples/heldout.jsonl       128 lines
    training_files.txt          the paths in the training split

and `train.npy` and `validation.npy` (uint16 token ids, one stream) into `.data/python-lm/`, which
git ignores. The validation stream is the text of the calibration files: training looks at it to
choose a checkpoint, so that the held-out files stay unseen by every choice.
"""

import argparse
import hashlib
import json
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / ".data" / "python-lm"
SEPARATOR = "<|endoftext|>"
VOCAB_SIZE = 4096
SPLITS = {"heldout": 4, "calibration": 9, "train": 87}  # percent of the files
SAMPLES = {"heldout": 128, "calibration": 512}
# (share, shortest, longest) of a sample in tokens: the lengths that a server sees are mixed.
LENGTHS = [(0.15, 32, 256), (0.70, 384, 512), (0.15, 800, 1000)]

# Not prose and not code: generated tables, other programs' output, and what the build wrote.
EXCLUDED = (
    "encodings/",
    "pydoc_data/",
    "site-packages/",
    "config-",
    "_sysconfigdata",
    "lib2to3/tests/data/",
    "html/entities.py",
    "test/encoded_modules/",
    "idlelib/idle_test/example",
)
# A line break is a token of its own and so is a whole indentation, so that a prompt may end after
# either; a word takes one space or dot before it; digits come in groups of three.
PATTERN = r"\n|(?<![^\n])[ \t]+|[ .]?_*\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"


def corpus() -> Iterator[tuple[str, str]]:
    """Yield (path relative to the library, text) of each usable file, in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(EXCLUDED):
            continue
        try:
            with tokenize.open(path) as file:  # honours the encoding declared in the file
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # a test's deliberately broken file
        digest = hashlib.sha256(text.encode()).hexdigest()
        is_table = sum(map(str.isdigit, text)) > 0.15 * len(text)
        if len(text) < 200 or is_table or digest in seen:
            continue
        seen.add(digest)
        yield name, text


def split_of(name: str) -> str:
    """Return the split of a file: a pure function of its path."""
    point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100
    for split, percent in SPLITS.items():
        if point < percent:
            return split
        point -= percent
    raise AssertionError("SPLITS must add up to 100")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE: lossless on any text, no prefix space, no automatic special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "eos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Join the texts into one stream of ids, uint16 [tokens], a separator before each text."""
    separator = tokenizer.token_to_id(SEPARATOR)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [separator, *encoding.ids]
    return np.array(ids, dtype=np.uint16)


def chunks(tokenizer: Tokenizer, text: str, rng: random.Random) -> Iterator[str]:
    """Cut a file into runs of whole lines of the drawn lengths, without overlap."""
    shares = [share for share, _, _ in LENGTHS]
    lines = text.splitlines(keepends=True)
    costs = [len(encoding.ids) for encoding in tokenizer.encode_batch(lines)]
    start = 0
    while start < len(lines):
        _, low, high = rng.choices(LENGTHS, shares)[0]
        target = rng.randint(low, high)
        end, size = start, 0
        while end < len(lines) and size + costs[end] <= target:
            size += costs[end]
            end += 1
        chunk = "".join(lines[start:end]).strip("\n")
        tokens = len(tokenizer.encode(chunk).ids)
        if low <= tokens <= high:
            yield chunk
        start = max(end, start + 1)


def draw_samples(
    tokenizer: Tokenizer, files: dict[str, str], count: int, seed: int
) -> list[dict[str, str]]:
    """Draw `count` samples, one file after the other so that many files are heard."""
    rng = random.Random(seed)
    names = sorted(files)
    rng.shuffle(names)
    pools = {name: list(chunks(tokenizer, files[name], rng)) for name in names}
    samples: list[dict[str, str]] = []
    while len(samples) < count:
        before = len(samples)
        for name in names:
            if pools[name] and len(samples) < count:
                text = pools[name].pop(rng.randrange(len(pools[name])))
                samples.append({"text": text, "source": name})
        if len(samples) == before:
            raise SystemExit(f"the split holds only {before} samples, {count} are needed")
    rng.shuffle(samples)  # any prefix of the file is a fair draw
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the token arrays")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    splits: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    for name, text in corpus():
        splits[split_of(name)][name] = text
    tokenizer = train_tokenizer(list(splits["train"].values()))
    save_tokenizer(tokenizer, HERE / "model")

    args.data.mkdir(parents=True, exist_ok=True)
    for split, file in (("train", "train.npy"), ("calibration", "validation.npy")):
        stream = token_stream(tokenizer, list(splits[split].values()))
        np.save(args.data / file, stream)
        size = sum(len(text.encode()) for text in splits[split].values())
        print(f"{file}: {len(splits[split])} files, {len(stream):,} tokens, {size:,} bytes")

    (HERE / "samples").mkdir(exist_ok=True)
    for split, count in SAMPLES.items():
        samples = draw_samples(tokenizer, splits[split], count, args.seed)
        sources = {sample["source"] for sample in samples}
        assert not sources & splits["train"].keys(), "a sample comes from a training file"
        path = HERE / "samples" / f"{split}.jsonl"
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        lengths = [len(e.ids) for e in tokenizer.encode_batch([s["text"] for s in samples])]
        print(f"{path.name}: {count} samples of {min(lengths)} to {max(lengths)} tokens, "
              f"{sum(lengths):,} in all, from {len(sources)} files")  # fmt: skip
    names = "".join(f"{name}\n" for name in sorted(splits["train"]))
    (HERE / "training_files.txt").write_text(names)


if __name__ == "__main__":
    main()
