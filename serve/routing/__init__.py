"""Routes a request to a backend: pools, their members, and each member's health and proof."""

from serve.backends.factory import make_backend
from serve.members.member import Lease, Member
from serve.routing.policies import Ask
from serve.routing.pool import Pool
from serve.routing.retry_budget import RetryBudget
from serve.routing.route import Route, Routes

__all__ = ["Ask", "Lease", "Member", "Pool", "RetryBudget", "Route", "Routes", "make_backend"]
