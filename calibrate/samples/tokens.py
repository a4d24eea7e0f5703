"""Turns samples into token ids: texts as the tokenizer encodes them, conversations as served.

A conversation is rendered by the chat template, which writes the special tokens itself, and is then
encoded without any further ones. A model without a template is served with the plain default of
octet.model.chat_template, which writes none. In that case the tokenizer adds its own, in
calibration as in the gateway.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from calibrate.samples.sample import Sample
from octet.errors import CheckpointError, SampleError
from octet.model.chat_template import DEFAULT_TEMPLATE
from octet.model.checkpoint import Checkpoint
from octet.storage.files import LFS_POINTER, is_lfs_pointer, open_file

__all__ = ["check_tokenizer_files", "encode", "load_tokenizer", "quiet", "rendered", "tokenize"]

_TOGETHER = 64  # samples encoded in one call: enough to keep the tokenizer's threads busy


def tokenize(
    samples: Sequence[Sample], tokenizer: Any, *, max_length: int, vocab_size: int
) -> list[list[int]]:
    """Returns the token ids of each sample, cut at `max_length`."""
    return [ids[:max_length] for ids in encode(samples, tokenizer, vocab_size=vocab_size)]


def encode(samples: Sequence[Sample], tokenizer: Any, *, vocab_size: int) -> Iterator[list[int]]:
    """Yields all token ids of each sample in turn, with special tokens, none of them doubled.

    Raises SampleError, naming the sample, if the chat template refuses it or it has no token.
    Raises CheckpointError if the tokenizer belongs to another model.
    """
    for start in range(0, len(samples), _TOGETHER):
        group = samples[start : start + _TOGETHER]
        for sample, ids in zip(group, _encode(group, tokenizer), strict=True):
            if not ids:
                raise SampleError(f"{sample.origin}: the tokenizer makes no token of its text")
            if max(ids) >= vocab_size:
                raise CheckpointError(
                    f"{tokenizer.name_or_path}: the tokenizer gives token {max(ids)}, the model has"
                    f" {vocab_size}: they do not belong together; copy the model's own tokenizer"
                )
            yield ids


def _encode(samples: Sequence[Sample], tokenizer: Any) -> Iterator[list[int]]:
    """Encodes in two calls: one with special tokens added and one without."""
    texts = rendered(samples, tokenizer)
    encoded: dict[bool, Iterator[list[int]]] = {}
    for special in {special for _, special in texts}:
        chosen = [text for text, chosen in texts if chosen == special]
        encoded[special] = iter(
            tokenizer(
                chosen, add_special_tokens=special, return_attention_mask=False, verbose=False
            )["input_ids"]
        )
    for text, special in texts:
        ids = list(next(encoded[special]))
        yield _without_doubled(ids, text, tokenizer) if special else ids


def rendered(samples: Sequence[Sample], tokenizer: Any) -> list[tuple[str, bool]]:
    """Returns the text of each sample, and whether the tokenizer adds its special tokens to it.

    It does not to a conversation, unless the default template rendered it, which writes none.
    """
    plain = not getattr(tokenizer, "chat_template", None)
    return [
        (_render(sample, tokenizer, plain), plain) if sample.messages else (sample.text, True)
        for sample in samples
    ]


def _without_doubled(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """Removes from `ids` the BOS or EOS that the tokenizer added to a text which has its own.

    Texts that a chat template once rendered begin with a BOS spelled out.
    """
    bos, eos = (getattr(tokenizer, name, None) for name in ("bos_token", "eos_token"))
    if bos and text.startswith(bos) and not text.startswith(bos * 2):
        twice = [tokenizer.bos_token_id] * 2
        ids = ids[1:] if ids[:2] == twice else ids
    if eos and text.endswith(eos) and not text.endswith(eos * 2):
        twice = [tokenizer.eos_token_id] * 2
        ids = ids[:-1] if ids[-2:] == twice else ids
    return ids


def _render(sample: Sample, tokenizer: Any, plain: bool) -> str:
    """Renders the conversation as text, ending where its last message ends."""
    try:
        text: str = tokenizer.apply_chat_template(
            list(sample.messages), tokenize=False, chat_template=DEFAULT_TEMPLATE if plain else None
        )
        text.encode()  # fails on a lone surrogate that only the template read
    except Exception as error:  # a template is a program, and may fail in any way
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        raise SampleError(
            f"{sample.origin}: the chat template refuses this conversation: {detail}"
        ) from None
    return text


def check_tokenizer_files(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if there are none, or one is a Git LFS pointer."""
    if not checkpoint.tokenizer_files:
        raise CheckpointError(
            f"{checkpoint.path}: no tokenizer files (tokenizer.json, ...); copy those of the model"
        )
    for path in checkpoint.tokenizer_files:
        with open_file(path) as file:
            if is_lfs_pointer(file.read(64)):
                raise CheckpointError(f"{path}: {LFS_POINTER}")


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Loads the checkpoint's transformers tokenizer; CheckpointError if none works."""
    from transformers import AutoTokenizer

    check_tokenizer_files(checkpoint)
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(
                checkpoint.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # what a damaged file raises is up to each tokenizer class
            detail = (str(error).splitlines() or [type(error).__name__])[0]
            files = ", ".join(path.name for path in checkpoint.tokenizer_files)
            raise CheckpointError(
                f"{checkpoint.path}: no usable tokenizer in {files}; copy all the tokenizer's files"
                f" of the model again, tokenizer.json above all ({detail.rstrip(': ')})"
            ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off transformers' warnings and progress bars; our own report shows what matters."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
