"""Verifies the files beside the weights: configuration, tokenizer, golden records."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import CheckpointError, OctetError
from octet.model.chat_template import (
    GENERATION_CONFIG,
    TEMPLATE_FILE,
    template_of,
    tokenizer_config,
)
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.storage.files import read_object
from verify.checks.findings import Verification
from verify.checks.original import Original

__all__ = ["check_side_files", "other_sizes"]

# Of a ModelSpec: what a quantizer may write differently without changing what is computed.
_FREE_SIZES = ("eos_token_ids", "max_positions")
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_TOKENIZERS = (_TOKENIZER, _CONFIG, "tokenizer.model", "tekken.json")
# What vLLM takes from generation_config.json, and the values that it takes without.
_NEUTRAL: dict[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "max_new_tokens": None,
}

# Keys that a tool may change without changing what the model computes.
_FREE = {
    "quantization_config",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}


def check_side_files(
    path: Path, manifest: Manifest | None, original: Original | None, found: Verification
) -> None:
    """Adds to `found` each file that is not the original's or the calibration's."""
    if manifest is not None:
        for name, digest in manifest.model.tokenizer.items():
            if name not in manifest.files:
                found.problem("files", name, "missing: the original's tokenizer has it")
            elif manifest.files[name] != digest:
                found.problem("files", name, "is not the original's tokenizer")
        for name, what in manifest.model.side_changes(path):
            if name not in manifest.model.tokenizer:  # else it is named above
                found.problem("files", name, what)
    if original is None:
        return
    _check_config(path, manifest is not None, original, found)
    if manifest is None:
        _check_by_content(path, original.checkpoint, found)
    calibration = original.calibration
    if manifest is None or calibration is None:
        return
    names = [GOLDEN_FILE, SCENARIOS_FILE]
    if manifest.details.get("quantized", True):  # the recipe's cost, which others do not have
        names.append(EXPECTED_FILE)
    for name in names:
        if calibration.manifest.files.get(name) != manifest.files.get(name):
            found.problem("files", name, "is not the calibration's")


def _check_config(path: Path, ours: bool, original: Original, found: Verification) -> None:
    """Compares config.json: all keys in Octet's files, in those of others the shared keys."""
    try:
        written = read_object(path / "config.json", CheckpointError)
    except CheckpointError as error:
        found.problem("files", "config.json", f"cannot be read: {error}")
        return
    before: dict[str, Any] = original.checkpoint.config
    keys = before.keys() | written.keys() if ours else before.keys() & written.keys() - _FREE
    for key in sorted(keys - {"quantization_config"}):
        if before.get(key) != written.get(key):
            what = f"{key} is {written.get(key)!r}, and {before.get(key)!r} in the original"
            found.problem("configuration", "config.json", what)
    if ours or found.problems:
        return
    with suppress(OctetError):  # a key that only one file has, or under another name
        for what in other_sizes(original.checkpoint.spec, written, str(path)):
            found.problem("configuration", "config.json", what)


def other_sizes(spec: ModelSpec, config: Mapping[str, Any], where: str) -> list[str]:
    """Lists the fields of `spec` that another tool's config.json gives other values.

    Raises UnsupportedError, naming `where`, for a config.json of no model that Octet knows.
    """
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    theirs = ModelSpec.from_config(plain, where).model_dump()
    return [
        f"{key} is {theirs[key]}, and {value} in the original"
        for key, value in spec.model_dump().items()
        if key not in _FREE_SIZES and theirs[key] != value
    ]


def _check_by_content(path: Path, original: Checkpoint, found: Verification) -> None:
    """Compares tokenizer, chat template and defaults, whose files other tools write anew."""
    comparisons = {GENERATION_CONFIG: _other_defaults}
    if any((path / name).is_file() for name in _TOKENIZERS):
        comparisons[TEMPLATE_FILE] = _other_template
        comparisons[_CONFIG] = _other_special_token
        if (original.path / _TOKENIZER).is_file():
            comparisons[_TOKENIZER] = _other_token
        else:
            found.notes.append(f"the original has no {_TOKENIZER}: tokenizers were not compared")
    else:
        found.notes.append("no tokenizer: a server needs the original's (vLLM: --tokenizer)")
    for name, compare in comparisons.items():
        try:
            what = compare(path, original)
        except ModuleNotFoundError as error:
            what = ""
            found.unchecked.append(
                f"{name}: {error.name} is not installed: pip install 'octet-llm[serve]'"
            )
        except OctetError as error:
            what = f"cannot be compared: {error}"
        if what:
            found.problem("files", name, what)


def _other_token(path: Path, original: Checkpoint) -> str:
    """Says which text `path` encodes differently from `original`; "" if none."""
    from serve.engine.tokenizer import Tokenizer  # what it imports may not be installed

    if not (path / _TOKENIZER).is_file():
        return "missing: the original has it"
    ours, theirs = (Tokenizer.load(x, template=False) for x in (original.path, path))
    added = ours.inner.get_added_tokens_decoder().values()
    text = "\n".join([*ours.plain_texts(), *(token.content for token in added)])
    for wanted, given in zip_longest(ours.encode(text), theirs.encode(text)):
        if given != wanted:
            token = "" if wanted is None else ours.token_bytes(wanted).decode(errors="replace")
            return f"encodes {token!r} as token {given}, and as {wanted} in the original"
    return ""


def _other_special_token(path: Path, original: Checkpoint) -> str:
    """Says whether BOS or EOS, which templates write and vLLM stops at, is another token."""
    wanted, given = (tokenizer_config(x) for x in (original.path, path))
    for name in ("bos_token", "eos_token"):
        ours, theirs = (
            token["content"] if isinstance(token, dict) and "content" in token else token
            for token in (wanted.get(name), given.get(name))
        )
        if theirs != ours:
            return f"{name} is {theirs!r}, and {ours!r} in the original"
    return ""


def _other_template(path: Path, original: Checkpoint) -> str:
    """Says how the chat template differs from the original's, if that has one; "" if it does not.

    Jinja drops the last newline.
    """
    wanted, given = (template_of(x) or "" for x in (original.path, path))
    if not wanted or given.removesuffix("\n") == wanted.removesuffix("\n"):
        return ""
    return "is not the original's chat template" if given else "missing: the original has one"


def _other_defaults(path: Path, original: Checkpoint) -> str:
    """Says which defaults of requests differ; "" if none."""
    wanted, given = (_defaults(x, original.config) for x in (original.path, path))
    differ = [key for key in wanted if given[key] != wanted[key]]
    return "; ".join(f"{x} is {given[x]}, and {wanted[x]} in the original" for x in differ)


def _defaults(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns what vLLM takes from generation_config.json, or without one from config.json."""
    file = directory / GENERATION_CONFIG
    given = read_object(file, CheckpointError) if file.is_file() else {}
    numbers = {key: x for key, x in given.items() if isinstance(x, int | float)}
    found = {key: numbers.get(key, neutral) for key, neutral in _NEUTRAL.items()}
    found["top_k"] = max(found["top_k"], 0)  # -1 is all, too
    stops = (given or config).get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    found["eos_token_id"] = sorted({x for x in stops if isinstance(x, int)})
    return found
