"""Writes the report of a calibration, for the terminal and as an HTML page.

`document.py` collects the data of both.
"""
