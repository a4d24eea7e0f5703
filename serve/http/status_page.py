"""Renders /status for a browser: whether everything serves and is proven, and if not, why."""

from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from octet.page import stylesheet

__all__ = ["problems_of", "render", "title_of", "wants_page"]

_MEANWHILE = {
    "refuse": "requests of keys with limits get 503",
    "share": "each gateway grants its share of a key's limits",
}


def wants_page(accept: str) -> bool:
    """Decides whether a client prefers HTML: it names it, and before JSON if it names both."""
    kinds = [kind.partition(";")[0].strip() for kind in accept.lower().split(",")]
    if "text/html" not in kinds:
        return False
    return "application/json" not in kinds or kinds.index("text/html") < kinds.index(
        "application/json"
    )


def render(status: dict[str, Any]) -> str:
    """Returns the page of a /status report."""
    problems = problems_of(status)
    template = (resources.files("serve.http") / "status.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["duration"] = _duration
    environment.filters["standing"] = _standing
    return environment.from_string(template).render(
        status=status,
        problems=problems,
        title=title_of(status, problems),
        style=Markup(stylesheet()),
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _standing(standing: str) -> str:
    return "serves" if standing == "in" else standing.replace("_", " ")


def title_of(status: dict[str, Any], problems: list[tuple[str, str]]) -> str:
    """Returns one line about the whole gateway."""
    if status["draining"]:
        return "Draining: running requests finish, new ones are refused"
    if not status["ready"]:
        return "Not ready: no backend of any model serves"
    if problems:
        return "Ready, with problems"
    return "Ready: every backend serves"


def _without_backend(status: dict[str, Any]) -> list[str]:
    """Returns the models none of whose pools has a backend that serves."""
    ready = {name for name, pool in status["pools"].items() if pool["ready"]}
    models = status["models"].items()
    return [name for name, m in models if not ready.intersection((m["pool"], *m["fallback"]))]


def problems_of(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (where, what) for everything that an operator should look at."""
    found = [
        (f"Model {name}", "none of its pools has a backend that serves: its requests get 503")
        for name in _without_backend(status)
    ]
    shared = status["shared_limits"]
    if shared is not None and shared["state"] != "shared":
        reason = shared.get("reason") or "cannot be used: see the log"
        found.append(
            ("Shared limits", f"Redis {reason}; meanwhile {_MEANWHILE[shared['when_lost']]}")
        )
    for name, model in status["models"].items():
        capture = model["capture"]
        if capture is not None and capture["paused"]:
            cause = capture.get("last_failure") or "see the log"
            found.append((f"Model {name}", f"its requests are served but not captured: {cause}"))
    for name, pool in status["pools"].items():
        if pool["given_up"]:
            why = pool.get("given_up_because") or pool["given_up"].replace("_", " ")
            found.append((f"Pool {name}", f"was given up, and the next one started: {why}"))
        if pool["proof"]["unproven"]:
            found.append((f"Pool {name}", "may serve without a proof of its answers"))
        for one in pool["backends"]:
            # What a proof found is no reason why a backend is unreachable or ejected.
            proof = one["proof"]
            shown = proof if one["standing"] in ("refused", "unproven") else {}
            where = f"{name} / {one['name']}"
            if not one["up"]:
                since = "" if one["out_for_s"] is None else f" for {_duration(one['out_for_s'])}"
                cause = shown.get("cause") or shown.get("reason")
                cause = cause or one.get("last_error") or "see the log"
                remedy = f"; {shown['remedy']}" if shown.get("remedy") else ""
                found.append((where, f"{_standing(one['standing'])}{since}: {cause}{remedy}"))
            elif proof["state"] == "weakly_proven" or proof.get("left_out"):
                found.append((where, proof["reason"]))
    return found
