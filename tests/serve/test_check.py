"""`octet serve --check`: what a file holds, and everything that is wrong with it."""

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from octet_cli.main import app

VLLM = "{type: vllm, url: 'http://h:1', model: x}"


def checked(tmp_path: Path, text: str) -> Result:
    path = tmp_path / "octet.yaml"
    path.write_text(text)
    return CliRunner().invoke(app, ["serve", "--config", str(path), "--check"])


def problems(result: Result) -> list[str]:
    """Without the file's name."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert all(line.startswith("error: configuration ") for line in lines)
    return [line.partition("octet.yaml: ")[2] for line in lines]


def test_it_says_what_it_found(tmp_path: Path) -> None:
    result = checked(
        tmp_path,
        f"""
        pools: {{spare: {{backends: [{VLLM}]}}, b: {{backends: [{VLLM}]}}}}
        models:
          m:
            pool: [{VLLM}]
            aliases: [gpt]
            canary: [{{pool: b, fraction: 0.25}}]
            shadow: {{pool: b, fraction: 0.5}}
          n: {{pool: [{VLLM}], fallback: [b]}}
        """,
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "model m (gpt): m, canary b (0.25), shadow b (0.5)" in lines
    assert "model n: n, fallback b" in lines
    assert "pool m, least_tokens: m-1 (vllm http://h:1)" in lines
    assert "warning: pools.spare: no model uses it; it is not started" in lines
    assert "no API keys: anyone may send requests" in lines


def test_every_problem_has_a_line_and_misspelled_keys_come_first(tmp_path: Path) -> None:
    text = "models: {m: {pool: [{type: vllm, urll: 'http://h'}]}, n: {}}\nlisten: {port: x}"
    assert problems(checked(tmp_path, text)) == [
        "models.m.pool.0.urll: unknown key; did you mean 'url'?",
        "listen.port: should be a valid integer, unable to parse string as an integer",
        "models.m.pool.0.url: missing",
        "models.n.pool: missing",
    ]
    assert problems(checked(tmp_path, "models: {m: {pool: p}}")) == [
        "models.m.pool: unknown pool 'p'; known: "
    ]


def test_files_that_are_not_what_is_asked_for(tmp_path: Path, engine_calibration: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.yaml").write_text("- {type: vllm, ulr: 'http://h'}")
    (tmp_path / "unfit.yaml").write_text("- {type: embedded, path: nowhere}")
    template = "{type: triton, model: x, tokenizer: empty}"  # beside the configuration
    found = problems(
        checked(
            tmp_path,
            f"""
            models:
              a: {{pool: [{{type: embedded, path: nowhere}}, {{type: embedded, path: empty}}]}}
              b: {{pool: {{backends: [{{type: triton, url: 'h:1', tokenizer: empty}}]}}}}
              c: {{pool: [{{type: embedded, path: nowhere, slots: 2}}]}}
              d: {{pool: {{discover: [{{file: broken.yaml}}, {{file: unfit.yaml}}]}}}}
              e: {{pool: [{{type: embedded, path: {engine_calibration}}}]}}
              f: {{pool: {{discover: [{{dns: h, port: 1, backend: {template}}}]}}}}
            """,
        )
    )
    expected = [
        ("models.a.pool.0: ", "nowhere: no such directory"),
        ("models.a.pool.1: ", "not an Octet artifact"),
        ("models.b.pool.backends.0: ", "tokenizer.json: No such file or directory"),
        ("models.c.pool.0: ", "nowhere: no such directory"),
        ("models.d.pool.discover.0.file: ", "0.ulr: unknown key"),
        ("models.d.pool.discover.1.file: ", "nowhere: no such directory"),
        ("models.e.pool.0: ", "is a calibration, not an ONNX export"),
        ("models.f.pool.discover.0.backend: ", f"{tmp_path}/empty/tokenizer.json: No such file"),
    ]
    assert len(found) == len(expected), found
    for line, (where, what) in zip(found, expected, strict=True):
        assert line.startswith(where) and what in line


def test_a_discovery_file_that_is_not_there_yet_is_a_warning(tmp_path: Path) -> None:
    result = checked(tmp_path, "models: {m: {pool: {discover: [{file: later.yaml}]}}}")
    assert result.exit_code == 0
    assert "later.yaml is not there (yet): it brings no backends" in result.stdout


def test_a_file_that_cannot_be_captured_to_is_a_problem(tmp_path: Path) -> None:
    text = "models: {{m: {{pool: [{}], capture: {{file: {}}}}}}}"
    found = problems(checked(tmp_path, text.format(VLLM, "gone/p.jsonl")))
    assert found == [
        f"models.m.capture.file: {tmp_path / 'gone'}: no such directory; create it",
    ]
    result = checked(tmp_path, text.format(VLLM, "p.jsonl"))
    assert f"model m: m, capture {tmp_path / 'p.jsonl'} (0.01)" in result.stdout.splitlines()
    assert not (tmp_path / "p.jsonl").exists()
