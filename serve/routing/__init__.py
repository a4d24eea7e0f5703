"""Routes a request to a backend: pools, their members, and each member's health and proof."""

from serve.members.member import Member
from serve.routing.pool import Pool
from serve.routing.route import Route, Routes

__all__ = ["Member", "Pool", "Route", "Routes"]
