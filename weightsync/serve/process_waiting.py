"""One wait for all processes of a server, wherever they were started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Protocol, runtime_checkable

from weightsync.serve import process_ends

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
        """Whether all have ended as they should. Raises ProcessLostError for one that died."""

    def close(self) -> None:
        """End them. Idempotent."""


def wait_for_completion_or_failure(
    api_server_manager: ProcessManager,
    engine_manager: ProcessManager | PolledManager | None = None,
    coordinator: ProcessManager | PolledManager | None = None,
) -> None:
    """Wait until the processes of all of them have ended, or one has failed; then close all.

    Returns when all ended with exit code 0, and on Ctrl-C. Raises ProcessLostError, with its name,
    pid and exit code, for the first that ended otherwise; the others are ended then.
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
    while True:
        polled = [manager for manager in polled if not manager.poll()]
        if not (processes or polled):
            return
        ended, _ = process_ends.wait_any(processes, timeout_s=POLL_S if polled else None)
        process_ends.raise_for(ended)
        processes = [process for process in processes if process not in ended]
