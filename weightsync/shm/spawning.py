"""Checks that refuse forked processes early; processes that use queues are started by spawn.

A fork copies locks that other threads hold, CUDA state that does not work in the child, and sockets
whose second copy hides the death of their owner.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import BaseContext

from weightsync.errors import ConfigError

_USE_SPAWN = 'start processes with multiprocessing.get_context("spawn")'


class _History:
    """The parent process, if this process was forked after this module was loaded."""

    forked_from: int | None = None


def require_spawn(context: BaseContext | None = None) -> None:
    """Raise ConfigError if `context` (None: the default one) starts processes by fork.

    Called before processes that will use a queue are started.
    """
    method = (context or multiprocessing.get_context()).get_start_method()
    if method == "fork":
        raise ConfigError(
            'the start method is "fork", which copies locks and CUDA state but no threads; '
            f"{_USE_SPAWN}"
        )


def refuse_forked(what: str) -> None:
    """Raise ConfigError if this process was forked from a process that had loaded weightsync."""
    if _History.forked_from is not None:
        raise ConfigError(
            f"{what} cannot be made in process {os.getpid()}, which was forked from "
            f"{_History.forked_from} after weightsync was loaded there; {_USE_SPAWN}"
        )


def refuse_other_process(what: str, pid: int) -> None:
    """Raise ConfigError unless this is process `pid`, which made `what`."""
    if os.getpid() != pid:
        raise ConfigError(
            f"{what} was made in process {pid} and cannot be used in its fork {os.getpid()}; "
            f"{_USE_SPAWN}, and make one there from the queue's handle"
        )


def _after_fork_in_child() -> None:
    _History.forked_from = os.getppid()


os.register_at_fork(after_in_child=_after_fork_in_child)
