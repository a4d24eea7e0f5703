"""Which backend is asked next: pools, their members, and what is known about each."""

from serve.routing.ask import Ask
from serve.routing.budget import RetryBudget
from serve.routing.lease import Lease
from serve.routing.make import make_backend
from serve.routing.member import Member
from serve.routing.pool import Pool
from serve.routing.route import Route, Routes

__all__ = ["Ask", "Lease", "Member", "Pool", "RetryBudget", "Route", "Routes", "make_backend"]
