"""Judges a machine for `octet doctor`: what runs on it, what does not, and the remedy.

In comes a `Machine` (`octet.hardware.machine`), and an artifact or a gateway's configuration; out
goes a `Diagnosis`. Start with `diagnose.py`.
"""
