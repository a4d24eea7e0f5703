"""What clients are told of backends that fail: members by name, never by address."""

from octet.errors import BackendUnavailable, OctetError
from serve.api.relay import AnsweredFailure
from serve.routing.member import Member
from serve.routing.pool import Pool

__all__ = ["unavailable", "without_address"]


def unavailable(pool: Pool) -> BackendUnavailable:
    return BackendUnavailable(
        f"no backend of the pool '{pool.name}' is available now",
        retry_after_s=pool.retry_after_s(),
    )


def without_address(error: OctetError, member: Member) -> OctetError:
    """`error` naming the member as clients know it: addresses are nobody's business."""
    kind_and_address = member.backend.name
    address = kind_and_address.split(" ", 1)[-1]
    bare = address.partition("://")[2] or address
    answer = error.answer if isinstance(error, AnsweredFailure) else None
    text = str(error)
    for shown in (kind_and_address, address, bare):
        text = text.replace(shown, member.name)
        if answer is not None:
            answer.first = answer.first.replace(shown.encode(), member.name.encode())
    if text != str(error):
        error.args = (text,)
    return error
