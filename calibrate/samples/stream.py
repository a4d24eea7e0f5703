"""Reads a stream of samples in the order of its file: JSONL whose lines name a domain."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.samples.sample import Fields, Sample, kind_of, sample_of
from calibrate.samples.source import open_source, read_records
from octet.errors import SampleError

__all__ = ["MOST_DOMAINS", "Stream", "open_stream", "steps_of"]

MOST_DOMAINS = 16  # each is compared with each other
_LONGEST = 40  # characters of a domain: it names a row of a table
_FIELD = "domain"


@dataclass(frozen=True)
class Stream:
    """A file of tagged samples. `samples` is their number by domain, in order of appearance.

    Samples without text are left out; `empty` is their number.
    """

    path: Path
    fields: Fields
    samples: dict[str, int]
    empty: int

    def read(self) -> Iterator[tuple[str, Sample]]:
        """Yields domain and sample of each line."""
        return (tagged for tagged in _read(self.path, self.fields) if not tagged[1].empty)


def open_stream(path: Path, fields: Fields) -> Stream:
    """Reads the whole file once, and keeps only the number of samples of each domain.

    Raises SampleError, in one line that names the place, for a line that lacks domain or text, for
    a stream without any sample, and for more than 16 domains.
    """
    source = open_source(path, fields)
    if source.kind != "JSONL":
        raise SampleError(
            f"{path}: {source.kind}; a stream is one JSONL file, with a domain and a text on each"
            " line"
        )
    samples: dict[str, int] = {}
    empty = 0
    for domain, sample in _read(path, fields):
        if sample.empty:
            empty += 1
            continue
        samples[domain] = samples.get(domain, 0) + 1
        if len(samples) > MOST_DOMAINS:
            raise SampleError(
                f"{path}: more than {MOST_DOMAINS} domains, such as {domain}; tag the samples with"
                " kinds of text, such as code and prose"
            )
    if not samples:
        what = f"all {empty} samples are empty" if empty else "is empty"
        raise SampleError(f"{path}: {what}; a stream needs a domain and a text on each line")
    return Stream(path, fields, samples, empty)


def steps_of(tagged: Iterable[tuple[str, Sample]], size: int) -> Iterator[tuple[str, list[Sample]]]:
    """Yields steps in order: up to `size` samples in succession that are of one domain."""
    step: list[Sample] = []
    current = ""
    for domain, sample in tagged:
        if step and (domain != current or len(step) == size):
            yield current, step
            step = []
        current = domain
        step.append(sample)
    if step:
        yield current, step


def _read(path: Path, fields: Fields) -> Iterator[tuple[str, Sample]]:
    for record, where, origin in read_records(path, path.name):
        domain = _domain(record, where)
        yield domain, sample_of(record, fields, where, origin)


def _domain(record: dict[str, Any], where: str) -> str:
    if _FIELD not in record:
        found = ", ".join(record) or "none"
        raise SampleError(
            f"{where}: no field '{_FIELD}'; it has: {found}. Each line of a stream names what kind"
            ' of text it is, such as {"domain": "code", "text": "..."}'
        )
    domain = record[_FIELD]
    if not isinstance(domain, str):
        raise SampleError(f"{where}: '{_FIELD}' is a JSON {kind_of(domain)}, not a string")
    if not (domain.strip() and len(domain) <= _LONGEST and domain.isprintable()):
        raise SampleError(f"{where}: '{_FIELD}' must be 1 to {_LONGEST} printable characters")
    return domain
