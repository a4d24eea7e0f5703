"""Measures what a fault costs the requests that are sent meanwhile, as a row of a table."""

from dataclasses import dataclass

from tests.compose.clients import Request

__all__ = ["HEAD", "Cost"]


@dataclass
class Cost:
    """What a fault did to the requests that were sent from before it until after it."""

    fault: str
    requests: list[Request]
    next_answer_s: float  # from the end of the fault until the backend has answered a request

    @property
    def complete(self) -> int:
        return sum(request.complete for request in self.requests)

    @property
    def broken(self) -> int:
        """Streams that ended in an error after tokens, which no gateway can repeat."""
        return sum(bool(r.tokens) and r.error is not None for r in self.requests)

    @property
    def lost(self) -> list[str]:
        """Errors of the requests that got no token: another backend should have answered."""
        return [r.error or "" for r in self.requests if not r.tokens and not r.complete]

    @property
    def unexplained(self) -> list[str]:
        """Streams that ended neither in [DONE] nor in an error event."""
        return [request.error or "" for request in self.requests if not request.ended]

    def row(self) -> str:
        waits = [request.first_token_s for request in self.requests if request.tokens]
        silence = max(request.longest_silence_s for request in self.requests)
        return (
            f"{self.fault:<44} {len(self.requests):>8} {self.complete:>8} {self.broken:>6} "
            f"{len(self.unexplained):>4} {len(self.lost):>4} {max(waits, default=0):>8.1f} s "
            f"{silence:>8.1f} s {self.next_answer_s:>9.1f} s"
        )


HEAD = (
    f"{'fault':<44} {'requests':>8} {'complete':>8} {'broken':>6} {'cut':>4} {'lost':>4} "
    f"{'1st token':>10} {'silence':>10} {'next answer':>11}"
)
