"""Tests what `octet serve --check` finds about tiers."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from octet_cli.main import app
from serve.config import checks
from tests.serve.config.test_config import VLLM, load, refusal

DIGEST = "a" * 64
PROVEN = f"pools: {{p: {{backends: [{VLLM}], proof: {{golden: out}}}}}}"
TIERS = "tiers: {exact: {max_kl: 0.001}, economy: {max_kl: 0.1}}"


def text(model: str, tiers: str = TIERS, pools: str = PROVEN, more: str = "") -> str:
    return f"{pools}\nmodels: {{m: {{pool: p, {model}}}}}\n{tiers}\n{more}"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (text("tier: exat"), "models.m.tier: unknown tier 'exat'; did you mean 'exact'?"),
        (text("tier: exact", "tiers: {}"), "unknown tier 'exact': the file has no `tiers`"),
        (
            text("tier_aliases: {m-cheap: economic}"),
            "models.m.tier_aliases.m-cheap: unknown tier 'economic'; did you mean 'economy'?",
        ),
        (
            text("tier_aliases: {m: exact}"),
            "models.m.tier_aliases.m: 'm' is already the name of a model",
        ),
        (
            text("aliases: [n], tier_aliases: {n: exact}"),
            "models.m.tier_aliases.n: 'n' is already the name of an alias of 'm'",
        ),
        (
            text("tier_aliases: {n x: exact}"),
            "models.m.tier_aliases.n x: should begin with a letter or digit",
        ),
        (
            text("", "tiers: {economy: {max_kl: 0.1}, exact: {max_kl: 0.001}}"),
            "tiers.exact.max_kl: is smaller than that of 'economy': list the most exact tier first",
        ),
        (
            text("", "tiers: {exact: {max_kl: 0.1}, economy: {max_kl: 0.1}}"),
            "tiers.economy.max_kl: is the budget of 'exact' too: one tier of the two is enough",
        ),
        (text("", "tiers: {exact: {max_kl: 0}}"), "tiers.exact.max_kl: should be greater than 0"),
        (text("", "tiers: {exact: {max_lk: 1}}"), "unknown key; did you mean 'max_kl'?"),
        (
            text("tier: exact", pools=f"pools: {{p: {{backends: [{VLLM}]}}}}"),
            "models.m.tier: no pool of the model is measured: give one golden records",
        ),
        (
            text(
                "tier_aliases: {n: exact}",
                pools=PROVEN.replace("{golden: out}", "{golden: out, enabled: false}"),
            ),
            "models.m.tier_aliases.n: no pool of the model is measured",
        ),
        (
            text(
                "tier: exact, canary: [{pool: q, fraction: 0.1}]",
                pools=PROVEN.replace("{p:", f"{{p: {{backends: [{VLLM}]}}, q:"),
            ),
            "models.m.tier: no pool of the model is measured",  # for those that are not drawn
        ),
        (
            text(
                "tier_aliases: {n: exact}",
                more=f"access: {{keys: [{{name: k, sha256: {DIGEST}, models: [nn]}}]}}",
            ),
            "access.keys.0.models.0: unknown model 'nn'; did you mean 'n'?",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, written: str, message: str) -> None:
    assert message in refusal(tmp_path, written)


def test_a_pool_that_brings_its_own_golden_records_can_serve_a_tier(tmp_path: Path) -> None:
    for backends in (
        "backends: [{type: embedded, path: out}]",
        "discover: [{file: more.yaml}]",
        f"backends: [{VLLM}], proof: {{golden: out}}",
    ):
        config = load(tmp_path, text("tier: exact", pools=f"pools: {{p: {{{backends}}}}}"))
        assert config.models["m"].tier == "exact"
        assert not any(warning.startswith("tiers:") for warning in checks.warnings(config))


def test_tiers_that_nobody_can_serve_are_a_warning(tmp_path: Path) -> None:
    pools = f"pools: {{p: {{backends: [{VLLM}]}}}}"
    warnings = checks.warnings(load(tmp_path, text("", pools=pools)))
    warning = "tiers: no pool is measured (see `proof`): each request of a tier will be refused"
    assert warning in warnings


def test_the_check_lists_tiers_and_their_names(tmp_path: Path) -> None:
    tiers = "tiers: {exact: {max_kl: 0.001, allow_less_exact: true}, economy: {max_kl: 0.1}}"
    written = text("aliases: [a], tier: exact, tier_aliases: {n: economy}", tiers)
    path = tmp_path / "octet.yaml"
    path.write_text(written.replace("proof: {golden: out}", "discover: [{file: later.yaml}]"))
    result = CliRunner().invoke(app, ["serve", "--config", str(path), "--check"])
    assert "tier exact: at most 0.001 nats from the reference, or else the most exact pool" in (
        result.output
    )
    assert "tier economy: at most 0.1 nats from the reference" in result.output
    assert "model m (a, n: economy): p, tier exact" in result.output
