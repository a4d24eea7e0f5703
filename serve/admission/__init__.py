"""Decides whether a request may begin now: token budgets of pools, a fair queue, and memory."""
