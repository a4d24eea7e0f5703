"""The configuration file: what it accepts, and what it says of what it does not."""

from pathlib import Path

import pytest

from octet.errors import ConfigError
from serve.config import EmbeddedConfig, GatewayConfig, HttpConfig, TritonConfig

EXAMPLE = Path(__file__).parents[2] / "docs" / "gateway.md"


def load(tmp_path: Path, text: str) -> GatewayConfig:
    path = tmp_path / "octet.yaml"
    path.write_text(text)
    return GatewayConfig.load(path)


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
              - {type: triton, url: "grpc://gpu:8001", tokenizer: tok}
        """,
    )
    vllm, openai, triton = config.all_pools["m"].backends
    assert isinstance(vllm, HttpConfig) and vllm.url == "http://gpu:8000"
    assert isinstance(openai, HttpConfig) and openai.type == "openai"
    assert isinstance(triton, TritonConfig) and triton.url == "gpu:8001"
    assert triton.tokenizer == tmp_path / "tok"


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    example = EXAMPLE.read_text().split("```yaml\n")[1].split("```")[0]
    config = load(tmp_path, example)
    kinds = {backend.type for pool in config.all_pools.values() for backend in pool.backends}
    assert kinds == {"embedded", "vllm", "triton"}


POOL = "models: {m: {pool: [{type: vllm, url: 'http://h:1'}]}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{POOL}\nlimit: {{}}", "limit: unknown key; did you mean 'limits'?"),
        (f"{POOL}\nlimits: {{max_m: 3}}", "limits.max_m: unknown key; did you mean 'max_n'?"),
        (
            "models: {m: {pool: [{type: vllm, ulr: x}]}}",
            "models.m.pool.0.url: missing",
        ),
        (
            "models: {m: {pool: [{type: vllm, url: 'http://h', modle: x}]}}",
            "models.m.pool.0.modle: unknown key; did you mean 'model'?",
        ),
        ("models: {m: {pool: [{type: vlm, url: x}]}}", "unknown backend 'vlm'; did you mean"),
        ("models: {m: {pool: [{url: x}]}}", "models.m.pool.0: needs a type; known: embedded"),
        ("models: {m: {pool: []}}", "models.m.pool: has no backends, and nothing that discovers"),
        ("models: {m: {pool: 3}}", "models.m.pool: should be the name of a pool, a pool's section"),
        ("models: {}", "models: needs at least one entry"),
        ("models: {3: {pool: p}}", "models.3: should be a valid string"),
        ("listen: {port: 1}", "models: missing"),
        (f"{POOL}\nlisten: {{port: 70000}}", "listen.port: should be less than or equal to 65535"),
        (
            "models: {m: {pool: [{type: vllm, url: 'h:1'}]}}",
            "models.m.pool.0.url: must start with http://",
        ),
        (
            "models: {m: {pool: [{type: triton, url: 'h'}]}}",
            "models.m.pool.0.url: must be host:port",
        ),
        (f"{POOL}\n{POOL}", "line 2: the key 'models' is repeated"),
        ("models: [", "line 1, column 10: "),
        ("", "top level: should be"),
        ("- a", "top level: should be"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "octet.yaml" in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        GatewayConfig.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        GatewayConfig.load(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        GatewayConfig.load(tmp_path / "bytes.yaml")
