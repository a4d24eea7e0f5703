"""The configuration file: what it accepts, and what it says of what it does not."""

from pathlib import Path

import pytest

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
from serve.config.backends import key_in
from serve.config.checks import load_config

EXAMPLE = Path(__file__).parents[3] / "docs" / "gateway.md"
SECRET = "s3cr3t-0f-the-upstream"


def load(tmp_path: Path, text: str) -> GatewayConfig:
    path = tmp_path / "octet.yaml"
    path.write_text(text)
    return load_config(path)


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
    example = EXAMPLE.read_text().split('```yaml title="all-settings.yaml"\n')[1].split("```")[0]
    config = load(tmp_path, example)
    pools = config.all_pools.values()
    assert {b.type for pool in pools for b in pool.backends} == {"embedded", "vllm", "triton"}
    shown = config.pools["fp8"]
    for section in ("routing", "health", "ejection", "retries", "timeouts", "admission"):
        assert getattr(shown, section) == PoolConfig.model_fields[section].default, section
    assert config.limits == Limits() and config.logs == Logs() and config.traces == Traces()


VLLM = "{type: vllm, url: 'http://h:1'}"
POOL = f"models: {{m: {{pool: [{VLLM}]}}}}"


def of_backend(entry: str) -> str:
    """The file of one model on one backend."""
    return f"models: {{m: {{pool: [{{{entry}}}]}}}}"


