"""One request, checked: what the operation and the backends need of it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.routing.route import Route

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """`body` is the checked form of `data`, which is the decoded form of `raw`."""

    id: str
    path: str
    raw: bytes
    data: dict[str, Any]
    body: Any
    route: "Route"
    headers: dict[str, str] = field(default_factory=dict)  # to send on: request id, traceparent
    streamed: bool = False  # the client asked for events, of an operation that has them

    @property
    def model(self) -> str:
        """The name that the client used: an alias is answered under itself."""
        model: str = self.data.get("model") or self.route.name
        return model
