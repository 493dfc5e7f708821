"""One wait for all processes of a server, wherever they were started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Protocol, runtime_checkable

from weightsync.rollout import process_ends

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often those are asked that cannot be waited for together with processes: Ray actors."""


class ProcessManager(Protocol):
    """What has processes of this host, and ends them."""

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """Those that were started."""

    def close(self) -> None:
        """End them. Idempotent."""


@runtime_checkable
class PolledManager(Protocol):
    """What has to be asked how its processes do: RayEngines, for instance."""

    def poll(self) -> bool:
        """Whether one of them has ended as it should. Raises ProcessLostError for one that died."""

    def close(self) -> None:
        """End them. Idempotent."""


def wait_for_completion_or_failure(
    api_server_manager: ProcessManager,
    engine_manager: ProcessManager | PolledManager | None = None,
    coordinator: ProcessManager | PolledManager | None = None,
) -> None:
    """Wait until one process of any of them ends, then close all of them.

    Returns where it ended with exit code 0, and on Ctrl-C. Raises ProcessLostError, with its name,
    pid and exit code, where it ended otherwise.
    """
    given = [api_server_manager, engine_manager, coordinator]
    managers = [manager for manager in given if manager is not None]
    with ExitStack() as stack:
        for manager in reversed(managers):  # so that they are closed in the order given
            stack.callback(_close, manager)
        try:
            _wait(managers)
        except KeyboardInterrupt:
            logger.info("interrupted; the server ends")


wait_for_completion_or_shutdown = wait_for_completion_or_failure


def _close(manager: ProcessManager | PolledManager) -> None:
    with process_ends.signals_ignored():
        manager.close()


def _wait(managers: Sequence[ProcessManager | PolledManager]) -> None:
    polled = [manager for manager in managers if isinstance(manager, PolledManager)]
    processes = [
        process
        for manager in managers
        if not isinstance(manager, PolledManager)
        for process in manager.processes
    ]
    ended: list[BaseProcess] = []
    while not ended and not any(manager.poll() for manager in polled):
        ended, _ = process_ends.wait_any(processes, timeout_s=POLL_S if polled else None)
    process_ends.raise_for(ended)
