"""Speaks HTTP: sockets, ASGI, administration and the OpenAPI document.

Start with `app.py`.
"""
