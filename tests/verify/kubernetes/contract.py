"""Checks what a prover needs of a Kubernetes API server, fake or real.

    for check in CHECKS:
        await check(kubelet)

Each check gets a namespace of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.verify.kubernetes.kubelet import LABELS, ROLE, Kubelet
from verify.kubernetes import api
from verify.kubernetes.api import GONE, ApiError, Pods
from verify.kubernetes.pod import CONDITION, Pod, Report

__all__ = ["CHECKS", "Check"]

Check = Callable[[Kubelet], Awaitable[None]]
PROVEN = Report(
    "True", "Proven", "as expected", {"octet.dev/artifact": "a", "octet.dev/divergence": None}
)


def pods(kubelet: Kubelet) -> Pods:
    return Pods(kubelet.admin, kubelet.namespace, LABELS)


async def events_are_watched_from_the_version_of_a_list(kubelet: Kubelet) -> None:
    await kubelet.create("before")
    await kubelet.create("other", labels="app=other")
    async with pods(kubelet) as client:
        items, version = await client.list()
        assert [item["metadata"]["name"] for item in items] == ["before"]
        await kubelet.create("after")
        await kubelet.run("after", "c7")
        await kubelet.delete("before")
        await kubelet.delete("other")
        seen: list[tuple[str, str]] = []
        async for kind, item in client.watch(version):
            if kind == "BOOKMARK":
                continue
            name = item["metadata"]["name"]
            seen.append((kind, name))
            if name == "after" and kind == "MODIFIED":
                read = Pod.read(item, "http")
                assert (read.url, read.gated) == ("http://127.0.0.1:8000", True)
                assert read.server == "containerd://c7 http://127.0.0.1:8000"
            if ("DELETED", "before") in seen:
                break
    assert ("ADDED", "after") in seen and ("MODIFIED", "after") in seen
    assert all(name != "other" for _, name in seen)


async def a_list_comes_in_pages(kubelet: Kubelet) -> None:
    for number in range(5):
        await kubelet.create(f"p{number}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "_PAGE", 2)
        async with pods(kubelet) as client:
            items, _ = await client.list()
    assert sorted(item["metadata"]["name"] for item in items) == [f"p{n}" for n in range(5)]


async def a_watch_ends_with_its_time_and_goes_on_from_a_bookmark(kubelet: Kubelet) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "WATCH_S", 3.0)
        async with pods(kubelet) as client:
            _, version = await client.list()
            async for kind, item in client.watch(version):
                assert kind == "BOOKMARK"
                version = item["metadata"]["resourceVersion"]
            await kubelet.create("later")
            async for kind, item in client.watch(version):
                if kind != "BOOKMARK":
                    assert (kind, item["metadata"]["name"]) == ("ADDED", "later")
                    break


async def a_version_of_long_ago_is_gone(kubelet: Kubelet) -> None:
    async with pods(kubelet) as client:
        with pytest.raises(ApiError, match=r"cannot watch pods: .*too old .*\(410\)") as gone:
            async with asyncio.timeout(30):
                async for _ in client.watch("1"):
                    pass
    assert gone.value.status == GONE


async def a_condition_is_merged_by_its_type_and_annotations_come_with_it(kubelet: Kubelet) -> None:
    await kubelet.create("p")
    await kubelet.set_status("p", {"conditions": [{"type": "PodScheduled", "status": "True"}]})
    pod = Pod.read(await kubelet.run("p"), "http")
    assert not pod.says(PROVEN)
    async with pods(kubelet) as client:
        written = await client.patch_status("p", pod.patch(PROVEN))
        now = Pod.read(written, "http")
        types = {c["type"] for c in written["status"]["conditions"]}
        assert types == {"PodScheduled", CONDITION} and now.says(PROVEN)
        assert now.annotations == {"octet.dev/artifact": "a"}
        assert now.server == pod.server
        since = now.condition["lastTransitionTime"]
        again = replace(PROVEN, message="still so")
        written = await client.patch_status("p", now.patch(again))
        assert Pod.read(written, "http").condition["lastTransitionTime"] == since
        refused = Report("False", "Refused", "x" * 2000, dict.fromkeys(PROVEN.annotations))
        now = Pod.read(await client.patch_status("p", now.patch(refused)), "http")
        assert now.says(refused) and now.condition["status"] == "False" and not now.annotations


async def a_patch_is_refused_for_another_pod_and_for_one_that_has_changed(kubelet: Kubelet) -> None:
    await kubelet.create("p")
    seen = Pod.read(await kubelet.run("p"), "http")
    await kubelet.run("p", "c2")
    refused = replace(PROVEN, status="False")
    async with pods(kubelet) as client:
        with pytest.raises(ApiError, match=r"cannot patch pod p: .*\(409\)"):
            await client.patch_status("p", seen.patch(PROVEN))
        await client.patch_status("p", seen.patch(refused))  # which may always be said
        other = replace(seen, uid="00000000-0000-0000-0000-000000000000")
        with pytest.raises(ApiError, match=r"metadata.uid: .* \(422\)"):
            await client.patch_status("p", other.patch(refused))
        with pytest.raises(ApiError, match=r"cannot patch pod absent: .*not found.* \(404\)"):
            await client.patch_status("absent", seen.patch(refused))


async def the_role_suffices_and_without_it_the_refusal_names_verb_and_resource(
    kubelet: Kubelet,
) -> None:
    await kubelet.create("p")
    seen = Pod.read(await kubelet.run("p"), "http")
    nobody = await kubelet.service_account("nobody")
    prover = await kubelet.service_account("prover", [*ROLE])
    async with Pods(prover, kubelet.namespace, LABELS) as client:
        items, version = await client.list()
        assert len(items) == 1
        await client.patch_status("p", seen.patch(replace(PROVEN, status="False")))
        async for _, item in client.watch(version):
            assert item["metadata"]["name"] == "p"
            break
        assert not await client.missing_namespace()  # it may not ask
    user = f'User "system:serviceaccount:{kubelet.namespace}:nobody" cannot'
    where = f'in API group "" in the namespace "{kubelet.namespace}"'
    async with Pods(nobody, kubelet.namespace, LABELS) as client:
        for verb, resource, send in (
            ("list", "pods", client.list),
            ("watch", "pods", lambda: anext(client.watch("0"))),
            ("patch", "pods/status", lambda: client.patch_status("p", {})),
        ):
            with pytest.raises(ApiError) as refused:
                await send()
            assert f'{user} {verb} resource "{resource}" {where}' in str(refused.value)
            assert "(403); a Role needs list and watch of pods" in str(refused.value)


async def an_expired_token_is_named(kubelet: Kubelet) -> None:
    late = replace(kubelet.admin, token=lambda: "expired")
    async with Pods(late, kubelet.namespace, LABELS) as client:
        with pytest.raises(ApiError, match=r"cannot list pods: Unauthorized \(401\); the token"):
            await client.list()


async def a_namespace_that_does_not_exist_is_noticed(kubelet: Kubelet) -> None:
    async with Pods(kubelet.admin, f"{kubelet.namespace}-absent", LABELS) as client:
        assert (await client.list())[0] == []
        assert await client.missing_namespace()
    async with pods(kubelet) as client:
        assert not await client.missing_namespace()


CHECKS: tuple[Any, ...] = (
    events_are_watched_from_the_version_of_a_list,
    a_list_comes_in_pages,
    a_watch_ends_with_its_time_and_goes_on_from_a_bookmark,
    a_version_of_long_ago_is_gone,
    a_condition_is_merged_by_its_type_and_annotations_come_with_it,
    a_patch_is_refused_for_another_pod_and_for_one_that_has_changed,
    the_role_suffices_and_without_it_the_refusal_names_verb_and_resource,
    an_expired_token_is_named,
    a_namespace_that_does_not_exist_is_noticed,
)
