"""Rolls out a canary in steps: its proof, copies for the judge, a growing share, all requests.

The configuration file lists the canary with its share without a rollout, such as 0. A rollout sets
the share of each step, and goes on to the next when the judge rules that the pool is within its
limit. Anything else rolls it back to 0: a ruling above the limit, a refused proof, no backend that
serves, a pool that cannot be judged, or no ruling in time.

A file records how the rollout of each canary ended. It holds a share of 0 from the beginning of a
rollout to its end, and 1 only after a promotion. So a restart in the middle leaves the canary
without requests, and one after a promotion leaves it with all. A record counts only as long as the
configuration lists the same canary with the same backends, proof and judge.
"""

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from octet.errors import ConfigError, RequestError, nearest
from serve.backends.base import supervised
from serve.config import GatewayConfig, PoolConfig
from serve.members.member import Member
from serve.routing import Pool
from serve.routing.judgement import Judgement
from serve.telemetry.metrics import Metrics

__all__ = ["MAX_STEPS", "Rollout", "Rollouts"]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_OUT_S = 10.0  # outage that rolls a canary back; a shorter one only delays the rollout
_PROBLEMS = 5  # copies in a row that could not be judged
MAX_STEPS = 20

Outcome: TypeAlias = Literal["running", "promoted", "rolled_back", "interrupted"]


class _Record(BaseModel):
    """The state of one canary's rollout, as kept in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    pool: str
    share: float
    outcome: Outcome
    reason: str
    at: str  # UTC
    settings: str  # hash of the pool's settings


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    canaries: list[_Record] = []


@dataclass
class Rollout:
    """One rollout since the gateway's start."""

    model: str
    pool: str
    steps: tuple[float, ...]  # shares, ascending
    timeout_s: float  # for each of them
    outcome: Outcome = "running"
    reason: str = ""
    sent_back: bool = False  # by an administrator
    events: list[dict[str, Any]] = field(default_factory=list)
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat())  # tells two apart

    def note(self, text: str) -> None:
        """Records what happens, for people."""
        self.events.append({"at": _now(), "text": text})
        _log.info("rollout of %s for %s: %s", self.pool, self.model, text)


class Rolled(Protocol):
    """The parts of a gateway that a rollout needs."""

    config: GatewayConfig
    pools: dict[str, Pool]
    metrics: Metrics
    processes: int


