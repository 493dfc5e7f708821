"""Progress bar of `connect(progress=True)`. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from weightsync.progress import Progress


class ProgressBar:
    """Progress callback that draws a bar on stderr: bytes, rate and time left.

    The bar disappears at the end of the update. Nothing is written if stderr is no terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: Bars | None = None
        self._task = TaskID(0)

    def __call__(self, progress: Progress) -> None:
        """Draw the bar. Called by the sender's progress thread."""
        if self._bars is None:
            self._bars = self._open()
            self._task = self._bars.add_task("", total=progress.total_nbytes)
        version = "…" if progress.version is None else progress.version
        self._bars.update(
            self._task,
            description=f"version {version}: {progress.phase}",
            completed=progress.done_nbytes,
            total=progress.total_nbytes,
            refresh=True,
        )
        if progress.phase in ("done", "failed"):
            bars, self._bars = self._bars, None
            bars.stop()

    def _open(self) -> Bars:
        bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,  # each call draws once
            transient=True,
        )
        bars.start()
        return bars
