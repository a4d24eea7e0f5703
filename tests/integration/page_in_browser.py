"""Opens pages in Chromium and prints what is wrong with each, as JSON; the interpreter of
.integration/browser runs this.

    python tests/integration/page_in_browser.py CHROMIUM URL ... [--shots DIRECTORY] [--steps JSON]

Every page is opened at two widths, light and dark. Steps are taken on it by keyboard alone: a list
of [SELECTOR, "type", TEXT], [SELECTOR, "press", KEY], and [SELECTOR, "await", TEXT]. Its content
security policy stays in force, so axe-core is run through the DevTools protocol, which the policy
does not bind.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, Error, Page, sync_playwright

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
GRAVE = ("serious", "critical")
OWN = ("/v1/completions", "/admin/")  # what the gateway's page sends, to its own address
SETTLE_MS = 700  # plots are drawn, and requests of a script are made


STEP_MS = 30_000


def take(page: Page, selector: str, action: str, text: str) -> None:
    """Takes one step; fails if it is not possible within `STEP_MS`."""
    if action == "await":
        page.locator(selector, has_text=text).first.wait_for(timeout=STEP_MS)
        return
    page.locator(selector).first.focus(timeout=STEP_MS)
    if action == "type":
        page.keyboard.press("ControlOrMeta+A")
        page.keyboard.type(text)
    else:
        page.keyboard.press(text)


def look(
    browser: Browser,
    url: str,
    width: int,
    scheme: Any,
    shot: Path | None,
    steps: list[tuple[str, str, str]],
) -> dict[str, Any]:
    """Returns the console messages, script errors, requests, overflow in pixels, and findings.

    Overflow is that of the page, and of a backend's proof history in its card.
    """
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    console: list[str] = []
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    while True:
        try:
            page.goto(url)
            break
        except Error as error:  # its server is being restarted: the test has a limit of time
            if "ERR_CONNECTION_REFUSED" not in error.message:
                raise
            page.wait_for_timeout(SETTLE_MS)
    session = context.new_cdp_session(page)

    def run(expression: str) -> Any:
        answer = session.send(
            "Runtime.evaluate",
            {"expression": expression, "awaitPromise": True, "returnByValue": True},
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    unfold = "document.querySelectorAll('details').forEach(details => { details.open = true; })"
    run(unfold)
    page.wait_for_timeout(SETTLE_MS)
    for step in steps:
        take(page, *step)
    run(unfold)  # those that came meanwhile, too
    if shot is not None:
        page.screenshot(path=shot, full_page=True)
    wide = "[document.documentElement, ...document.querySelectorAll('.backend .scroll')]"
    overflow = run(f"Math.max(...{wide}.map(one => one.scrollWidth - one.clientWidth))")
    run(AXE_SCRIPT)
    violations = json.loads(run("axe.run().then(found => JSON.stringify(found.violations))"))
    context.close()
    own = ("data:", "blob:", f"{url}/", *(urljoin(url, path) for path in OWN))
    return {
        "where": f"{url.rpartition('/')[2]}, {width} px, {scheme}",
        "console": console,
        "errors": errors,
        "requests": [x for x in requests if x != url and not x.startswith(own)],
        "overflow": overflow,
        "axe": [
            f"{found['impact']}: {found['id']}: {found['help']}: {node['html'][:200]}"
            for found in violations
            if found["impact"] in GRAVE
            for node in found["nodes"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("chromium")
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--shots", type=Path)
    parser.add_argument("--steps", type=json.loads, default=[])
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox"]
        )
        found = []
        for url in options.urls:
            for width in WIDTHS:
                for scheme in SCHEMES:
                    name = Path(url).name.partition(".")[0]
                    shot = options.shots and options.shots / f"{name}-{width}-{scheme}.png"
                    found.append(look(browser, url, width, scheme, shot, options.steps))
        browser.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
