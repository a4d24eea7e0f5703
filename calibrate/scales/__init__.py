"""Derives scales from histograms and weights, and says whether they have converged.

Start with `derive.py`.
"""
