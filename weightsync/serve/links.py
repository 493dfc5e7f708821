"""What the links between processes share: tasks that must not end, and counts of bad frames."""

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
    """Log and swallow the error of a block that reads one message of `sender`, and only reads."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        logger.warning("a message of %s cannot be read and is dropped: %s", sender, exc)


EXIT_CODE = 70


def end_process(task: asyncio.Task[None]) -> None:
    """End this process if the task failed: done-callback of a task that must not.

    Whoever waits for what it brings would wait for ever; the supervisor ends the rest, and says
    which process it was.
    """
    if task.cancelled() or task.exception() is None:
        return
    logger.critical("a task that must not fail did", exc_info=task.exception())
    os._exit(EXIT_CODE)
