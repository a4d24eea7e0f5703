"""OpenAI's HTTP interface, and Anthropic's Messages: a checked request in, an answer out.

`operation.py` is the interface that each path implements; `request/exchange.py` handles one request
from its key to its last byte.
"""
