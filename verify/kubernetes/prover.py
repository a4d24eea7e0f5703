"""Keeps a condition on each selected pod equal to what is proven about its server.

The pods' servers are the members of a `Pool`, so the gateway's own health checks and provers do the
proving, on the gateway's schedule. No request goes through it. A loop compares the
condition of each pod with the result of its proof, and patches the pods that differ.

A condition stays "True", until a probe says otherwise, while it belongs to the running server, by
its annotation: a prover that restarts or loses the network takes no proven pod out of service. A
server that does not answer is the readiness probe's concern.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octet.errors import OctetError, printable
from serve.backends.base import Incarnation
from serve.config import PoolConfig
from serve.members.member import Member
from serve.members.proof_state import PROVEN, MemberProof
from serve.proof.exam import Exam, Exams
from serve.proof.prover import Backoff
from serve.routing import Pool
from verify.kubernetes.api import GONE, ApiError, Pods
from verify.kubernetes.pod import ANNOTATIONS, CONDITION, Pod, Report
from verify.server.connect import Query, http_config

__all__ = ["PodProver", "Watched"]

_log = logging.getLogger(__name__)
_COMPARE_S = 0.5  # between two comparisons of the pods' conditions with their proofs
_READ_S = 5.0  # between two readings of a server's start and token counts
# The first and the longest delay before a retry: of a pod's server that does not answer, and of the
# API server.
_SILENT_S = (1.0, 30.0)
_API_S = (0.5, 60.0)
_REFUSED_S = 10.0  # before a condition that the API server did not accept is written again
# Stands for the served tokens of a server that does not count them: the limit of probes to a share
# of the served tokens then never applies, so that only the schedule does.
_UNCOUNTED = 2**40
_LONGEST_NAME = 200  # characters of a backend's name; a pod's has up to 253


@dataclass
class Watched:
    """A pod, and what is known of its server."""

    pod: Pod
    member: Member | None = None  # once it has answered
    silent: str = ""  # why there is no member yet
    incarnation: Incarnation | None = None  # as last reported
    member_incarnation: int = 0  # `member.incarnation` when `incarnation` was read
    task: asyncio.Task[None] | None = None
    write_at: float = 0.0  # when its condition may be written again, by the clock
    failure: str = ""  # of the last write

    @property
    def server(self) -> str | None:
        """Identifies the incarnation that serves, as far as it is known."""
        started = self.incarnation and self.incarnation.started
        return self.pod.server and self.pod.server + (f" {started:.2f}" if started else "")


class PodProver:
    """Proves the pods that `pods` selects. `run` works until it is cancelled."""

    def __init__(
        self,
        pods: Pods,
        query: Query,
        config: PoolConfig,
        exam: Exam,
        *,
        port: str,
        condition: str = CONDITION,
        rng: random.Random | None = None,
    ) -> None:
        """`query` says how a server is reached, apart from its URL; `port` is as in `Pod.read`."""
        self.pods = pods
        self.pool = Pool(pods.namespace, config, exams=_Single(config, exam))
        self.watched: dict[str, Watched] = {}  # by the pod's UID
        self.problem = ""  # why what is known from the API server may be outdated
        self.listed = asyncio.Event()  # the pods have been listed once
        self._query = query
        self._exam = exam
        self._port = port
        self._condition = condition
        self._rng = rng or random.Random()
        self._gateless_logged = False  # a warning of pods without the readiness gate

    async def run(self) -> None:
        """Watches and proves until cancelled; then leaves all conditions as they are.

        Raises ApiError if the pods cannot be listed at the start.
        """
        try:
            version = await self._list()
            if not self.watched and await self.pods.missing_namespace():
                url, name = self.pods.cluster.url, self.pods.namespace
                raise ApiError(f"{url}: there is no namespace '{name}'; name one with --namespace")
            if not self.watched:
                where = (self.pods.namespace, self.pods.selector)
                _log.warning("no pod in namespace %s has the labels %s yet", *where)
            self.listed.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(version))
                group.create_task(self._report())
        finally:
            tasks = [watched.task for watched in self.watched.values() if watched.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.pool.close()

    def report(self, watched: Watched) -> Report | None:
        """Returns the condition that a pod should have; None if it has that already."""
        member, pod = watched.member, watched.pod
        proof = member.proof if member is not None else None
        if proof is not None and proof.state in PROVEN:
            reason = "Proven" if proof.state == "proven" else "WeaklyProven"
            return self._with_annotations(watched, "True", reason, proof.reason, proof)
        if proof is not None and proof.state == "refused":
            return self._with_annotations(watched, "False", "Refused", proof.reason, proof)
        if self._is_still_true(watched, proof):
            return None
        if pod.server is None:
            reason, message = "NotRunning", _not_running(pod, self._port)
        elif proof is None or member is None or not member.reachable:
            reason = "NotAnswering"
            message = watched.silent or (member.last_error if member else "")
            message = message or "its server has not been queried yet"
        else:
            reason, message = "NotProven", proof.reason
        return self._with_annotations(watched, "False", reason, message, None)

    def _is_still_true(self, watched: Watched, proof: MemberProof | None) -> bool:
        """Decides whether the pod's condition is "True" for the server that runs now."""
        pod = watched.pod
        recorded = pod.annotations.get("octet.dev/proven-server", "")
        if pod.condition.get("status") != "True" or pod.server is None:
            return False
        if any(pod.annotations.get(name) != text for name, text in self._settings.items()):
            return False
        if proof is not None and _suspected(proof):
            return False
        was, now = recorded.split(" "), (watched.server or "").split(" ")
        started = {words[2] for words in (was, now) if len(words) > 2}  # where it is known
        return was[:2] == now[:2] and len(started) < 2

    @property
    def _settings(self) -> dict[str, str]:
        query = self._query
        given = {
            "weights": query.weights,
            "kv-cache": query.kv_cache,
            "engine": query.engine,
            "device": query.device,
        }
        settings = " ".join(f"{name}={value}" for name, value in given.items() if value)
        return {"octet.dev/artifact": self._exam.identity, "octet.dev/settings": settings}

    def _with_annotations(
        self,
        watched: Watched,
        status: Any,
        reason: str,
        message: str,
        proof: MemberProof | None,
    ) -> Report:
        annotations: dict[str, str | None] = dict.fromkeys(ANNOTATIONS)
        annotations |= self._settings
        if proof is not None and proof.verdict is not None:
            measure = proof.verdict.measure
            figures = [f"{nats:.4g}" for nats in (measure.kl_mean, measure.kl_low, measure.kl_high)]
            annotations["octet.dev/divergence"] = "{} [{}, {}] nats".format(*figures)
        if status == "True":
            annotations["octet.dev/proven-server"] = watched.server
        # The API server replaces what is not Unicode, so the condition would differ for ever.
        return Report(status, reason, printable(message), annotations)

    async def _watch(self, version: str) -> None:
        """Watches the pods for ever, and lists them again if changes after `version` are not kept.

        A failure is logged once, and the request repeated after a delay.
        """
        backoff = Backoff(self._rng)
        while True:
            try:
                if not version:
                    version = await self._list()
                async for kind, item in self.pods.watch(version):
                    version = _version(item) or version
                    self._recovered()
                    backoff.reset()
                    if kind != "BOOKMARK":
                        await self._update(item, gone=kind == "DELETED")
                self._recovered()
                backoff.reset()
                await asyncio.sleep(_API_S[0])  # some proxies end a watch at once
            except ApiError as error:
                if error.status:
                    version = ""
                if error.status != GONE:
                    self._failing(str(error))
                await asyncio.sleep(backoff.next(_API_S))

    def _failing(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("%s; the conditions stay as they are, and it is tried again", problem)
        self.problem = problem

    def _recovered(self) -> None:
        if self.problem:
            _log.info("%s answers again", self.pods.cluster.url)
        self.problem = ""

    async def _list(self) -> str:
        """Lists and updates all pods; returns the version to watch from. Raises ApiError."""
        items, version = await self.pods.list()
        self._recovered()
        there = {str((item.get("metadata") or {}).get("uid")) for item in items}
        for uid in [uid for uid in self.watched if uid not in there]:
            await self._drop(uid)
        for item in items:
            await self._update(item, gone=False)
        return version

    async def _update(self, item: Mapping[str, Any], *, gone: bool) -> None:
        """Updates one pod; its server is proven anew if its container or address has changed."""
        try:
            pod = Pod.read(item, self._port, self._condition)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            _log.warning("%s: sent an invalid pod (%r)", self.pods.cluster.url, error)
            return
        before = self.watched.get(pod.uid)
        if gone or pod.leaving:
            await self._drop(pod.uid)
            return
        if before is not None and before.pod.server == pod.server:
            woken = pod.ready and not before.pod.ready
            before.pod = pod
            if woken and before.member is None and pod.server is not None:
                await self._begin(before)
            return
        await self._drop(pod.uid)
        watched = self.watched[pod.uid] = Watched(pod)
        if not pod.gated:
            self._warn_gateless(pod)
        if pod.server is not None:
            await self._begin(watched)

    def _warn_gateless(self, pod: Pod) -> None:
        line = (
            "pod %s has no readiness gate %s: it gets traffic, proven or not. Add `readinessGates:"
            " [{conditionType: %s}]` to the pod template, and start its pods again"
        )
        level = logging.DEBUG if self._gateless_logged else logging.WARNING
        self._gateless_logged = True
        _log.log(level, line, pod.name, self._condition, self._condition)

    async def _begin(self, watched: Watched) -> None:
        """Starts to follow its server, at once even if that was to be tried later."""
        await _ended(watched.task)
        watched.task = asyncio.create_task(self._follow(watched))

    async def _drop(self, uid: str) -> None:
        watched = self.watched.pop(uid, None)
        if watched is None:
            return
        await _ended(watched.task)
        if watched.member is not None:
            rest = [member for member in self.pool.members if member is not watched.member]
            self.pool.swap(self.pool.config, rest)

    async def _follow(self, watched: Watched) -> None:
        """Makes the pod's server a member of the pool once it answers; then reads its counts."""
        backoff = Backoff(self._rng)
        while watched.member is None:
            try:
                await self._join(watched)
            except OctetError as error:
                if str(error) != watched.silent:
                    _log.warning("pod %s: %s; trying again", watched.pod.name, error)
                watched.silent = str(error)
                await asyncio.sleep(backoff.next(_SILENT_S))
            except Exception as error:  # a defect of Octet must not end the watch of a pod
                _log.exception("pod %s", watched.pod.name)
                watched.silent = f"it could not be queried: {type(error).__name__}"
                await asyncio.sleep(backoff.next(_SILENT_S))
        while True:
            with contextlib.suppress(Exception):  # the next reading may succeed
                await self._read(watched, watched.member)
            proven = watched.member.proof is not None and watched.member.proof.admits
            await asyncio.sleep(_READ_S if proven else _COMPARE_S)

    async def _join(self, watched: Watched) -> None:
        """Adds its server to the pool. Raises OctetError if it does not answer, or never can."""
        assert watched.pod.url is not None
        model, config = await http_config(replace(self._query, url=watched.pod.url))
        name = watched.pod.name[-_LONGEST_NAME:].lstrip("-.")
        config = config.model_copy(update={"name": name})
        member = await self.pool.prepare(config, "kubernetes", model=model, patience_s=0.0)
        # Nothing may fail or be cancelled before it is in the pool: nobody would close it.
        self.pool.swap(self.pool.config, [*self.pool.members, member])
        watched.member, watched.silent = member, ""

    async def _read(self, watched: Watched, member: Member) -> None:
        """Reads when the server started, and how many tokens its clients' requests took."""
        if not member.reachable or member.proof is None:
            return
        number = member.incarnation
        async with asyncio.timeout(_READ_S):
            found = await member.backend.incarnation()
        if found is None:
            return
        before = watched.incarnation
        same = number == watched.member_incarnation
        if before is not None and same and not found.follows(before):
            return  # the proof is of the previous incarnation, until the pool notices the restart
        watched.incarnation, watched.member_incarnation = found, number
        served = _UNCOUNTED
        if found.counts:
            served = max(sum(found.counts) - member.proof.tokens, 0)
        member.served_tokens = served

    async def _report(self) -> None:
        while True:
            await asyncio.gather(*map(self._write, list(self.watched.values())))
            await asyncio.sleep(_COMPARE_S)

    async def _write(self, watched: Watched) -> None:
        """Patches a pod whose condition says something else than it should."""
        pod, now = watched.pod, time.monotonic()
        report = self.report(watched)
        if report is None or pod.says(report) or now < watched.write_at:
            return
        try:
            item = await self.pods.patch_status(pod.name, pod.patch(report, self._condition))
        except ApiError as error:
            if error.status == 409:  # it has changed since it was read: its event is on the way
                watched.write_at = now + _COMPARE_S
            elif error.status != 404:  # then it is gone; the watch will say so
                self._unwritten(watched, str(error))
            return
        if pod.condition.get("status") != report.status:
            lost = pod.condition.get("status") == "True" or report.reason == "Refused"
            level = logging.WARNING if lost else logging.INFO
            line = "pod %s: %s=%s: %s"
            _log.log(level, line, pod.name, self._condition, report.status, report.message)
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, IndexError):
            written = Pod.read(item, self._port, self._condition)
            if written.says(report):
                watched.failure = ""
            else:  # an admission webhook may change it
                line = f"pod {pod.name}: the API server did not keep all that was written"
                self._unwritten(watched, line)
            if watched.pod is pod and written.server == pod.server:
                watched.pod = written  # sooner than the watch brings it

    def _unwritten(self, watched: Watched, problem: str) -> None:
        watched.write_at = time.monotonic() + _REFUSED_S
        if problem != watched.failure:
            _log.warning("%s; trying again", problem)
        watched.failure = problem


class _Single(Exams):
    """The one exam of all pods, loaded before the first of them is there."""

    def __init__(self, config: PoolConfig, exam: Exam) -> None:
        super().__init__(config.proof)
        self._exam = exam

    async def find(self, entry: Any) -> Exam | None:
        return self._exam


def _suspected(proof: MemberProof) -> bool:
    """Decides whether a probe of a proven server looked wrong, and no later one right."""
    for probe in reversed(proof.history):
        if probe["outcome"] in ("suspect", "as_expected"):
            return bool(probe["outcome"] == "suspect")
    return False


def _not_running(pod: Pod, port: str) -> str:
    if pod.ip is None:
        return "the pod has no IP address yet"
    if pod.port is None:
        return f"none of its containers has a port named '{port}'"
    return "its container does not run"


def _version(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("resourceVersion") or "")


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
