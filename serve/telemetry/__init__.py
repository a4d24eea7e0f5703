"""Observability of the gateway: metrics, traces and logs."""
