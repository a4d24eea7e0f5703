"""The page holds report.json, every section, and nothing that asks a network for anything."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from calibrate.report.html import render_html
from tests.calibrate.report_data import budget, chunks, experts, make_report, sensitivity

INPUT = "model.layers.0.self_attn.q_proj.input"
NASTY = "a sample </script><script>alert(1)</script> & <b>bold</b>"


class Page(HTMLParser):
    """The page as a browser would take it apart: elements, text and scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self._open.append(tag)
        if tag == "section":
            self._section = attributes["id"] or ""
        if tag == "script":
            self.scripts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        else:
            self.text[self._section] = self.text.get(self._section, "") + data

    @property
    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.tags}

    @property
    def data(self) -> Any:
        (text,) = [text for found, text in self.scripts if found.get("id") == "report-data"]
        return json.loads(text)


@cache
def full() -> tuple[dict[str, Any], str]:
    """A report with everything, and its page."""
    report = make_report(
        "fp8-static",
        counts=chunks(outlier={INPUT: 3e4}),
        sensitivity=sensitivity(),
        budget=budget(),
        experts=experts(),
        warnings=(NASTY,),
        facts={"compute dtype": "float32"},
    )
    data = json.loads(json.dumps(report.as_json()))
    return data, render_html(data)


@cache
def full_page() -> Page:
    return Page(full()[1])


def test_the_page_holds_the_report_as_it_was() -> None:
    assert full_page().data == full()[0]


def test_the_top_says_what_a_person_must_know() -> None:
    data, _ = full()
    top = full_page().text["summary"]
    for sentence in ("title", "subject", "enough", "worst", "measured", "budget"):
        assert data["summary"][sentence] in top
    assert "smoothquant" in top


def test_every_section_is_there_and_linked() -> None:
    page = full_page()
    links = {
        str(attributes["href"])[1:]
        for tag, attributes in page.tags
        if tag == "a" and attributes.get("class") != "skip"
    }
    sections = {str(attributes["id"]) for tag, attributes in page.tags if tag == "section"}
    assert sections == links | {"summary"}
    assert links == {
        *("warnings", "distribution", "layers", "range", "convergence", "sensitivity"),
        *("budget", "experts", "tensors", "unknown", "recipe"),
    }


def test_what_was_not_done_has_no_section() -> None:
    ids = Page(render_html(make_report("fp8", convergence=None).as_json())).ids
    assert not ids & {"sensitivity", "budget", "experts", "convergence"}
    assert ids >= {"distribution", "layers", "range", "tensors", "unknown"}


def test_warnings_and_unknowns_are_text_of_the_page() -> None:
    data, page = full()[0], full_page()
    assert NASTY in data["warnings"]
    for warning in data["warnings"]:
        assert warning in page.text["warnings"]
    for item in data["unknown"]:
        assert item["why"] in page.text["unknown"]


def test_text_from_outside_cannot_become_markup() -> None:
    page = full_page()
    assert len(page.scripts) == 3  # plotly, the data, the page's own
    assert not [tag for tag, attributes in page.tags if tag == "b" and "class" in attributes]
    assert not any(text.startswith("alert(1)") for _, text in page.scripts)


def test_nothing_is_loaded_from_anywhere() -> None:
    html, page = full()[1], full_page()
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert tag not in ("link", "iframe", "img", "object", "embed")
        assert str(attributes.get("href", "#")).startswith("#")
    (policy,) = [
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in str(policy)
    own = html.replace(get_plotlyjs(), "")
    assert not re.findall(r"https?://[^\s\"'<]*", own)
    assert not re.findall(r"@import|url\(", own)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_every_recipe_has_a_page(recipe: str) -> None:
    data = make_report(recipe).as_json()
    page = Page(render_html(data))
    assert page.data == data
    assert data["unknown"][0]["why"] in page.text["unknown"]


def test_plots_are_described_and_controls_are_labelled() -> None:
    page = full_page()
    labels = {attributes.get("for") for tag, attributes in page.tags if tag == "label"}
    for tag, attributes in page.tags:
        if tag == "input" and attributes.get("type") != "checkbox":
            assert attributes["id"] in labels
    assert page.tags[0] == ("html", {"lang": "en"})
    script = page.scripts[-1][1]
    assert 'node.setAttribute("aria-label", label)' in script
    assert "aria-sort" in script
