"""Compares the two tokenizers of a checkpoint on the samples: AutoTokenizer's and tokenizer.json.

From release 5 on, transformers builds the tokenizer of some model types (Qwen2's, GPT-2's) from the
vocabulary alone, and ignores how tokenizer.json splits text; release 4 read all of it, and so do
`octet serve` and other engines. Octet uses tokenizer.json where the two differ: the model's authors
wrote it, and the golden records are checked with it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibrate.samples.sample import Sample
from calibrate.samples.tokens import quiet, rendered
from octet.errors import CheckpointError
from octet.model.checkpoint import Checkpoint

__all__ = ["tokenizer_as_served"]

_RESAVE = (
    'python -c "from transformers import AutoTokenizer;'
    " AutoTokenizer.from_pretrained('{path}', trust_remote_code=False).save_pretrained('{path}')\""
)


def tokenizer_as_served(
    tokenizer: Any, checkpoint: Checkpoint, samples: Sequence[Sample]
) -> tuple[Any, tuple[str, ...]]:
    """Returns the tokenizer whose tokens are those of tokenizer.json, and warnings.

    That is `tokenizer` unless it differs on a sample. Raises CheckpointError if none can be made.
    """
    import tokenizers

    path = checkpoint.path / "tokenizer.json"
    resave = _RESAVE.format(path=checkpoint.path)
    if not path.exists():
        return tokenizer, (
            f"no tokenizer.json in {checkpoint.path}: vLLM serves it, but `octet serve` cannot;"
            f" write it with {resave}",
        )
    try:
        stored = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises plain Exception
        raise CheckpointError(f"{path}: not a usable tokenizer ({error})") from None
    stored.no_truncation()
    stored.no_padding()
    found = _difference(tokenizer, stored, samples)
    if found is None:
        return tokenizer, ()
    name = type(tokenizer).__name__
    plain = _from_file(checkpoint.path)
    if _difference(plain, stored, samples) is not None:
        raise CheckpointError(
            f"{checkpoint.path}: transformers' {name} gives other tokens than tokenizer.json:"
            f" {found}; vLLM would serve the former, `octet serve` the latter. Make tokenizer.json"
            f" agree: {resave}"
        )
    return plain, (
        f"two tokenizers: transformers' {name} (chosen by config.json's model_type or"
        f" tokenizer_class) gives other tokens than tokenizer.json: {found}. Octet uses"
        " tokenizer.json, in `octet serve` too; vLLM, SGLang and TensorRT-LLM load what"
        " transformers chooses, and the gateway refuses them then. If"
        f" {name} is right, calibrate again after {resave}",
    )


def _from_file(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    with quiet():
        return PreTrainedTokenizerFast.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )


def _difference(tokenizer: Any, stored: Any, samples: Sequence[Sample]) -> str | None:
    """Returns where the tokens of a sample differ first; None if they never do."""
    for sample, (text, special) in zip(samples, rendered(samples, tokenizer), strict=True):
        expected = stored.encode_batch([text], add_special_tokens=special)[0].ids
        try:
            ids = tokenizer([text], add_special_tokens=special, verbose=False)["input_ids"][0]
        except Exception as error:  # the binding raises plain Exception, as for a missing <unk>
            return f"{sample.origin} fails ({str(error).splitlines()[0]})"
        if ids != expected:
            pairs = zip([*ids, None], [*expected, None], strict=False)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            ours, theirs = (_token(stored, x, at) for x in (ids, expected))
            return f"{sample.origin}, token {at}: {ours} instead of {theirs}"
    return None


def _token(stored: Any, ids: Sequence[int], at: int) -> str:
    return f"{ids[at]} {stored.id_to_token(ids[at])!r}" if at < len(ids) else "the end"
