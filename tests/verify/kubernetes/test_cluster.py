"""Where the API server is found, and what is wrong with files that do not say it."""

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from octet.errors import ConfigError
from verify.kubernetes import cluster as module
from verify.kubernetes.cluster import find_cluster


def written(directory: Path, **changed: Any) -> Path:
    """A kubeconfig with parts replaced."""
    document: dict[str, Any] = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "models"}}
        ],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:8001/"}}],
        "users": [{"name": "u", "user": {"tokenFile": "token"}}],
    }
    path = directory / "config"
    path.write_text(yaml.safe_dump(document | changed))
    return path


def user(**entries: Any) -> list[Any]:
    return [{"name": "u", "user": entries}]


def test_a_kubeconfig_names_the_cluster_and_its_token_is_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    found = find_cluster(written(tmp_path))
    assert (found.url, found.namespace, found.tls) == ("http://127.0.0.1:8001", "models", None)
    assert found.token() == "first"
    (tmp_path / "token").write_text("second\n")
    assert found.token() == "second"
    assert find_cluster(written(tmp_path, users=user(token="x"))).token() == "x"


def test_a_pod_finds_it_by_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="token: No such file or directory"):
        find_cluster()
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("models\n")
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="its certificates cannot be used"):
        find_cluster()
    some = ssl.create_default_context().get_ca_certs(binary_form=True)[0]
    (tmp_path / "ca.crt").write_text(ssl.DER_cert_to_PEM_cert(some))
    found = find_cluster()
    assert (found.url, found.namespace) == ("https://[fd00::1]:443", "models")
    assert found.token() == "t" and found.tls is not None


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"current-context": ""}, "has no current-context; give --context NAME"),
        ({"current-context": "away"}, "has no context named 'away'"),
        ({"clusters": []}, "has no cluster named 'c'"),
        ({"users": "none"}, "has no user named 'u'"),
        ({"clusters": [{"name": "c", "cluster": {"server": "x"}}]}, "cluster c: server is no URL"),
        ({"users": user(exec={"command": "aws"})}, r"from a program \(exec\), which Octet does"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        find_cluster(written(tmp_path, **changed))


def test_certificates_that_are_none(tmp_path: Path) -> None:
    for key, data, line in (
        ("certificate-authority-data", "?", "certificate-authority-data is not Base64"),
        ("certificate-authority", "absent.pem", "absent.pem: No such file"),
        (
            "certificate-authority-data",
            base64.b64encode(b"-----BEGIN CERTIFICATE-----\nx\n").decode(),
            "config: its certificates cannot be used",
        ),
    ):
        server = {"server": "https://127.0.0.1:6443", key: data}
        with pytest.raises(ConfigError, match=line):
            find_cluster(written(tmp_path, clusters=[{"name": "c", "cluster": server}]))


def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"no Kubernetes cluster: this is no pod .* --kubeconfig"):
        find_cluster()
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ConfigError, match="list: not a kubeconfig file"):
        find_cluster(tmp_path / "list")
