"""Finds the Kubernetes API server: from a pod's service account, or from a kubeconfig file.

The formats: https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/
and https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/.
"""

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from octet.errors import ConfigError

__all__ = ["Cluster", "find_cluster"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Cluster:
    """An API server, and the credentials for it."""

    url: str
    namespace: str
    tls: ssl.SSLContext | None = None  # None: plain HTTP
    # Reads the bearer token, before each request: a file's token expires, and is replaced there.
    token: Callable[[], str | None] = lambda: None


def find_cluster(kubeconfig: Path | None = None, context: str | None = None) -> Cluster:
    """Finds the cluster as kubectl does, the service account of a pod first.

    Raises ConfigError, which names the file and the entry that cannot be used.
    """
    if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        return _in_cluster()
    if kubeconfig is None:
        first = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
        kubeconfig = Path(first) if first else Path.home() / ".kube" / "config"
        if not kubeconfig.exists():
            raise ConfigError(
                f"no Kubernetes cluster: this is no pod with a service account, and {kubeconfig}"
                " does not exist; give --kubeconfig FILE"
            )
    return _of_kubeconfig(kubeconfig, context)


def _in_cluster() -> Cluster:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT")
    host = f"[{host}]" if ":" in host else host
    token = SERVICE_ACCOUNT / "token"
    _text(token)  # an unmounted token is an error now
    return Cluster(
        f"https://{host}:{port or 443}",
        _text(SERVICE_ACCOUNT / "namespace"),
        _tls(str(SERVICE_ACCOUNT), ca=_text(SERVICE_ACCOUNT / "ca.crt")),
        lambda: _text(token),
    )


def _of_kubeconfig(path: Path, context: str | None) -> Cluster:
    try:
        document = yaml.safe_load(_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: not a kubeconfig file")
    name = context or document.get("current-context")
    if not name:
        raise ConfigError(f"{path}: has no current-context; give --context NAME")
    found = _entry(path, document, "context", name)
    cluster = _entry(path, document, "cluster", found.get("cluster"))
    user = _entry(path, document, "user", found["user"]) if found.get("user") else {}
    url = str(cluster.get("server") or "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{path}: cluster {found.get('cluster')}: server is no URL")
    for kind in ("exec", "auth-provider"):
        if kind in user and "token" not in user:
            raise ConfigError(
                f"{path}: user {found['user']} gets its credentials from a program ({kind}), which"
                " Octet does not run: run it in a pod, or `kubectl proxy` and give --kubeconfig a"
                " file with server: http://127.0.0.1:8001"
            )
    tls = None
    if url.startswith("https://"):
        tls = _tls(
            str(path),
            ca=_data(path, cluster, "certificate-authority"),
            certificate=_data(path, user, "client-certificate"),
            key=_data(path, user, "client-key"),
            insecure=cluster.get("insecure-skip-tls-verify") is True,
        )
    file = user.get("tokenFile")
    static = user.get("token")
    return Cluster(
        url.rstrip("/"),
        str(found.get("namespace") or "default"),
        tls,
        (lambda: _text(path.parent / str(file))) if file else (lambda: static and str(static)),
    )


def _entry(path: Path, document: dict[str, Any], kind: str, name: object) -> dict[str, Any]:
    entries = document.get(f"{kind}s")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name:
            found = entry.get(kind)
            if isinstance(found, dict):
                return found
    raise ConfigError(f"{path}: has no {kind} named '{name}'")


def _data(path: Path, entry: dict[str, Any], key: str) -> str | None:
    """Returns what a PEM entry holds: inline in Base64, or in a file beside the kubeconfig."""
    inline, file = entry.get(f"{key}-data"), entry.get(key)
    if inline:
        try:
            return base64.b64decode(str(inline), validate=True).decode()
        except (binascii.Error, ValueError):
            raise ConfigError(f"{path}: {key}-data is not Base64 of a PEM file") from None
    return _text(path.parent / str(file)) if file else None


def _tls(
    origin: str,
    *,
    ca: str | None,
    certificate: str | None = None,
    key: str | None = None,
    insecure: bool = False,
) -> ssl.SSLContext:
    """Makes the TLS context from PEM texts. `origin` names their source in errors."""
    try:
        context = ssl.create_default_context(cadata=ca)
        if insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # of this user alone
                file.write(f"{certificate}\n{key or ''}")
                file.flush()
                context.load_cert_chain(file.name)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{origin}: its certificates cannot be used ({reason})") from None
    return context


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"{path}: {reason}") from None
