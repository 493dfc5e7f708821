"""Who looks on at a sender's work, as its user asked: a progress bar, a callback, a trace."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.progress import OnProgress
from weightsync.sending.ensemble import RankGroup
from weightsync.sending.progress_watch import ProgressObserver
from weightsync.sending.trace_watch import TraceObserver, trace_path

Shown = bool | OnProgress
TracePath = str | PathLike[str]


def progress_callback(progress: Shown) -> OnProgress | None:
    """Return whom to tell; True is a bar on stderr.

    Raises BackendUnavailableError where that needs rich, ConfigError for what cannot be called.
    """
    if progress is True:
        try:
            bar: OnProgress = importlib.import_module("weightsync.progress_bar").ProgressBar()
        except ImportError as exc:
            raise BackendUnavailableError(
                f"progress=True needs rich ({exc}); pip install 'weightsync[cli]', or give a "
                "callback"
            ) from exc
        return bar
    if progress and not callable(progress):
        raise ConfigError(f"progress must be True, False or a callback, not {progress!r}")
    return progress or None


def watch_progress(group: RankGroup, callback: OnProgress | None) -> None:
    """Have `callback` told of every update of this ensemble. Called on rank 0 alone."""
    if callback is not None:
        group.observers.observers.append(ProgressObserver(group.worker, callback))


@contextmanager
def watching(group: RankGroup, trace: TracePath | None) -> Iterator[None]:
    """Around one call of the user, on rank 0 alone: those who look on learn when it is over."""
    tracer = TraceObserver(group.worker, trace_path(trace)) if trace is not None else None
    with group.observers.also(tracer), group.observers.looking():
        yield