class Rollouts:
    """The rollouts of a gateway: one at a time for each model."""

    def __init__(self, gateway: Rolled) -> None:
        """Reads the file of outcomes. Raises ConfigError if it is none."""
        self._gateway = gateway
        self._path = gateway.config.admin.rollouts_file
        self.shares: dict[tuple[str, str], float] = {}  # by model and pool
        self._records: dict[tuple[str, str], _Record] = {}
        self._rollouts: dict[str, Rollout] = {}  # the latest of each model
        self._tasks: dict[str, asyncio.Task[None]] = {}
        if self._path is not None:
            self._records = {(r.model, r.pool): r for r in _read(self._path).canaries}
        for record in self._records.values():
            if record.outcome == "running":
                record.outcome, record.reason = "interrupted", "the gateway was restarted"
        self.apply(gateway.config)

    def apply(self, config: GatewayConfig) -> None:
        """Ends the rollouts of canaries that `config` does not list as they were.

        `shares` has the records that count. The others stay in the file: they count again if the
        same settings return, as they do after a restart.
        """
        pools = config.all_pools
        for (model, pool), record in self._records.items():
            listed = model in config.models and _lists(config, model, pool)
            if listed and record.settings == _settings(pools[pool]):
                self.shares.setdefault((model, pool), record.share)  # that of a rollout stays
                continue
            self.shares.pop((model, pool), None)
            rollout = self._running(model)
            if rollout is not None and rollout.pool == pool:
                self._tasks[model].cancel()
                self._finish(rollout, "rolled_back", "the configuration of the pool has changed")
                record.outcome, record.reason = rollout.outcome, rollout.reason
            if listed:
                _log.warning(
                    "models.%s: the outcome '%s' of the rollout of %s does not count, because the"
                    " pool's settings have changed: its share is that of the configuration file",
                    *(model, record.outcome, pool),
                )

    def start(
        self, model: str, pool: str, steps: Sequence[float], timeout_s: float
    ) -> dict[str, Any]:
        """Starts a rollout; returns its state. Raises RequestError if it cannot be."""
        self._require_model(model)
        self._require_able(model, pool)
        if not steps or len(steps) > MAX_STEPS or list(steps) != sorted(set(steps)):
            raise _refused("steps: give at most 20 shares in ascending order, such as 0.1, 1")
        if steps[0] <= 0 or steps[-1] != 1:
            raise _refused("steps: each should be above 0, and the last should be 1")
        if (running := self._running(model)) is not None:
            raise _conflict(f"the pool '{running.pool}' is being rolled out for '{model}' already")
        if self._promoted(model, pool):
            raise _conflict(f"the pool '{pool}' is promoted already: it gets all requests")
        rollout = Rollout(model, pool, tuple(steps), timeout_s)
        self._record(rollout, 0.0)
        self._rollouts[model] = rollout
        self._tasks[model] = asyncio.create_task(self._run(rollout), name=f"rollout of {pool}")
        return self.state(model)

    def back(self, model: str) -> dict[str, Any]:
        """Sends a running or promoted rollout back; returns its state."""
        self._require_model(model)
        if (rollout := self._running(model)) is not None:
            rollout.sent_back = True
            return self.state(model)
        for name, pool in self._records:
            if name == model and self._promoted(model, pool):
                self._end(Rollout(model, pool, (), 0.0), "an administrator sent it back")
                return self.state(model)
        raise _conflict(f"nothing to send back: no canary of '{model}' is rolled out")

    def exceeded(self, pool: Pool) -> None:
        """Rolls back the canaries of `pool`, whose judge has ruled that it exceeds its limit."""
        why = f"it exceeds its limit: {_judgement(pool).sentence()}"
        for model, settings in self._gateway.config.models.items():
            rollout = self._running(model)
            if rollout is not None and rollout.pool == pool.name:
                continue  # it finds out itself
            for canary in settings.canary:
                share = self.shares.get((model, canary.pool), canary.fraction)
                if canary.pool == pool.name and share > 0:
                    self._end(Rollout(model, pool.name, (), 0.0), why)

    def state(self, model: str) -> dict[str, Any]:
        """Returns the latest rollout of `model`. Raises RequestError (404) if there was none."""
        self._require_model(model)
        found = self.status(model)
        if found is None:
            raise RequestError(
                f"no canary of '{model}' was rolled out", status=404, code="no_rollout"
            )
        return found

    def status(self, model: str) -> dict[str, Any] | None:
        """Returns the latest rollout of `model`, or the record of an earlier process."""
        rollout = self._rollouts.get(model)
        if rollout is None:
            records = [
                r for key, r in self._records.items() if r.model == model and key in self.shares
            ]
            if not records:
                return None
            last = max(records, key=lambda record: record.at)
            found = last.model_dump(exclude={"settings"})
            return found | {"began": last.at, "steps": [], "events": []}
        return {
            "model": model,
            "pool": rollout.pool,
            "share": self.shares.get((model, rollout.pool)),
            "outcome": rollout.outcome,
            "reason": rollout.reason,
            "began": rollout.began,
            "at": rollout.events[-1]["at"] if rollout.events else rollout.began,
            "steps": list(rollout.steps),
            "events": list(rollout.events),
        }

    async def close(self) -> None:
        """Stops every rollout where it is; the file has their canaries at a share of 0."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, rollout: Rollout) -> None:
        try:
            why = await self._advanced(rollout)
        except Exception as error:
            _log.exception("rollout of %s", rollout.pool)
            why = f"a defect: {error!r}"
        self._end(rollout, why)

    async def _advanced(self, rollout: Rollout) -> str | None:
        """Takes the canary through every step; returns why it must go back, or None."""
        pool, key = self._gateway.pools[rollout.pool], (rollout.model, rollout.pool)
        _judgement(pool).restart()  # what an earlier rollout found may have been repaired
        rollout.note("waits until a backend of the pool is proven and ready")
        why = await self._reached(rollout, pool, lambda: pool.ready, starting=True)
        for share in (0.0, *rollout.steps):
            if why is not None:
                return why
            _judgement(pool).restart()
            self.shares[key] = share
            clients = f"a share of {share:g} of the requests" if share else "copies alone"
            rollout.note(f"gets {clients}")
            why = await self._reached(rollout, pool, lambda: _judgement(pool).ruling == "within")
            if why is None:
                rollout.note(f"is within its limit: {_judgement(pool).sentence()}")
        return why

    async def _reached(
        self, rollout: Rollout, pool: Pool, goal: Callable[[], bool], *, starting: bool = False
    ) -> str | None:
        """Waits for `goal`; returns why it is not reached, or None."""
        began = ready_at = time.monotonic()
        told, next_at = "", began + _OUT_S
        while True:
            now = time.monotonic()
            ready_at = now if pool.ready or starting else ready_at
            if rollout.sent_back:
                return "an administrator sent it back"
            if (why := _fault(pool)) is not None:
                return why
            if goal():
                return None
            if now - ready_at > _OUT_S:
                return f"no backend of the pool serves ({_standings(pool)})"
            if now - began > rollout.timeout_s:
                late = f"not decided within {rollout.timeout_s:g} s"
                if starting:
                    return f"{late}: no backend of the pool serves ({_standings(pool)})"
                copies = ", ".join(f"{n} {name}" for name, n in _judgement(pool).outcomes.items())
                return f"{late}: {_judgement(pool).sentence()}; copies so far: {copies or 'none'}"
            if starting and now > next_at and (found := _standings(pool)) != told:
                told, next_at = found, now + _OUT_S
                rollout.note(f"still waits: {found}")
            await asyncio.sleep(_POLL_S)

    def _end(self, rollout: Rollout, why: str | None) -> None:
        """Promotes the canary, or rolls it back because of `why`."""
        if self._running(rollout.model) is None:  # else it is of another canary, and goes on
            self._rollouts[rollout.model] = rollout
        if why is None:
            rollout.outcome = "promoted"
            try:
                self._record(rollout, 1.0)
                self._finish(rollout, "promoted", "")
                return
            except RequestError as error:
                why = str(error)
        rollout.outcome, rollout.reason = "rolled_back", why
        try:
            self._record(rollout, 0.0)
        except RequestError as error:
            key = rollout.model, rollout.pool
            self._records[key], self.shares[key] = (
                _recorded(rollout, 0.0, self._gateway.config),
                0.0,
            )
            if str(error) != why:
                why += f"; a restart may undo this: {error}"
            _log.error("%s", error)
        self._finish(rollout, "rolled_back", why)

    def _finish(self, rollout: Rollout, outcome: Outcome, reason: str) -> None:
        rollout.outcome, rollout.reason = outcome, reason
        rollout.note(
            "is promoted: it gets all requests" if not reason else f"rolled back: {reason}"
        )
        self._gateway.metrics.rollouts.labels(rollout.model, rollout.pool, outcome).inc()

    def _record(self, rollout: Rollout, share: float) -> None:
        """Writes the file, then sets the share. Raises RequestError (503) if it is not written."""
        key = rollout.model, rollout.pool
        records = self._records | {key: _recorded(rollout, share, self._gateway.config)}
        if self._path is not None:
            _write(self._path, _Document(canaries=list(records.values())))
        self._records = records
        self.shares[key] = share

    def _running(self, model: str) -> Rollout | None:
        rollout = self._rollouts.get(model)
        return rollout if rollout is not None and rollout.outcome == "running" else None

    def _promoted(self, model: str, pool: str) -> bool:
        """Returns whether the pool is promoted, and its record counts."""
        record = self._records.get((model, pool))
        return record is not None and record.outcome == "promoted" and (model, pool) in self.shares

    def _require_model(self, model: str) -> None:
        models = self._gateway.config.models
        if model not in models:
            raise RequestError(
                f"no model '{model[:100]}'{nearest(model[:100], models)}",
                status=404,
                code="model_not_found",
            )

    def _require_able(self, model: str, pool: str) -> None:
        config = self._gateway.config
        canaries = [canary.pool for canary in config.models[model].canary]
        if self._path is None:
            raise _refused("set admin.rollouts_file: a restart must not undo a promotion")
        if self._gateway.processes > 1:
            raise _refused("several workers serve this gateway: a rollout needs a single one")
        if not _lists(config, model, pool):
            known = ", ".join(canaries) or "none"
            raise _refused(
                f"the pool '{pool[:100]}' is no canary of '{model}' (its canaries: {known}): add "
                f"{{pool: NAME, fraction: 0}} to models.{model}.canary, and reload"
            )
        if config.all_pools[pool].judge is None:
            raise _refused(f"the pool '{pool}' has no judge: set pools.{pool}.judge, and reload")
        for canary in config.models[model].canary:
            if canary.pool != pool and self.shares.get((model, canary.pool), canary.fraction) > 0:
                raise _conflict(
                    f"the canary '{canary.pool}' of '{model}' gets requests: send it back first"
                )


def _lists(config: GatewayConfig, model: str, pool: str) -> bool:
    return any(canary.pool == pool for canary in config.models[model].canary)


def _judgement(pool: Pool) -> Judgement:
    """Returns the present one: a reload that changes only a backend's key makes it anew."""
    assert pool.judgement is not None
    return pool.judgement