def of_vllm(more: str) -> str:
    return of_backend(f"type: vllm, url: 'http://h', {more}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{POOL}\nlimit: {{}}", "limit: unknown key; did you mean 'limits'?"),
        (f"{POOL}\nlimits: {{max_m: 3}}", "limits.max_m: unknown key; did you mean 'max_n'?"),
        (
            of_backend("type: vllm, ulr: x"),
            "models.m.pool.0.ulr: unknown key; did you mean 'url'? (and 1 more)",
        ),
        (of_vllm("modle: x"), "models.m.pool.0.modle: unknown key; did you mean 'model'?"),
        (
            "models: {m: {pool: {backends: [{type: triton, url: 'h:1', tokeniser: x}]}}}",
            "models.m.pool.backends.0.tokeniser: unknown key; did you mean 'tokenizer'?",
        ),
        (
            f"pools: {{health: {{backends: [{VLLM}], retires: 1}}}}\n{POOL}",
            "pools.health.retires: unknown key; did you mean 'retries'?",
        ),
        (of_backend("type: vlm, url: x"), "unknown backend 'vlm'; did you mean 'vllm'"),
        (
            of_backend("type: vllm, url: 'http://h', api_key_env: KEY"),
            "models.m.pool.0.api_key_env: unknown key; did you mean 'api_key'?",
        ),
        (of_backend("type: [], url: x"), "models.m.pool.0: unknown backend '[]'"),
        (of_backend("url: x"), "models.m.pool.0: needs a type; known: embedded"),
        ("models: {m: {pool: [http]}}", "models.m.pool.0: should be a section with a backend's"),
        ("models: {m: {pool: []}}", "models.m.pool: has no backends, and nothing that discovers"),
        ("models: {m: {pool: 3}}", "models.m.pool: should be the name of a pool, a pool's section"),
        ("models: {m: {}}", "models.m.pool: missing"),
        (
            f"models: {{m: [{VLLM}]}}",
            "models.m: should be a section; the list of backends belongs ",
        ),
        ("models: {m: p}", "models.m: should be a section, such as {pool: p}"),
        (
            of_vllm('api_key: "abc\\ndef"'),
            "models.m.pool.0.api_key: holds a line end, a control character or one that is not",
        ),
        (of_vllm('api_key: "\\n"'), "models.m.pool.0.api_key: is empty"),
        (of_backend('type: vllm, url: "http://h\\n"'), "models.m.pool.0.url: must name a host"),
        ("models: {}", "models: needs at least one entry"),
        ("models: {3: {pool: p}}", "models.3: should be a valid string"),
        ("listen: {port: 1}", "models: missing"),
        ("models: {'a b': {pool: p}}", "models.a b: should begin with a letter or digit"),
        (f"{POOL}\nlisten: {{port: 70000}}", "listen.port: should be less than or equal to 65535"),
        (f"{POOL}\nlisten: {{port: true}}", "listen.port: should be a number, not true or false"),
        (f"{POOL}\ndrain_timeout_s: .nan", "drain_timeout_s: should be"),
        (f"{POOL}\nlogs: {{format: xml}}", "logs.format: should be 'text' or 'json'"),
        (of_backend("type: vllm, url: 'h:1'"), "models.m.pool.0.url: must start with http://"),
        (
            of_backend("type: vllm, url: 'http://me:word@h'"),
            "models.m.pool.0.url: must hold no user or password",
        ),
        (
            of_backend("type: vllm, url: 'http://h:99999'"),
            "models.m.pool.0.url: must name a host, and a port of 1 to 65535",
        ),
        (of_backend("type: triton, url: 'h'"), "models.m.pool.0.url: must be host:port"),
        (f"{POOL}\n{POOL}", "line 2: the key 'models' is repeated"),
        ("models: [", "line 1, column 10: "),
        (f"{POOL}\naccess: {{keys: [{{expires: 2026-02-30}}]}}", "line 2: not a valid timestamp"),
        ("models: !!int x", "line 1: not a valid int"),
        ("models: !!float [x]", "line 1"),
        ("models: !!binary x", "line 1"),
        ("", "top level: should be a section"),
        ("- a", "top level: should be a section"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


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


def test_yaml_may_merge(tmp_path: Path) -> None:
    """Also what has merged itself; what is written twice is still refused."""
    text = (
        "pools:\n"
        f"  a: {{backends: [{VLLM}], health: &a {{interval_s: 7, timeout_s: 3}}}}\n"
        f"  b: {{backends: [{VLLM}], health: &b {{<<: *a, interval_s: 8}}}}\n"
        f"  c: {{backends: [{VLLM}], health: {{<<: *b, timeout_s: 4}}}}\n"
        "models: {m: {pool: a, fallback: [b, c]}}"
    )
    health = [pool.health for pool in load(tmp_path, text).pools.values()]
    assert [(h.interval_s, h.timeout_s) for h in health] == [(7, 3), (8, 3), (8, 4)]
    assert "the key 'timeout_s' is repeated" in refusal(
        tmp_path, text.replace("timeout_s: 4", "timeout_s: 4, timeout_s: 5")
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "bytes.yaml")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_key_may_end_as_a_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", SECRET + end)
    backend = "{type: vllm, url: 'http://h', api_key: '${UPSTREAM_KEY}'}"
    (loaded,) = load(tmp_path, f"models: {{m: {{pool: [{backend}]}}}}").all_pools["m"].backends
    assert isinstance(loaded, HttpConfig) and loaded.key() == SECRET
    key = key_in("UPSTREAM_KEY")
    assert key is not None and key.get_secret_value() == SECRET


@pytest.mark.parametrize("key", ["two\nlines", "a\x7fb", "sm\xf8rrebr\xf8d", "", "\n", "a\n\n"])
def test_a_key_that_no_header_can_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", key)
    with pytest.raises(ConfigError, match="the environment variable UPSTREAM_KEY ") as error:
        key_in("UPSTREAM_KEY")
    assert "two" not in str(error.value)


def test_the_device_of_a_pool_is_one_that_is_known(tmp_path: Path) -> None:
    pool = "pools: {{p: {{backends: [{{type: vllm, url: 'http://g'}}], proof: {{device: '{}'}}}}}}"
    models = "models: {m: {pool: p}}\n"
    config = load(tmp_path, models + pool.format("NVIDIA H100 PCIe"))
    proof = config.all_pools["p"].proof
    assert proof is not None and proof.device == "NVIDIA H100 PCIe"
    line = refusal(tmp_path, models + pool.format("h1000"))
    assert "pools.p.proof.device" in line and "did you mean 'h100'" in line
