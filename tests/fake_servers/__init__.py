"""Fake vLLM, SGLang, TensorRT-LLM, Dynamo and Triton servers on real loopback sockets.

They answer with the fake model of `fakes.py`, write what the real servers were seen or read to
write (vLLM 0.32, Triton 2.51; the others' public sources), in code of their own, and misbehave on
demand: a prompt that begins with `!` names the misbehaviour.
"""

from tests.fake_servers.base import FakeServer, running
from tests.fake_servers.flavours import FLAVOURS, Flavour
from tests.fake_servers.openai import FakeOpenAI
from tests.fake_servers.tensorrt_llm import FakeTensorRtLlm
from tests.fake_servers.triton import FakeTriton

__all__ = [
    "FLAVOURS",
    "FakeOpenAI",
    "FakeServer",
    "FakeTensorRtLlm",
    "FakeTriton",
    "Flavour",
    "running",
]
