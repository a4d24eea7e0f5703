"""From a request to tokens: the gateway, its backends and the embedded engine.

`run.py` starts the gateway. A request passes `http` (sockets), `access` (its key), `api` (its
fields, and its answer), `admission` (token budgets and a queue), `routing` (which chooses a
backend) and one of `backends`, such as the embedded `engine`.
"""
