"""Which backend is asked next: pools, their members, and what is known about each."""

from serve.backends.factory import make_backend
from serve.members.member import Lease, Member
from serve.routing.policies import Ask
from serve.routing.pool import Pool
from serve.routing.retry_budget import RetryBudget
from serve.routing.route import Route, Routes

__all__ = ["Ask", "Lease", "Member", "Pool", "RetryBudget", "Route", "Routes", "make_backend"]
