"""Makes and tracks each backend: its load, its circuit breaker and what was proven of it.

Start with `member.py`.
"""
