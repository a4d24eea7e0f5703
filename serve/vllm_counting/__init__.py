"""Counts live activations inside vLLM, for `octet drift`, where OCTET_COUNT names a directory.

vLLM loads `register` in each of its processes, where Octet is installed beside it. Start reading
at `plugin.py`, which hooks the model of a worker.
"""

import os

__all__ = ["register"]


def register() -> None:
    """Patches vLLM's workers to count, if the environment says where."""
    if os.environ.get("OCTET_COUNT"):
        from serve.vllm_counting.plugin import patch_workers

        patch_workers()
