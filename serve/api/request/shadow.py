"""Sends copies of requests to a shadow pool, a pool on trial; reads and discards the answers.

No client waits for a copy, and no key pays for it. The configuration limits how many run at once.
"""

import asyncio
import logging
from contextlib import aclosing

from octet.errors import BackendError, OctetError, RequestError
from serve.api.operation import Call, Operation
from serve.gateway.state import Gateway
from serve.routing.policies import Ask
from serve.routing.pool import Pool

__all__ = ["cast_shadow"]

_log = logging.getLogger(__name__)


def cast_shadow(gateway: Gateway, operation: Operation, call: Call) -> None:
    """Sends a copy of `call` to its route's shadow pool, if it has one and the call is drawn."""
    settings = call.route.config.shadow
    pool = None if settings is None else call.route.shadow()
    if settings is None or pool is None or gateway.draining:
        return
    name = f"shadow of {call.route.name}"
    under_way = sum(task.get_name() == name for task in gateway.background)
    if under_way >= settings.max_in_flight:
        gateway.metrics.shadows.labels(pool.name, "skipped").inc()
        return
    task = asyncio.create_task(_shadow(gateway, operation, call, pool), name=name)
    gateway.background.add(task)
    task.add_done_callback(gateway.background.discard)


async def _shadow(gateway: Gateway, operation: Operation, call: Call, pool: Pool) -> None:
    outcome = "failed"
    try:
        outcome = await _answered(operation, call, pool)
    except OctetError as error:
        _log.info("shadow pool %s: %s", pool.name, error)
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    except Exception:
        _log.exception("shadow pool %s", pool.name)
    finally:
        gateway.metrics.shadows.labels(pool.name, outcome).inc()


async def _answered(operation: Operation, call: Call, pool: Pool) -> str:
    """Sends the call to one member, and reads the whole answer; returns the outcome's label."""
    tokens = sum(operation.cost(call.body, pool.config.admission.answer_tokens))
    member = pool.choose(Ask(tokens))
    if member is None:
        return "unavailable"
    lease = member.lease(tokens)
    total_s, began = pool.config.timeouts.total_s, False
    try:
        async with asyncio.timeout(total_s):
            answer = await operation.open(member.backend, call)
            if answer.rest is not None:
                began = True
                lease.progressed()
                async with aclosing(answer.rest) as rest:
                    async for _piece in rest:
                        lease.progressed()
        lease.written = answer.tally.completion_tokens or 0
        lease.served = (answer.tally.prompt_tokens or 0) + lease.written
        if answer.tally.failed is not None:
            raise answer.tally.failed
        if answer.status != 200:
            return "refused"
        if operation.runs_model:
            lease.succeeded()
        return "ok"
    except TimeoutError:
        if not began:  # an answer that has begun may just be long, which is no failure
            lease.failed(BackendError(f"{member.name}: no answer in {total_s:g} s", kind="timeout"))
        return "timeout"
    except BackendError as error:
        lease.failed(error)
        raise
    except RequestError:
        return "refused"
    finally:
        lease.release()
