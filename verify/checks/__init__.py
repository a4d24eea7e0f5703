"""Checks of an artifact: names, scales, numbers, graphs, caches and side files.

Each file judges one of them and adds to the findings in `findings.py`.
"""
