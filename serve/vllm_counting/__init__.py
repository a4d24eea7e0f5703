"""Counts live activations inside vLLM, for `octet drift`, where OCTET_COUNT names a directory.

vLLM loads `register` in each of its processes, where Octet is installed beside it. Start reading
at `plugin.py`, which hooks the model of a worker.
"""

import os

__all__ = ["register"]


def register() -> None:
    """Makes vLLM's workers count, in its first model runner, if the environment says where."""
    if os.environ.get("OCTET_COUNT"):
        from serve.vllm_counting.plugin import patch_workers

        # The second runner, the default of some releases for a GPU, counts in eager mode only.
        # vLLM decides after it has loaded its plugins.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        patch_workers()
