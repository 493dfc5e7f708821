"""Tasks that last as long as their process, which is of no use without them."""

from __future__ import annotations

import asyncio
import logging
import os

logger = logging.getLogger(__name__)

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
