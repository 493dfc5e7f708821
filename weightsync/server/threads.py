"""Worker threads of async handlers, limited in number also where clients disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
from anyio.to_thread import run_sync

T = TypeVar("T")


async def run_limited(limiter: anyio.CapacityLimiter, call: Callable[..., T], *args: object) -> T:
    """Return the result of `call` in a worker thread, one of those that `limiter` allows.

    A handler that is cancelled, because its client disconnects for instance, leaves the call, which
    goes on. It counts until it ends: `abandon_on_cancel` alone would free its place at once, and
    clients that come and go could start any number of threads. The end of the event loop does not
    wait for it.
    """
    running = asyncio.ensure_future(
        run_sync(partial(call, *args), limiter=limiter, abandon_on_cancel=True)
    )
    return await asyncio.shield(running)
