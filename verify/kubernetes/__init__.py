"""Proves the servers of Kubernetes pods: `octet prove --kubernetes`.

Pods that a label selects come in; out goes a condition on each, for which its readiness gate waits.
`prover.py` has the main loop, `api.py` the protocol; `pod.py` reads and patches pods.
"""
