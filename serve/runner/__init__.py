"""Defines what a runner of the embedded engine is, and its cache of keys and values."""
