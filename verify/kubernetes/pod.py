"""Reads a pod as a prover needs it, and makes the patch that reports on its server.

A pod with `readinessGates: [{conditionType: octet.dev/proven}]` is ready, and gets traffic, only
while that condition is "True" (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Self

__all__ = ["ANNOTATIONS", "CONDITION", "Pod", "Report"]

CONDITION = "octet.dev/proven"
# Annotations. `proven-server` holds the server that was proven: a condition that is "True" for
# another one is outdated.
ANNOTATIONS = tuple(
    f"octet.dev/{name}" for name in ("artifact", "settings", "divergence", "proven-server")
)
_LONGEST = 1000  # characters of a message


@dataclass(frozen=True)
class Report:
    """Holds the condition and annotations that a pod should have."""

    status: Literal["True", "False"]
    reason: str  # in CamelCase, for machines
    message: str
    annotations: Mapping[str, str | None]  # of `ANNOTATIONS`; None: it is removed


@dataclass(frozen=True)
class Pod:
    """A pod of the API, as far as a prover reads it."""

    name: str
    uid: str
    version: str  # resource version
    ip: str | None
    port: int | None  # None: it has no container port of the wanted name
    container: str | None  # ID of the running container that serves; None: none runs
    ready: bool  # whether that container's own readiness probe succeeds
    leaving: bool  # it is being deleted, or has ended
    gated: bool  # its readiness waits for the condition
    condition: Mapping[str, Any] = field(default_factory=dict)  # as it is now
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, item: Mapping[str, Any], port: str, condition: str = CONDITION) -> Self:
        """Reads an object of the API; `port` is a number, or the name of a container's port.

        Raises ValueError, TypeError, KeyError or AttributeError for an object that is no pod.
        """
        metadata, spec, status = item["metadata"], item["spec"], item.get("status") or {}
        # A sidecar that serves, such as a proxy, is an init container.
        declared = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
        running = [
            *(status.get("containerStatuses") or ()),
            *(status.get("initContainerStatuses") or ()),
        ]
        number, owner = _port(declared, port)
        first = declared[0]["name"] if declared else None
        serving = [entry for entry in running if entry["name"] == (owner or first)]
        found = serving[0] if serving else {}
        runs = "running" in (found.get("state") or {}) and found.get("containerID")
        return cls(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            version=str(metadata["resourceVersion"]),
            ip=status.get("podIP") or None,
            port=number,
            container=str(found["containerID"]) if runs else None,
            ready=found.get("ready") is True,
            leaving="deletionTimestamp" in metadata
            or status.get("phase") in ("Succeeded", "Failed"),
            gated=any(
                gate.get("conditionType") == condition for gate in spec.get("readinessGates") or ()
            ),
            condition=next(
                (c for c in status.get("conditions") or () if c.get("type") == condition), {}
            ),
            annotations={
                name: str(value)
                for name, value in (metadata.get("annotations") or {}).items()
                if name in ANNOTATIONS
            },
        )

    @property
    def url(self) -> str | None:
        """Returns the server's URL; None while nothing can be reached."""
        if self.ip is None or self.port is None or self.container is None:
            return None
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{self.port}"

    @property
    def server(self) -> str | None:
        """Identifies the server: another container or address is another server."""
        return self.url and f"{self.container} {self.url}"

    def says(self, report: Report) -> bool:
        """Decides whether its condition and annotations say what `report` says."""
        said = (self.condition.get(key) for key in ("status", "reason", "message"))
        wanted = (report.status, report.reason, report.message[:_LONGEST])
        kept = {name: text for name, text in report.annotations.items() if text is not None}
        return tuple(said) == wanted and dict(self.annotations) == kept

    def patch(
        self, report: Report, condition: str = CONDITION, now: datetime | None = None
    ) -> dict[str, Any]:
        """Returns a strategic merge patch for the pod's status; conditions merge by their type.

        The API server refuses it (422) for another pod of the same name, and "True" (409) for
        any other version of the pod, too: its container may have been restarted.
        """
        at = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
        changed = self.condition.get("status") != report.status
        # A null for an annotation of a pod without any would become "".
        annotations = {
            name: text
            for name, text in report.annotations.items()
            if text is not None or name in self.annotations
        }
        metadata: dict[str, Any] = {"uid": self.uid, "annotations": annotations}
        if report.status == "True":
            metadata["resourceVersion"] = self.version
        return {
            "metadata": metadata,
            "status": {
                "conditions": [
                    {
                        "type": condition,
                        "status": report.status,
                        "reason": report.reason,
                        "message": report.message[:_LONGEST],
                        "lastProbeTime": at,
                        "lastTransitionTime": at
                        if changed
                        else self.condition.get("lastTransitionTime", at),
                    }
                ]
            },
        }


def _port(containers: list[Mapping[str, Any]], port: str) -> tuple[int | None, str | None]:
    """Returns the number of the port, and the container that declares it; None: none does."""
    for container in containers:
        for entry in container.get("ports") or ():
            if port in (str(entry.get("containerPort")), entry.get("name")):
                return int(entry["containerPort"]), str(container["name"])
    return (int(port) if port.isdigit() else None), None
