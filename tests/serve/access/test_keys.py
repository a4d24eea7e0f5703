"""Tests which API keys are accepted, and that only hashes are stored."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octet.errors import RequestError
from serve.access.keys import ANONYMOUS, Keys
from serve.config import Access, KeyConfig
from tests.serve.clock import Clock
from tests.serve.conftest import serving
from tests.serve.upstreams import Scripted


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str = "team", key: str = "octet-secret", **more: Any) -> KeyConfig:
    return KeyConfig(name=name, sha256=digest(key), **more)


class Route(NamedTuple):
    name: str
    aliases: tuple[str, ...] = ()
    tier_aliases: Mapping[str, str] = {}


def status_of(keys: Keys, header: bytes | None) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        keys.authenticate(header)
    assert caught.value.code == "invalid_api_key"
    return caught.value.status, str(caught.value)


async def test_two_authorization_headers_are_refused_on_every_path() -> None:
    access = {"keys": [{"name": "team", "sha256": digest("octet-secret")}]}
    keys = [b"authorization: Bearer octet-secret", b"authorization: Bearer other"]
    body = b'{"model": "fake", "prompt": "x"}'
    async with serving(("fake", [Scripted(b"{}")]), access=access) as served:
        port = int(served.url.rpartition(":")[2])
        for line in (b"GET /v1/models", b"GET /v1/models/fake", b"POST /v1/completions"):
            for both in (keys, keys[::-1]):
                fields = [b"host: x", b"connection: close", *both]
                fields.append(b"content-length: %d" % (len(body) if b"POST" in line else 0))
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = b"\r\n".join([line + b" HTTP/1.1", *fields, b"", b""])
                writer.write(head + (body if b"POST" in line else b""))
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 400") and b"invalid_authorization" in answer


def test_without_keys_everybody_may_ask() -> None:
    for header in (None, b"Bearer whatever", b"\xff"):
        assert Keys().authenticate(header) is ANONYMOUS
    assert ANONYMOUS.name == "anonymous" and ANONYMOUS.headers() == {}
    ANONYMOUS.require_model(Route("any"))


@pytest.mark.parametrize(
    "header", [b"Bearer octet-secret", b"bearer octet-secret", b"BEARER  octet-secret "]
)
def test_a_known_key_is_let_in_by_its_name(header: bytes) -> None:
    keys = Keys([entry("other", "octet-other"), entry(priority=3, weight=2.5)])
    who = keys.authenticate(header)
    assert (who.name, who.priority, who.weight) == ("team", 3, 2.5)


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic octet-secret", b"x"])
def test_no_key_is_a_401_that_says_how(header: bytes | None) -> None:
    status, message = status_of(Keys([entry()]), header)
    assert status == 401 and "Authorization: Bearer" in message


@pytest.mark.parametrize(
    "header",
    [
        b"Bearer octet-secre",
        b"Bearer octet-secret2",
        b"Bearer \xff\x00",
        b"Bearer " + b"x" * 60_000,
    ],
)
def test_an_unknown_key_is_a_401_that_does_not_repeat_it(header: bytes) -> None:
    status, message = status_of(Keys([entry()]), header)
    assert (status, message) == (401, "the API key is not one of this server's")


@pytest.mark.parametrize("key", ["octet-secret", "octet-guess"])
def test_every_key_is_compared_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: str, right: str) -> bool:
        compared.append((len(left), right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys([entry()])
    if key == "octet-secret":
        keys.authenticate(b"Bearer octet-secret")
    else:
        status_of(keys, f"Bearer {key}".encode())
    assert compared == [(64, digest(key))]


@pytest.mark.parametrize("zone", [UTC, None])
def test_an_expired_key_is_refused_from_that_moment_on(zone: Any) -> None:
    expires = datetime(2027, 1, 1, tzinfo=zone)  # without a zone it is UTC
    wall = Clock(datetime(2027, 1, 1, tzinfo=UTC).timestamp() - 0.5)
    keys = Keys([entry(expires=expires)], wall=wall)
    assert keys.authenticate(b"Bearer octet-secret").name == "team"
    wall.now += 0.5
    assert status_of(keys, b"Bearer octet-secret") == (401, "the API key 'team' has expired")


@pytest.mark.parametrize("allowed", [("llama", "qwen"), ("fast", "qwen")])
def test_an_alias_counts_as_its_model(allowed: tuple[str, ...]) -> None:
    who = Keys([entry(models=allowed)]).authenticate(b"Bearer octet-secret")
    who.require_model(Route("llama", aliases=("fast", "cheap")))
    with pytest.raises(RequestError) as caught:
        who.require_model(Route("mistral", aliases=("large",)))
    error = caught.value
    assert (error.status, error.code, error.param) == (403, "model_not_allowed", "model")
    assert str(error).endswith(f"'mistral'; it may use: {', '.join(allowed)}")


def test_a_key_without_a_list_may_use_every_model_and_an_empty_one_none() -> None:
    header = b"Bearer octet-secret"
    Keys([entry()]).authenticate(header).require_model(Route("any"))
    with pytest.raises(RequestError, match="it may use: none"):
        Keys([entry(models=())]).authenticate(header).require_model(Route("any"))


async def test_a_reload_forgets_nothing_that_was_spent() -> None:
    header = b"Bearer octet-secret"
    before = Keys([entry(requests_per_minute=2, max_in_flight=9)])
    await before.authenticate(header).charge(10)
    after = Keys([entry(requests_per_minute=3), entry("new", "octet-new")], before=before)
    who = after.authenticate(header)
    assert who.headers()["x-ratelimit-remaining-requests"] == "2"
    # The old configuration, should the reload fail, is as it was.
    assert before.authenticate(header).headers()["x-ratelimit-remaining-requests"] == "1"


async def test_quotas_are_remembered_by_the_file(tmp_path: Path) -> None:
    access = Access(keys=(entry(tokens_per_day=100),), usage_file=tmp_path / "usage.json")
    keys = Keys.from_config(access)
    charge = await keys.authenticate(b"Bearer octet-secret").charge(60)
    assert charge is not None
    charge.release()
    keys.close()
    assert Keys.from_config(access, before=keys).usage is keys.usage
    moved = access.model_copy(update={"usage_file": tmp_path / "moved.json"})
    for again in (Keys.from_config(access), Keys.from_config(moved, before=keys)):
        with pytest.raises(RequestError, match="40 of today's 100 tokens are left"):
            await again.authenticate(b"Bearer octet-secret").charge(60)


def test_an_empty_keys_file_does_not_open_the_door(tmp_path: Path) -> None:
    status, _ = status_of(Keys.from_config(Access(keys_file=tmp_path / "keys.yaml")), None)
    assert status == 401
