"""Who is let in, who is not, and that nothing but a hash is kept."""

import hashlib
import hmac
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octet.errors import ConfigError, RequestError
from serve.access.keys import Keys
from serve.access.principal import ANONYMOUS
from serve.config import Access, KeyConfig
from tests.serve.clock import Clock


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str = "team", key: str = "octet-secret", **more: Any) -> KeyConfig:
    return KeyConfig(name=name, sha256=digest(key), **more)


class Route(NamedTuple):
    name: str
    aliases: tuple[str, ...] = ()


def status_of(keys: Keys, header: bytes | None) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        keys.authenticate(header)
    assert caught.value.code == "invalid_api_key"
    return caught.value.status, str(caught.value)


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


def test_a_reload_forgets_nothing_that_was_spent() -> None:
    header = b"Bearer octet-secret"
    before = Keys([entry(requests_per_minute=2, max_in_flight=9)])
    before.authenticate(header).charge(10)
    after = Keys([entry(requests_per_minute=3), entry("new", "octet-new")], before=before)
    who = after.authenticate(header)
    assert who.headers()["x-ratelimit-remaining-requests"] == "2"
    # The old configuration, should the reload fail, is as it was.
    assert before.authenticate(header).headers()["x-ratelimit-remaining-requests"] == "1"


def test_keys_of_a_file_join_those_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- name: more\n  sha256: {digest('octet-more')}\n  expires: 2999-01-01\n")
    usage = tmp_path / "usage.json"
    access = Access(keys=(entry(tokens_per_day=100),), keys_file=path, usage_file=usage)
    keys = Keys.from_config(access)
    assert keys.authenticate(b"Bearer octet-more").name == "more"
    charge = keys.authenticate(b"Bearer octet-secret").charge(60)
    assert charge is not None
    charge.release()
    keys.close()
    again = Keys.from_config(access, before=keys)
    assert again.usage is keys.usage
    with pytest.raises(RequestError, match="40 of today's 100 tokens are left"):
        Keys.from_config(access).authenticate(b"Bearer octet-secret").charge(60)


BAD_FILES = {
    "absent": (None, "No such file"),
    "not UTF-8": (b"\xff\xfe", "not UTF-8 text"),
    "not YAML": (b"[a", "expected ',' or ']'"),
    "not a list": (b"keys: 3", "top level: should be a valid tuple"),
    "no digest": (b"- name: x", "0.sha256: Field required"),
    "a key instead of its hash": (b"- {name: x, sha256: octet-abc}", "0.sha256: String should"),
    "unknown field": (b"- {name: x, sha256: '%s', rate: 3}" % (b"0" * 64), "0.rate: "),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_keys_file_is_one_line(case: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Keys.from_config(Access(keys_file=path))
    assert str(caught.value).startswith(f"keys file {path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value) and "octet-abc" not in str(caught.value)


def test_the_same_name_or_key_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the name 'team' is there twice"):
        Keys([entry(), entry(key="octet-2")])
    with pytest.raises(ConfigError, match="'b' and 'a' are the same key"):
        Keys([entry("a"), entry("b")])


def test_an_empty_keys_file_does_not_open_the_door(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("# none yet\n")
    status, _ = status_of(Keys.from_config(Access(keys_file=path)), None)
    assert status == 401
