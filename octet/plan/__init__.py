"""Sizes a deployment from a model's config alone: memory, GPUs, context, batch, speed and cost.

A model and what it should serve come in, a `Plan` with a row for each recipe and cache goes out.
Read `planner.py` first; `sizes.py` counts bytes, `vllm_memory.py` divides a GPU's memory,
`roofline.py` and `measured.py` estimate speed, `console.py` and `html.py` show the result.
"""
