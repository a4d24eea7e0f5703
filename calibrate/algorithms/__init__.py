"""Changes weights before they are rounded: SmoothQuant, AWQ and GPTQ through ModelOpt.

`apply.py` runs the algorithm that the recipe names.
"""
