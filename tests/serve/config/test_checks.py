"""Tests checks of the whole configuration: unknown names, duplicate names, and keys."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from octet.errors import ConfigError
from serve.config import checks
from tests.serve.config.test_config import POOL, VLLM, load, refusal

DIGEST, OTHER = "a" * 64, "b" * 64
KEY = f"{{name: k, sha256: {DIGEST}}}"


def own(more: str) -> str:
    """The file of one model on a pool of its own; `more` is the model's."""
    return f"models: {{m: {{pool: [{VLLM}], {more}}}}}"


def found_by(source: str) -> str:
    return f"models: {{m: {{pool: {{discover: [{{{source}}}]}}}}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"pools: {{fp8: {{backends: [{VLLM}]}}}}\nmodels: {{m: {{pool: fp}}}}",
            "models.m.pool: unknown pool 'fp'; did you mean 'fp8'?",
        ),
        (
            own("canary: [{pool: x, fraction: 0.1}]"),
            "models.m.canary.0.pool: unknown pool 'x'; known: m",
        ),
        (own("shadow: {pool: n}"), "models.m.shadow.pool: unknown pool 'n'"),
        (own("capture: {file: p, share: 0}"), "models.m.capture.share: should be greater than 0"),
        (
            own("capture: {file: p, redact: ['(']}"),
            "models.m.capture.redact.0: is no regular expression of Python: missing )",
        ),
        (
            own("capture: {file: p, redact: ['x*']}"),
            "models.m.capture.redact.0: matches an empty text",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], capture: {{file: p}}}},"
            f" n: {{pool: [{VLLM}], capture: {{file: ./p}}}}}}",
            "models.n.capture.file: is the file of the model 'm' too; give each its own",
        ),
        (own("fallback: [bf16]"), "models.m.fallback.0: unknown pool 'bf16'"),
        (own("fallback: [m]"), "models.m.fallback.0: 'm' is the model's pool already"),
        (
            f"pools: {{m: {{backends: [{VLLM}]}}}}\n{POOL}",
            "pools.m: the model 'm' has a pool of its own, which has that name",
        ),
        (
            "models: {m: {pool: [{type: vllm, url: 'http://h', name: a},"
            " {type: vllm, url: 'http://i', name: a}]}}",
            "models.m.pool.1.name: 'a' is there twice",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], aliases: [n]}}, n: {{pool: [{VLLM}]}}}}",
            "models.m.aliases.0: 'n' is already the name of a model",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], aliases: [a]}}, n: {{pool: [{VLLM}], aliases: [a]}}}}",
            "models.n.aliases.0: 'a' is already the name of an alias of 'm'",
        ),
        (
            f"pools: {{a: {{backends: [{VLLM}]}}, b: {{backends: [{VLLM}]}}}}\nmodels: {{m: {{pool:"
            f" [{VLLM}], canary: [{{pool: a, fraction: 0.7}}, {{pool: b, fraction: 0.4}}]}}}}",
            "models.m.canary: the fractions add up to 1.1, which is more than 1",
        ),
        (
            f"pools: {{p: {{backends: [{VLLM}]}}}}\nmodels: {{m: {{pool: p}}, n: {{pool: p}}}}",
            "pools.p.backends.0: set `model` to its name there: the models m, n use this pool",
        ),
        (
            f"{POOL}\naccess: {{keys: [{KEY}, {{name: k, sha256: {OTHER}}}]}}",
            "access.keys.1.name: 'k' is there twice",
        ),
        (
            f"{POOL}\naccess: {{keys: [{KEY}, {{name: j, sha256: {DIGEST}}}]}}",
            "access.keys.1.sha256: ",
        ),
        (
            f"{POOL}\naccess: {{keys: [{{name: k, sha256: {DIGEST}, models: [mm]}}]}}",
            "access.keys.0.models.0: unknown model 'mm'; did you mean 'm'?",
        ),
        (
            f"{POOL}\naccess: {{keys: [{{name: k, sha256: sk-not-hashed}}]}}",
            "access.keys.0.sha256: should be a SHA-256: 64 hexadecimal digits",
        ),
        (
            f"{POOL}\naccess: {{keys: [{KEY}]}}\nadmin: {{sha256: {DIGEST}}}",
            "admin.sha256: is also the key of a client",
        ),
        (f"{POOL}\nadmin: {{port: 8000}}", "admin.port: is the port that clients are served on"),
        (
            f"{POOL}\naccess: {{cors_origins: ['https://a/b']}}",
            "access.cors_origins.0: should be *",
        ),
        (f"{POOL}\ntraces: {{endpoint: collector}}", "traces.endpoint: must start with http"),
        (found_by("port: 1"), "models.m.pool.discover.0: should be a section with `dns` or `file`"),
        (
            found_by("dns: h, port: 1, backend: {type: vllm, modle: x}"),
            "models.m.pool.discover.0.backend.modle: unknown key; did you mean 'model'?",
        ),
        (
            found_by("dns: h, port: 1, backend: {type: embedded}"),
            "models.m.pool.discover.0.backend.type: an embedded engine has no address",
        ),
        (
            found_by("dns: h, port: 1, backend: {type: vllm, url: x}"),
            "models.m.pool.discover.0.backend.url: leave it out",
        ),
    ],
)
def test_the_whole_file_is_checked(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_all_problems_are_found_in_one_go(tmp_path: Path) -> None:
    text = f"limit: 1\nlisten: {{port: x}}\nmodels: {{m: {{pool: [{VLLM}], aliases: 3}}}}"
    assert refusal(tmp_path, text).endswith("(and 2 more)")
    text = f"models: {{m: {{pool: a, fallback: [b, c]}}, n: {{pool: [{VLLM}]}}}}"
    assert refusal(tmp_path, text).endswith("unknown pool 'a'; known: n (and 2 more)")


def test_a_key_that_has_expired_is_a_warning(tmp_path: Path) -> None:
    keys = "".join(
        f"{{name: {name}, sha256: {digest}, expires: {day}}}, "
        for name, digest, day in (("old", DIGEST, "2020-01-01"), ("new", OTHER, "2999-01-01"))
    )
    (warning,) = checks.warnings(load(tmp_path, f"{POOL}\naccess: {{keys: [{keys}]}}"))
    assert warning == "access.keys: the key 'old' expired at 2020-01-01 00:00:00+00:00"


class TestKeysFile:
    def test_its_keys_come_to_those_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "keys.yaml").write_text(
            f"- {{name: b, sha256: {OTHER}, expires: 2027-01-01T00:00:00}}"
        )
        config = load(
            tmp_path,
            f"{POOL}\naccess: {{keys_file: keys.yaml, keys: [{{name: a, sha256: {DIGEST}}}]}}",
        )
        assert [key.name for key in config.access.keys] == ["a", "b"]
        assert config.access.keys[1].expires == datetime(2027, 1, 1, tzinfo=UTC)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (f"- {{name: a, sha256: {OTHER}}}", "access.keys.1.name: 'a' is there twice"),
            ("- {name: b}", "keys.yaml: 0.sha256: missing"),
            (f"- {{name: b, sha256: {OTHER}, wieght: 2}}", "did you mean 'weight'?"),
            ("name: b", "keys.yaml: top level: should be a list"),
        ],
    )
    def test_it_is_checked(self, tmp_path: Path, keys: str, message: str) -> None:
        (tmp_path / "keys.yaml").write_text(keys)
        text = f"{POOL}\naccess: {{keys_file: keys.yaml, keys: [{{name: a, sha256: {DIGEST}}}]}}"
        with pytest.raises(ConfigError) as error:
            load(tmp_path, text)
        assert message in str(error.value)

    def test_it_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
            load(tmp_path, f"{POOL}\naccess: {{keys_file: none.yaml}}")
