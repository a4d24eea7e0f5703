"""Counts the activations of the linear layers in exact histograms, on CPU and GPU.

Start with `sweep.py`, which goes through a checkpoint layer by layer.
"""
