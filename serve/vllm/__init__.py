"""Starts vLLM on a checkpoint, with the flags that the checkpoint and the machine need.

Start with `server.py`, which runs it for as long as a block, or with `supervisor.py`, which keeps
it running.
"""
