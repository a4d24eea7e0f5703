"""Knows what the hardware has: CPU cores, and compilers and logs of NVIDIA libraries."""
