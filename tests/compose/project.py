"""docker-compose.yml on an engine of our own: started, watched, broken and stopped."""

import copy
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from tests.compose.engine import Engine, EngineError
from tests.compose.prepare import ROOT

__all__ = ["COMPOSE", "Change", "Project"]

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
Change = Callable[[dict[str, Any]], None]  # of the file's content, in place


def reduced(profiles: Collection[str]) -> dict[str, Any]:
    """Returns docker-compose.yml without other profiles, in the words that Compose 1.29 knows.

    It knows neither a project's `name`, nor `create_host_path`, nor a secret from a variable, which
    only Grafana has; and Grafana's image is not to be had. No other container would notice.
    """
    content = copy.deepcopy(COMPOSE)
    content.pop("name")
    content.pop("secrets")
    content["services"] = {
        name: service
        for name, service in content["services"].items()
        if set(profiles) & set(service["profiles"]) and name != "grafana"
    }
    for service in content["services"].values():
        for volume in service["volumes"]:
            if isinstance(volume, dict):
                volume["bind"] = {}
    return content


class Project:
    def __init__(self, engine: Engine, profiles: Collection[str], *changes: Change) -> None:
        self.engine = engine
        self.name = "octet-test"
        content = reduced(profiles)
        for change in changes:
            change(content)
        self._variables = {"COMPOSE_PROFILES": ",".join(profiles)}
        self._file = engine.directory / "docker-compose.yml"
        self._file.write_text(yaml.safe_dump(content))
        self.services = list(content["services"])

    def compose(self, *arguments: str | Path) -> str:
        command = ("docker-compose", "--project-directory", ROOT, "--project-name", self.name)
        return self.engine.run(*command, "--file", self._file, *arguments, **self._variables)

    def up(self, **variables: str) -> None:
        """Starts all services; `variables` fill in what the file leaves open."""
        self._variables |= variables
        try:
            self.compose("up", "--detach", "--no-build")
        except EngineError as error:
            raise EngineError(f"{error}\n{self.compose('logs', '--tail', '30')}") from None

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "20")

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"

    def state(self, service: str) -> dict[str, Any]:
        state: dict[str, Any] = self.engine.inspect(self.container(service))["State"]
        return state

    def health(self, service: str) -> str:
        health: str = self.state(service)["Health"]["Status"]
        return health

    def wait_healthy(self, *services: str, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        for service in services or self.services:
            while (health := self.health(service)) != "healthy":
                if time.monotonic() > deadline or self.state(service)["Status"] != "running":
                    raise EngineError(f"{service} is {health}: {self.logs(service)[-3000:]}")
                time.sleep(0.5)

    def logs(self, service: str) -> str:
        return self.engine.docker("logs", self.container(service))

    def docker(self, command: str, service: str, *arguments: str) -> str:
        """Runs a command of Docker on a service's container."""
        return self.engine.docker(command, *arguments, self.container(service))

    def execute(self, service: str, script: str) -> str:
        return self.engine.docker("exec", self.container(service), "sh", "-c", script)

    def disconnect(self, service: str, network: str) -> None:
        container = self.container(service)
        self.engine.docker("network", "disconnect", f"{self.name}_{network}", container)

    def connect(self, service: str, network: str) -> None:
        """Undoes `disconnect`; without the alias, nobody would find the service by its name."""
        where = (f"{self.name}_{network}", self.container(service))
        self.engine.docker("network", "connect", "--alias", service, *where)
