"""Changes weights before they are rounded: SmoothQuant, AWQ and GPTQ through ModelOpt, or training.

`apply.py` runs the algorithm that the options name. `student.py` is the model that
`calibrate.recover` trains.
"""
