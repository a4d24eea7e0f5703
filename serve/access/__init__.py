"""Access control: API keys, the models they may use, their rates and their quotas.

`keys.py` finds the sender of a request, whose `rates.py` decides whether it may begin. Several
gateways share one limit through Redis: `shared.py` holds the connection, `leases.py` a key's part.
"""
