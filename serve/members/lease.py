"""One request at one member, from when it is given to when it is given back."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octet.errors import BackendError

if TYPE_CHECKING:
    from serve.members.member import Member

__all__ = ["Lease"]


class Lease:
    """One request at one member. Its first outcome counts; without one, its client went away."""

    __slots__ = (
        *("_again", "_began", "_clock", "_epoch", "_generation", "_open", "_silent"),
        *("_undecided", "given_up", "member", "served", "tokens"),
    )

    def __init__(
        self, member: "Member", tokens: int, clock: Callable[[], float], *, again: bool = False
    ) -> None:
        self.member = member
        self.tokens = tokens
        self._clock = clock
        self._began = clock()
        self._epoch = member.breaker.begin()
        self._generation = member.generation
        self.served = 0  # tokens that were read and written for it, once they are known
        # Called where its backend is gone for good, as it seems, before a token came.
        self.given_up: Callable[[], None] = lambda: None
        self._again = again
        self._silent = self._undecided = True
        self._open = True
        member.waiting.add(self)
        member._took(tokens)

    @property
    def unsettled(self) -> bool:
        """Whether it may be another life of the backend that answers than the one it began with.

        Only where lives are told apart: an answer that begins then may be anybody's.
        """
        member = self.member
        if member.proof is None:
            return False
        return member.doubtful or member.generation != self._generation

    async def outlived(self) -> bool:
        """Whether the backend has another life by now; waits for the health check, if it looks."""
        await self.member.looked_into.wait()
        return self.member.generation != self._generation

    def progressed(self) -> None:
        """Tokens came: it is busy, not dead. The outcome is still to come."""
        self.member.last_success = self._clock()
        if self._silent and self._undecided:
            self._silent = False
            self.member.waiting.discard(self)
            self._epoch = self.member.breaker.progressed(self._epoch)

    def succeeded(self) -> None:
        if self._undecided:
            self._undecided = False
            self.member.last_success = self._clock()
            self.member.breaker.succeeded(self._epoch)

    def failed(self, error: BackendError) -> None:
        """Not for a request that the backend refused as its client's mistake."""
        if self._undecided:
            self._undecided = False
            self.member.failed(error, self._epoch, again=self._again)

    def release(self) -> None:
        """Always, and as often as one likes."""
        if self._open:
            self._open = False
            self.member.waiting.discard(self)
            if self._undecided:
                self._undecided = False
                self.member.breaker.abandoned(self._epoch)
            self.member.served_tokens += self.served
            self.member._gave_back(self.tokens, self._clock() - self._began)
