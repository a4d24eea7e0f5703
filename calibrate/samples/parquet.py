"""Reads samples from tables: Parquet files, and datasets as `datasets.save_to_disk` writes them.

pyarrow reads both, a batch of rows at a time and only the wanted columns. A saved dataset is a
directory of Arrow streams that `state.json` lists in order; the `datasets` library itself is not
needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibrate.samples.sample import Fields, Sample, sample_of
from octet.errors import SampleError
from octet.storage.files import read_object

__all__ = ["read_arrow", "read_parquet", "shards"]

_ROWS = 64  # rows read at once; one row of a data set can be a whole book
_BUFFER = 1 << 20  # bytes of a column chunk read at once, instead of all of it


def shards(path: Path) -> tuple[Path, ...] | None:
    """Returns the files of a dataset that `save_to_disk` wrote to `path`, in order, or else None.

    Raises SampleError for a DatasetDict, naming its splits.
    """
    if (path / "dataset_dict.json").exists():
        splits = read_object(path / "dataset_dict.json", SampleError).get("splits") or []
        names = ", ".join(map(str, splits)) or "none"
        example = f", such as {path / str(splits[0])}" if splits else ""
        raise SampleError(f"{path}: has the splits {names}; name one{example}")
    if not (path / "state.json").exists():
        return None
    state = read_object(path / "state.json", SampleError)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise SampleError(f"{path}: rows chosen by an index; save it with a later datasets")
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(f, dict) for f in files):
        raise SampleError(f"{path / 'state.json'}: lists no data files")
    found = tuple(path / str(file.get("filename")) for file in files)
    for file in found:
        if not file.is_file():
            raise SampleError(f"{file}: no such file, but state.json lists it")
    return found


def read_parquet(files: Sequence[Path], fields: Fields) -> Iterator[Sample]:
    """Yields rows of `files` as samples; if one of the two columns is null, the other is used."""
    _need_pyarrow("a Parquet file")
    import pyarrow.parquet as pq

    for file in files:
        row = 0
        with (
            _arrow_errors(file, "Parquet"),
            pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER) as table,
        ):
            wanted = _wanted(table.schema_arrow, fields, file)
            for batch in table.iter_batches(_ROWS, columns=wanted, use_threads=False):
                yield from _samples(batch, fields, file, row, file.name)
                row += batch.num_rows


def read_arrow(files: Sequence[Path], fields: Fields) -> Iterator[Sample]:
    """Yields rows of the Arrow streams `files` as samples, numbered across all files."""
    _need_pyarrow("a saved dataset")
    import pyarrow as pa

    row = 0
    for file in files:
        with (
            _arrow_errors(file, "Arrow"),
            pa.memory_map(str(file)) as mapped,
            pa.ipc.open_stream(mapped) as stream,
        ):
            wanted = _wanted(stream.schema, fields, file)
            for batch in stream:
                chosen = batch.select(wanted)
                for start in range(0, chosen.num_rows, _ROWS):
                    part = chosen.slice(start, _ROWS)
                    yield from _samples(part, fields, file, row + start, file.parent.name)
                row += batch.num_rows


def _samples(batch: Any, fields: Fields, file: Path, first: int, name: str) -> Iterator[Sample]:
    for index in range(batch.num_rows):
        place = f"row {first + index}"
        try:
            record = {name: batch.column(name)[index].as_py() for name in batch.schema.names}
        except UnicodeDecodeError:
            raise SampleError(f"{file}, {place}: not UTF-8") from None
        messages = record.get(fields.messages)
        if isinstance(messages, list):
            record[fields.messages] = [_present(message) for message in messages]
        yield sample_of(record, fields, f"{file}, {place}", f"{name}, {place}")


def _present(message: object) -> object:
    """Removes null members: in a table every message has every member, null if it lacks it."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _wanted(schema: Any, fields: Fields, file: Path) -> list[str]:
    """Returns the columns to read. Raises SampleError for none, or one of an unsuitable type."""
    names = [name for name in (fields.text, fields.messages) if name in schema.names]
    if not names:
        raise SampleError(f"{file}: {fields.missing(schema.names, what='column')}")
    import pyarrow.types as types

    for name in names:
        kind = schema.field(name).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        value = getattr(value, "storage_type", value)
        is_text = any(
            check(value) for check in (types.is_string, types.is_large_string, types.is_string_view)
        )
        is_list = types.is_list(value) or types.is_large_list(value) or types.is_list_view(value)
        if name == fields.text and not (is_text or types.is_null(value)):
            raise SampleError(f"{file}: column '{name}' is {kind}, not text (--text-field chooses)")
        if name == fields.messages and not (is_list or types.is_null(value)):
            raise SampleError(
                f"{file}: column '{name}' is {kind}, not lists of messages"
                " (--messages-field chooses)"
            )
    return names


@contextmanager
def _arrow_errors(file: Path, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        detail = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SampleError(f"{file}: not a readable {kind} file ({detail})") from None


def _need_pyarrow(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise SampleError(f"{what} needs pyarrow: pip install 'octet-llm[datasets]'") from None
