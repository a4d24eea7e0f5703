"""Defines the embedded engine's interface to a runner, and the key-value cache."""
