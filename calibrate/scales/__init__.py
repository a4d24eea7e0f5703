"""Derives scales from histograms and weights, and checks that they have converged.

Start with `derive.py`.
"""
