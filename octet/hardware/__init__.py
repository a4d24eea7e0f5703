"""Queries the hardware: CPU cores, and compilers and logs of NVIDIA libraries."""
