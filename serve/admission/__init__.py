"""Decides whether a request may begin now: token budgets of pools, a fair queue, and memory.

An estimate of a request's tokens goes in; a ticket comes out, or an error with a time to retry
after. Start with `admission.py`.
"""