def _fault(pool: Pool) -> str | None:
    """Returns why the pool must not go on, or None."""
    judgement = _judgement(pool)
    if judgement.ruling == "exceeds":
        return f"it exceeds its limit: {judgement.sentence()}"
    refused = [m.proof for m in pool.members if m.standing == "refused" and m.proof is not None]
    if refused and not pool.ready:
        return f"its proof refuses it: {refused[0].reason}"
    ends = [m.backend.gave_up if supervised(m.backend) else "" for m in pool.members]
    if ends and all(ends) and not pool.ready:
        return f"it does not start: vLLM {ends[0]}"
    if judgement.problems >= _PROBLEMS:
        return f"it cannot be judged: {judgement.problem}"
    return None


def _standings(pool: Pool) -> str:
    return "; ".join(map(_standing, pool.members)) or "it has none"


def _standing(member: Member) -> str:
    proof, text = member.proof, f"{member.name} {member.standing}"
    unsure = proof is not None and member.standing in ("unproven", "refused")
    return f"{text}: {proof.reason}" if proof is not None and unsure else text


# How often, and with how many requests, a pool is proven and judged: these change no outcome.
_SCHEDULE = {
    "proof": {"every_s", "share", "timeout_s", "concurrency"},
    "judge": {"share", "tokens_per_minute", "max_in_flight"},
}


