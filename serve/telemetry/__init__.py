"""Observability of the gateway: metrics, traces and logs.

Start with `observation.py`, which collects what each request adds to them.
"""
