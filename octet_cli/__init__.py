"""The command line: one file per command, which makes options, calls one function and prints.

`main.py` lists the commands.
"""
