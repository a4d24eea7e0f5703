"""The configuration file: what it accepts, and what it says of what it does not."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octet.cli import app
from octet.errors import ConfigError
from serve.config import (
    EmbeddedConfig,
    GatewayConfig,
    HttpConfig,
    Limits,
    Logs,
    PoolConfig,
    Traces,
    TritonConfig,
)

EXAMPLE = Path(__file__).parents[2] / "docs" / "gateway.md"
SECRET = "s3cr3t-0f-the-upstream"
DIGEST, OTHER = "a" * 64, "b" * 64


def load(tmp_path: Path, text: str) -> GatewayConfig:
    path = tmp_path / "octet.yaml"
    path.write_text(text)
    return GatewayConfig.load(path)


def refusal(tmp_path: Path, text: str) -> str:
    """The one line that says what is wrong with the file."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    line = str(error.value)
    assert "\n" not in line and "octet.yaml" in line
    return line


def test_defaults_and_relative_paths(tmp_path: Path) -> None:
    config = load(tmp_path, "models: {m: {pool: [{type: embedded, path: out/onnx}]}}")
    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 8000)
    (backend,) = config.all_pools["m"].backends
    assert isinstance(backend, EmbeddedConfig)
    assert backend.path == tmp_path / "out/onnx"


def test_every_kind_of_backend(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        models:
          m:
            pool:
              - {type: vllm, url: "http://gpu:8000/v1/", model: served}
              - {type: openai, url: "https://host"}
              - {type: triton, url: "grpc://[::1]:8001", tokenizer: tok}
        """,
    )
    vllm, openai, triton = config.all_pools["m"].backends
    assert isinstance(vllm, HttpConfig) and vllm.url == "http://gpu:8000"
    assert isinstance(openai, HttpConfig) and openai.type == "openai"
    assert isinstance(triton, TritonConfig) and triton.url == "[::1]:8001"
    assert triton.tokenizer == tmp_path / "tok"


def test_the_documented_example_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KEY", "a secret")
    example = EXAMPLE.read_text().split("```yaml\n")[1].split("```")[0]
    config = load(tmp_path, example)
    pools = config.all_pools.values()
    assert {b.type for pool in pools for b in pool.backends} == {"embedded", "vllm", "triton"}
    shown = config.pools["fp8"]
    for section in ("routing", "health", "ejection", "retries", "timeouts", "admission"):
        assert getattr(shown, section) == PoolConfig.model_fields[section].default, section
    assert config.limits == Limits() and config.logs == Logs() and config.traces == Traces()


VLLM = "{type: vllm, url: 'http://h:1'}"
POOL = f"models: {{m: {{pool: [{VLLM}]}}}}"
KEY = f"{{name: k, sha256: {DIGEST}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{POOL}\nlimit: {{}}", "limit: unknown key; did you mean 'limits'?"),
        (f"{POOL}\nlimits: {{max_m: 3}}", "limits.max_m: unknown key; did you mean 'max_n'?"),
        (
            "models: {m: {pool: [{type: vllm, ulr: x}]}}",
            "models.m.pool.0.url: missing (and 1 more)",
        ),
        (
            "models: {m: {pool: [{type: vllm, url: 'http://h', modle: x}]}}",
            "models.m.pool.0.modle: unknown key; did you mean 'model'?",
        ),
        (
            "models: {m: {pool: {backends: [{type: triton, url: 'h:1', tokeniser: x}]}}}",
            "models.m.pool.backends.0.tokeniser: unknown key; did you mean 'tokenizer'?",
        ),
        (
            f"pools: {{health: {{backends: [{VLLM}], retires: 1}}}}\n{POOL}",
            "pools.health.retires: unknown key; did you mean 'retries'?",
        ),
        (
            "models: {m: {pool: [{type: vlm, url: x}]}}",
            "unknown backend 'vlm'; did you mean 'vllm'",
        ),
        ("models: {m: {pool: [{type: [], url: x}]}}", "models.m.pool.0: unknown backend '[]'"),
        ("models: {m: {pool: [{url: x}]}}", "models.m.pool.0: needs a type; known: embedded"),
        ("models: {m: {pool: [http]}}", "models.m.pool.0: should be a section with a backend's"),
        ("models: {m: {pool: []}}", "models.m.pool: has no backends, and nothing that discovers"),
        ("models: {m: {pool: 3}}", "models.m.pool: should be the name of a pool, a pool's section"),
        ("models: {m: {}}", "models.m.pool: missing"),
        ("models: {}", "models: needs at least one entry"),
        ("models: {3: {pool: p}}", "models.3: should be a valid string"),
        ("listen: {port: 1}", "models: missing"),
        ("models: {'a b': {pool: p}}", "models.a b: should begin with a letter or digit"),
        (f"{POOL}\nlisten: {{port: 70000}}", "listen.port: should be less than or equal to 65535"),
        (f"{POOL}\nlisten: {{port: true}}", "listen.port: should be a number, not true or false"),
        (f"{POOL}\ndrain_timeout_s: .nan", "drain_timeout_s: should be"),
        (f"{POOL}\nlogs: {{format: xml}}", "logs.format: should be 'text' or 'json'"),
        (
            "models: {m: {pool: [{type: vllm, url: 'h:1'}]}}",
            "models.m.pool.0.url: must start with http://",
        ),
        (
            "models: {m: {pool: [{type: vllm, url: 'http://me:word@h'}]}}",
            "models.m.pool.0.url: must hold no user or password",
        ),
        (
            "models: {m: {pool: [{type: vllm, url: 'http://h:99999'}]}}",
            "models.m.pool.0.url: must name a host, and a port of 1 to 65535",
        ),
        (
            "models: {m: {pool: [{type: triton, url: 'h'}]}}",
            "models.m.pool.0.url: must be host:port",
        ),
        (f"{POOL}\n{POOL}", "line 2: the key 'models' is repeated"),
        ("models: [", "line 1, column 10: "),
        ("", "top level: should be a section"),
        ("- a", "top level: should be a section"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"pools: {{fp8: {{backends: [{VLLM}]}}}}\nmodels: {{m: {{pool: fp}}}}",
            "models.m.pool: unknown pool 'fp'; did you mean 'fp8'?",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], canary: [{{pool: x, fraction: 0.1}}]}}}}",
            "models.m.canary.0.pool: unknown pool 'x'; known: m",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], shadow: {{pool: n}}}}}}",
            "models.m.shadow.pool: unknown pool 'n'",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], fallback: [bf16]}}}}",
            "models.m.fallback.0: unknown pool 'bf16'",
        ),
        (
            f"models: {{m: {{pool: [{VLLM}], fallback: [m]}}}}",
            "models.m.fallback.0: 'm' is the model's pool already",
        ),
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
            "pools.p.backends.0: say which `model` the server knows: the models m, n use this pool",
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
        (
            "models: {m: {pool: {discover: [{port: 1}]}}}",
            "models.m.pool.discover.0: should be a section with `dns` or `file`",
        ),
        (
            "models: {m: {pool: {discover: [{dns: h, port: 1, backend: {type: vllm, modle: x}}]}}}",
            "models.m.pool.discover.0.backend.modle: unknown key; did you mean 'model'?",
        ),
        (
            "models: {m: {pool: {discover: [{dns: h, port: 1, backend: {type: embedded}}]}}}",
            "models.m.pool.discover.0.backend.type: an embedded engine has no address",
        ),
        (
            "models: {m: {pool: {discover: [{dns: h, port: 1, backend: {type: vllm, url: x}}]}}}",
            "models.m.pool.discover.0.backend.url: leave it out",
        ),
        (
            f"models: {{m: {{pool: {{backends: [{VLLM}], retries: {{backoff_s: 9}}}}}}}}",
            "models.m.pool.retries.backoff_s: is longer than max_backoff_s",
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


def test_a_pool_that_nobody_uses_is_a_warning(tmp_path: Path) -> None:
    config = load(tmp_path, f"pools: {{p: {{backends: [{VLLM}]}}}}\n{POOL}")
    assert config.warnings == ["pools.p: no model uses it; it is not started"]
    assert load(tmp_path, POOL).warnings == []


class TestVariables:
    KEY = "models: {m: {pool: [{type: vllm, url: 'http://h', api_key: '${UPSTREAM_KEY}'}]}}"

    @pytest.fixture(autouse=True)
    def _variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UPSTREAM_KEY", SECRET)
        monkeypatch.setenv("PORT", "8123")
        monkeypatch.setenv("EMPTY", "")
        monkeypatch.delenv("UNSET", raising=False)

    def test_they_stand_for_their_values(self, tmp_path: Path) -> None:
        config = load(
            tmp_path,
            f"{self.KEY}\nlisten: {{host: '${{UNSET:-::1}}', port: '${{PORT}}'}}\n"
            "logs: {format: '${EMPTY:-json}'}\naccess: {cors_origins: ['https://$${x}']}",
        )
        (backend,) = config.all_pools["m"].backends
        assert isinstance(backend, HttpConfig) and backend.api_key is not None
        assert backend.api_key.get_secret_value() == SECRET
        assert (config.listen.host, config.listen.port) == ("::1", 8123)
        assert config.logs.format == "json"
        assert config.access.cors_origins == ("https://${x}",)
        assert SECRET not in repr(config) and SECRET not in str(config.model_dump())

    @pytest.mark.parametrize("name", ["UNSET", "EMPTY"])
    def test_one_that_is_not_set_is_named(self, tmp_path: Path, name: str) -> None:
        message = refusal(tmp_path, f"{POOL}\nlisten: {{port: '${{{name}}}'}}")
        expected = f"listen.port: the environment variable {name} is not set, or empty"
        assert message.endswith(expected)

    def test_one_that_is_none_is_refused(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, f"{POOL}\nlisten: {{host: '${{not this}}'}}")
        assert message.endswith("listen.host: write a variable as ${NAME} or ${NAME:-default}")

    @pytest.mark.parametrize(
        "text",
        [
            "models: {m: {pool: '${UPSTREAM_KEY}'}}",
            "models: {m: {pool: [{type: '${UPSTREAM_KEY}'}]}}",
            "models: {m: {pool: [{type: vllm, url: '${UPSTREAM_KEY}'}]}}",
            POOL + "\naccess: {keys: [{name: '${UPSTREAM_KEY}', sha256: '${UPSTREAM_KEY}'}]}",
            POOL + "\nlisten: {port: '${UPSTREAM_KEY}'}",
        ],
    )
    def test_a_secret_is_in_no_message(self, tmp_path: Path, text: str) -> None:
        assert SECRET not in refusal(tmp_path, text)


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


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        GatewayConfig.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        GatewayConfig.load(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        GatewayConfig.load(tmp_path / "bytes.yaml")


def test_check_says_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "octet.yaml"
    path.write_text(f"pools: {{spare: {{backends: [{VLLM}]}}}}\n{POOL}")
    result = CliRunner().invoke(app, ["serve", "--config", str(path), "--check"])
    assert result.exit_code == 0
    assert "model m: m" in result.output and "m-1 (vllm http://h:1)" in result.output
    assert "warning: pools.spare: no model uses it" in result.output
    path.write_text("models: {m: {pool: p}}")
    result = CliRunner().invoke(app, ["serve", "--config", str(path), "--check"])
    assert isinstance(result.exception, ConfigError)
