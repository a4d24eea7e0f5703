"""Triton's vLLM backend on the checkpoint beside this file, wherever tritonserver was started.

The backend hands model.json to vLLM as it is, and vLLM takes `model` from the working directory,
which is tritonserver's: so this goes to its own directory first. Nothing else is changed.
"""

import contextlib
import importlib.util
import locale
import os
import sys

import triton_python_backend_utils as pb_utils

# The stub's interpreter takes every text file for ASCII otherwise; torch's own are not.
with contextlib.suppress(locale.Error):  # where there is no such locale
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

# backends/python has pb_utils, backends/vllm beside it has the backend and its `utils`.
BACKEND = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(pb_utils.__file__))), "vllm")
SOURCE = os.path.join(BACKEND, "model.py")
if not os.path.isfile(SOURCE):
    raise RuntimeError(f"Triton's vLLM backend is not installed: there is no {SOURCE}")
sys.path.insert(0, BACKEND)
spec = importlib.util.spec_from_file_location("triton_vllm_backend", SOURCE)
backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backend)


class TritonPythonModel(backend.TritonPythonModel):
    def initialize(self, args):
        here = os.path.abspath(pb_utils.get_model_dir())
        pb_utils.get_model_dir = lambda: here  # which may have been relative
        sys.path[:] = [os.path.abspath(path) for path in sys.path]
        os.chdir(here)
        super().initialize(args)
