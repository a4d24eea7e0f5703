"""Keys and tiers: a key may have the right to a model, or to tiers of it alone."""

import hashlib
from typing import Any

import pytest

from tests.serve.tiered import ALIASES, BODY, PATH, error, in_tiers, sound, tier, tiered

KEY = {"authorization": "Bearer secret"}


def access(*models: str) -> dict[str, Any]:
    digest = hashlib.sha256(b"secret").hexdigest()
    return {"keys": [{"name": "k", "sha256": digest, "models": models}]}


async def test_the_right_to_a_tiers_alias_is_the_right_to_that_tier() -> None:
    async with in_tiers(sound(), ALIASES, access=access("m-cheap")) as (served, _):
        for model, headers in (("m-cheap", {}), ("m", tier("economy")), ("n", tier("economy"))):
            reply = await served.request(PATH, BODY | {"model": model}, KEY | headers)
            assert reply.status == 200, reply.body
        for model, headers, what in (
            ("m", {}, "'m'; it may use: m-cheap"),
            ("m", tier("exact"), "'m' in the tier 'exact'; it may use: m-cheap"),
            ("m-exact", {}, "'m' in the tier 'exact'"),
        ):
            reply = await served.request(PATH, BODY | {"model": model}, KEY | headers)
            assert what in error(reply, 403, "model_not_allowed")


@pytest.mark.parametrize("name", ["m", "n"])
async def test_the_right_to_the_model_is_the_right_to_its_tiers(name: str) -> None:
    async with in_tiers(sound(), ALIASES, access=access(name)) as (served, _):
        for model in ("m", "n", "m-exact", "m-cheap"):
            reply = await served.request(PATH, BODY | {"model": model}, KEY)
            assert reply.status == 200


async def test_only_what_may_be_used_is_listed() -> None:
    async with tiered(sound(), ALIASES, access=access("m-cheap")) as (served, _):
        async with served.session.get("/v1/models", headers=KEY) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["m-cheap"]
        for model, status in (("m-cheap", 200), ("m-exact", 403), ("m", 403)):
            url = f"/v1/models/{model}"
            async with served.session.get(url, headers=KEY) as answer:
                assert answer.status == status
