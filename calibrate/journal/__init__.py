"""Keeps what a calibration has computed, so that an interrupted run continues.

`journal.py` writes it layer by layer; `distributed.py` merges the counts of several processes.
"""
