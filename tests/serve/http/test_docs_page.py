"""/docs: everything in the OpenAPI document, and nothing that a browser would load or run."""

import base64
import hashlib
import html
import re
import shlex
from typing import Any

import pytest

from serve.config import GatewayConfig
from serve.http import docs_page
from serve.http.openapi import document
from tests.serve.conftest import Served

POOL = {"pool": [{"type": "openai", "url": "http://127.0.0.1:1"}]}
BASE = "https://octet.example:8000/"


def documented(**settings: Any) -> dict[str, Any]:
    keys = {"keys": [{"name": "k", "sha256": "0" * 64}]}
    config = {"models": {"m": POOL}, "access": keys, "admin": {"sha256": "1" * 64}}
    return document(GatewayConfig.model_validate(config | settings))


@pytest.fixture(scope="module")
def page() -> str:
    return docs_page.render(documented(), BASE, "m")


def test_everything_that_is_described_is_on_it(page: str) -> None:
    described = documented()
    for path, methods in described["paths"].items():
        assert f"<code>{path}</code>" in page
        for operation in methods.values():
            (section,) = re.findall(
                rf'<section class="operation" id="{operation["operationId"]}">.*?</section>',
                page,
                re.DOTALL,
            )
            for status, answer in operation["responses"].items():
                assert f"<b>{status}</b>" in section
                assert html.escape(answer["description"], quote=False) in html.unescape(section)
    for name, schema in described["components"]["schemas"].items():
        assert f'id="schema-{name}"' in page
        for field in schema.get("properties", {}):
            assert f"<code>{field}</code>" in page


def test_a_browser_loads_and_runs_nothing(page: str) -> None:
    assert not re.findall(r"<(?:script|link|img|iframe|form|object|base)\b|\bsrc=|\bon\w+=", page)
    assert not re.findall(r"@import|url\(", page)
    targets = re.findall(r'href="([^"]*)"', page)
    assert {target for target in targets if not target.startswith("#")} == {"/openapi.json"}
    ids = set(re.findall(r'id="([^"]*)"', page))
    assert {target[1:] for target in targets if target.startswith("#")} <= ids


def test_its_policy_allows_its_style_alone(page: str) -> None:
    policy = docs_page.headers()["content-security-policy"].split("; ")
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert not any("unsafe" in part or "http" in part for part in policy)


def test_examples_can_be_pasted(page: str) -> None:
    examples = [html.unescape(text) for text in re.findall("<pre>(curl.*?)</pre>", page, re.DOTALL)]
    assert len(examples) == sum(map(len, documented()["paths"].values()))
    for example in examples:
        command, url, *_ = shlex.split(example.replace("\\\n", ""))
        assert command == "curl" and url.startswith(BASE)
    assert "Bearer $API_KEY" in examples[0]
    without = docs_page.render(documented(access={}, admin={}), BASE, "m")
    assert "Bearer" not in without


def test_names_of_the_operator_are_text_and_no_markup() -> None:
    hostile = docs_page.render(
        documented(), "http://h/'<script>", "</pre><script>alert(1)</script>"
    )
    assert "<script" not in hostile


async def test_it_is_served(embedded: Served) -> None:
    async with embedded.session.get("/docs") as answer:
        assert answer.status == 200 and answer.content_type == "text/html"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        text = await answer.text()
        assert f"curl {answer.url.origin()}/v1/completions" in text