def _settings(pool: PoolConfig) -> str:
    """Hashes the settings that decide what a pool serves, and by what it is judged.

    Without defaults: a setting that a later release adds changes no pool that does not set it.
    """
    found = pool.model_dump(
        mode="json",
        include={"backends", "discover", "proof", "judge"},
        exclude=_SCHEDULE,
        exclude_defaults=True,
    )
    found = {name: section for name, section in found.items() if section}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _recorded(rollout: Rollout, share: float, config: GatewayConfig) -> _Record:
    return _Record(
        model=rollout.model,
        pool=rollout.pool,
        share=share,
        outcome=rollout.outcome,
        reason=rollout.reason,
        at=_now(),
        settings=_settings(config.all_pools[rollout.pool]),
    )


def _read(path: Path) -> _Document:
    try:
        return _Document.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return _Document()
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "not what Octet writes"
        raise ConfigError(
            f"admin.rollouts_file: {path}: {why}; without it, the shares of canaries are those of"
            " the configuration file: check them, then move it away"
        ) from None


def _write(path: Path, document: _Document) -> None:
    """Writes the file atomically. Raises RequestError (503), and leaves the file as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(document.model_dump_json(indent=1), "utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RequestError(
            f"admin.rollouts_file: {path}: not written: {error.strerror}",
            status=503,
            code="rollouts_file",
        ) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _refused(message: str) -> RequestError:
    return RequestError(message, code="rollout_refused")


def _conflict(message: str) -> RequestError:
    return RequestError(message, status=409, code="rollout_refused")
