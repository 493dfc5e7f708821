"""Error handling of the links between processes: unreadable messages and failed tasks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

logger = logging.getLogger(__name__)


@contextmanager
def dropped(sender: str) -> Iterator[None]:
    """Log and suppress an error of decoding. The block must only decode a message of `sender`."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        logger.warning("a message of %s cannot be read and is dropped: %s", sender, exc)


EXIT_CODE = 70


def end_process(task: asyncio.Task[None]) -> None:
    """End this process if the task failed. A done-callback of tasks that must not fail.

    Otherwise other processes would wait for this task for ever. The supervisor ends the other
    processes and names this one.
    """
    if task.cancelled() or task.exception() is None:
        return
    logger.critical("a task failed that must not fail", exc_info=task.exception())
    os._exit(EXIT_CODE)
