"""What choosing a backend needs to know of a request."""

from dataclasses import dataclass

__all__ = ["Ask"]


@dataclass(frozen=True, slots=True)
class Ask:
    tokens: int  # of the prompt and of the longest answer, estimated
    # The prompt's first `routing.prefix_chars` characters; empty if they are not known.
    prefix: bytes = b""
    session: str = ""  # what the requests of one conversation have in common; empty if nothing
