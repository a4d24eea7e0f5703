"""The gateway and its engines as an application of Ray Serve; start at `app.py`.

Ray routes and scales. A replica of an engine proves itself before Ray knows it (`engine.py`). A
replica of the gateway reaches all replicas of an engine as one backend (`gateway.py`,
`backend.py`). `cluster.py` deploys the application. Only these files import Ray, an extra.
"""
