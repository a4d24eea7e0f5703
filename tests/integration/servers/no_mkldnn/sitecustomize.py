"""Turns off oneDNN in torch, for the processes of a vLLM server on a CPU with AMX.

There torch 2.13 gives FP8 products with one scale to oneDNN, whose reference kernel takes 2 s for 16
rows of 256 by 2,048. Without oneDNN torch multiplies them itself, as on other CPUs.
"""

import torch

torch.backends.mkldnn.enabled = False
