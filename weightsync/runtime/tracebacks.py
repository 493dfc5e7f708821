"""Tracebacks of errors that public calls raise: the caller's line, then the error."""

from __future__ import annotations

import functools
import logging
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from weightsync.errors import TransferCancelled, TransportError, WeightSyncError
from weightsync.runtime.interpreter_exit import TorchCalls, keep_frames

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_OURS = str(Path(__file__).parent.parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep  # below the standard library, in some layouts
_drops = TorchCalls()


def _begin_in_child() -> None:
    """Forked children forget all members of the exit, whose threads they do not have."""
    global _drops  # noqa: PLW0603  # a fork has one of its own
    _drops = TorchCalls()


os.register_at_fork(after_in_child=_begin_in_child)


def concise(call: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a public call: its WeightSyncErrors are raised as `shortened`."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except WeightSyncError as exc:
            raise shortened(exc) from exc.__cause__

    return called


def shortened(error: WeightSyncError) -> WeightSyncError:
    """Return the error without frames of this package, which are logged at level DEBUG.

    Its cause stays where it shows code of the user, such as a hook or a source; others repeat
    what the message says.
    """
    logger.debug("%s was raised", type(error).__name__, exc_info=error)
    try:
        with _drops.inside():  # the frames may hold the last references to tensors
            error.__cause__ = _cause_of_the_user(error)
            return error.with_traceback(None)
    except TransferCancelled:
        keep_frames(error)
        return error.with_traceback(None)


def _cause_of_the_user(error: WeightSyncError) -> BaseException | None:
    """Return the cause whose traceback begins in the user's code, and cut it to begin there."""
    if isinstance(error, TransportError):
        return None
    cause: BaseException | None = error
    seen_errors = set[int]()
    while cause is not None and id(cause) not in seen_errors:
        seen_errors.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if cause is not None and not isinstance(cause, WeightSyncError):
            seen = cause.__traceback__
            while seen is not None and _is_internal(seen):
                seen = seen.tb_next
            if seen is not None:
                return cause.with_traceback(seen)
    return None


def _is_internal(step: TracebackType) -> bool:
    name = step.tb_frame.f_code.co_filename
    return name.startswith((_OURS, "<frozen ")) or (
        name.startswith(_STDLIB) and not name.startswith(_PACKAGES)
    )
