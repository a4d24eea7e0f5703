"""Opens what `octet evaluate` can score: a checkpoint, an export, a server.

`open.py` chooses one.
"""
