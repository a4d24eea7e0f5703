"""Compares running servers under the same load, in alternating rounds.

`rounds.py` takes servers and loads and returns the measured runs; `load.py` starts the load
generator, `figures.py` summarises the runs. Start reading at `rounds.py`.
"""
