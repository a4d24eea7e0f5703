"""Octet's embedded engine on the export beside this file; see ../config.pbtxt.

The Python that runs this needs Octet: pip install 'octet-llm[serve]'
"""

import triton_python_backend_utils as pb_utils

from serve.triton_entry import TritonEntry


class TritonPythonModel:
    def initialize(self, args):
        self.entry = TritonEntry.load(args, pb_utils)

    def execute(self, requests):
        self.entry.execute(requests)  # answers come through each request's response sender

    def finalize(self):
        self.entry.close()
