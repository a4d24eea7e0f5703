"""Knows and queries the hardware: CPU cores, compilers and logs of NVIDIA libraries.

`devices` and `support` are the hardware model, tables with sources: what each GPU is, and what each
engine does on it with a recipe and a cache. Read support.yaml first.
"""
