"""The OpenAPI document: it lists what there is, and what is answered is as it says."""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from serve.config import GatewayConfig
from serve.http.app import OPERATIONS
from serve.http.openapi import document
from tests.serve.conftest import Served
from tests.serve.fuzz import serving_fuzzed

POOL = {"pool": [{"type": "openai", "url": "http://127.0.0.1:1"}]}
DIGEST = "0" * 64
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method"),
)
METHODS = ("get", "post", "delete")


def documented(**settings: Any) -> dict[str, Any]:
    return document(GatewayConfig.model_validate({"models": {"m": POOL}} | settings))


async def test_schemathesis_finds_no_answer_that_is_not_described(tmp_path: Path) -> None:
    """SCHEMATHESIS_EXAMPLES=1000 looks at more of each operation; it is 12 here, for the time."""
    async with serving_fuzzed() as server:
        with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
            described = json.load(answer)
        # As clients do: a model that is served, and a deadline that can be met.
        described["components"]["parameters"]["timeout"]["schema"] = {
            "type": "number",
            "minimum": 60,
        }
        for name, schema in described["components"]["schemas"].items():
            if name.endswith("Request"):
                schema["properties"]["model"] = {"enum": ["fake", "alias", "relayed"]}
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(described))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", server.url),
            *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--seed", "5"),
            *("--request-timeout", "60", "--suppress-health-check", "too_slow"),
            *("--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "12"), "--no-color"),
            cwd=tmp_path,  # where it may have written its own files
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    report = output.decode()
    assert process.returncode == 0, report[-4000:]
    assert "Selected: 11/11" in report and "Tested: 11" in report, report[-4000:]
    assert not server.failures, server.failures


async def test_every_path_that_is_described_is_there_and_no_other(embedded: Served) -> None:
    described = documented()
    assert {operation.path for operation in OPERATIONS} < described["paths"].keys()
    for path, methods in described["paths"].items():
        for method in METHODS:
            url = path.replace("{model}", "fake")
            headers = {"content-type": "application/json"}
            async with embedded.session.request(method, url, data=b"{", headers=headers) as answer:
                assert (answer.status == 405) == (method not in methods), (method, path)
                assert (
                    str(answer.status) in methods.get(method, {"responses": ["405"]})["responses"]
                )
    for path in ("/v1", "/v1/responses", "/admin/reload", "/v1/completions/"):
        async with embedded.session.post(path) as answer:
            assert answer.status == 404
    async with embedded.session.get("/openapi.json") as answer:
        assert (await answer.json())["paths"].keys() == described["paths"].keys()
    async with embedded.session.get("/docs") as answer:
        assert answer.status == 200 and "/openapi.json" in await answer.text()


def test_keys_are_in_it_where_they_are_asked_for() -> None:
    open_to_all = documented()
    assert not open_to_all["components"]["securitySchemes"]
    for path in open_to_all["paths"].values():
        for operation in path.values():
            assert not {"401", "403"} & operation["responses"].keys()
    keyed = documented(access={"keys": [{"name": "k", "sha256": DIGEST}]})
    assert keyed["components"]["securitySchemes"] == {
        "api_key": {"type": "http", "scheme": "bearer"}
    }
    for path, methods in keyed["paths"].items():
        for operation in methods.values():
            secured = operation.get("security") == [{"api_key": []}]
            assert secured == ("401" in operation["responses"]) == (path not in OPEN_PATHS)


OPEN_PATHS = ("/health", "/ready", "/metrics", "/status")


def test_administration_is_in_it_only_where_it_is() -> None:
    def admin(**settings: Any) -> set[str]:
        return {path for path in documented(**settings)["paths"] if path.startswith("/admin")}

    assert not admin() and not admin(admin={"port": 9000, "sha256": DIGEST})
    assert len(admin(admin={"sha256": DIGEST})) == 4
    own_port = documented(admin={"port": 9000})["paths"]
    assert "/metrics" not in own_port and "/status" not in own_port


def test_each_reference_leads_somewhere() -> None:
    described = documented(
        access={"keys": [{"name": "k", "sha256": DIGEST}]}, admin={"sha256": DIGEST}
    )
    text = json.dumps(described)
    for piece in text.split('"$ref": "')[1:]:
        target: Any = described
        for part in piece.split('"')[0].removeprefix("#/").split("/"):
            target = target[part]
