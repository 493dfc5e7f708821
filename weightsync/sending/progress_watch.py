"""Tells a callback how far an update is, now and then, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time

from weightsync.backends.ipc.sender import ReaderProgress
from weightsync.errors import WeightSyncError
from weightsync.progress import OnProgress, Phase, Progress
from weightsync.sending.commands import AnyCommand, Begin, End
from weightsync.sending.feeder import RELAY_READER, RankWorker
from weightsync.sending.watch import ObservedCall
from weightsync.wire.messages import FinishRequest, Reply, StartRequest, UpdateRequest

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
_LAST_WORD_S = 1.0
"""A callback that takes longer than this over the last word is no longer waited for."""


class ProgressObserver:
    """Calls `callback` about ten times a second during an update, and at its end.

    All calls come from one thread at a time; the sender only waits for the last. A callback that
    raises is logged once, and not called again.
    """

    def __init__(self, worker: RankWorker, callback: OnProgress) -> None:
        self._worker = worker
        self._callback: OnProgress | None = callback
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._clear()

    def _clear(self) -> None:
        self._phase: Phase = "transfer"
        self._end: Phase = "done"
        self._version: int | None = None
        self._total = 0
        self._started = 0.0
        self._reader_progress: ReaderProgress | None = None
        self._calls: dict[str, ObservedCall] = {}
        self._done: dict[str, int] = {}
        self._relayed = False

    def on_command_start(self, command: AnyCommand) -> None:
        if isinstance(command, End):
            self._reader_progress = None

    def on_command_end(self, command: AnyCommand) -> None:
        """An update has begun: the engine knows its stream, and the first call may follow."""
        if not isinstance(command, Begin):
            return
        engine = self._worker.engine
        self._phase = "transfer"
        self._calls, self._done = {}, {}
        manifest = self._worker.source.manifest
        if engine is not None and command.places.get(0):
            self._reader_progress = engine.reader_progress
            manifest = engine.reader_progress.plan.manifest
        self._total = manifest.nbytes
        self._relayed = RELAY_READER in command.places.get(0, [])
        if self._thread is None:
            self._start()

    def on_request(self, call: ObservedCall) -> None:
        request = call.request
        if isinstance(request, StartRequest):
            self._version = request.version
        elif isinstance(request, UpdateRequest):
            self._version = request.start.version if request.start else self._version
            self._calls[call.target] = call
        elif isinstance(request, FinishRequest) and self._thread is not None:
            self._phase = "finish"

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None:
        if isinstance(call.request, UpdateRequest) and not isinstance(answer, WeightSyncError):
            self._done[call.target] = self._total

    def on_done(self, error: BaseException | None) -> None:
        """Say the last word, from the thread that said the others."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._end = "done" if error is None else "failed"
        self._stop.set()
        thread.join(_LAST_WORD_S)
        if thread.is_alive():
            logger.warning("the progress callback still works on an update that is over")
        self._clear()

    def _start(self) -> None:
        self._started = time.perf_counter()
        stop = self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(stop,), name="weightsync-progress", daemon=True
        )
        self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while True:
            last = stop.is_set()
            if last:
                self._phase = self._end
            self._say(self._look())
            if last or self._callback is None:
                return
            stop.wait(INTERVAL_S)

    def _look(self) -> Progress:
        total, calls = self._total, dict(self._calls)
        done = {target: self._done.get(target, 0) for target in calls}
        if self._phase == "done":
            done = dict.fromkeys(done, total)
        reader_progress = self._reader_progress
        if reader_progress is not None:
            for target, call in calls.items():
                place = RELAY_READER if self._relayed and call.place is None else call.place
                if place is not None and not done[target]:
                    done[target] = min(_taken(reader_progress, place), total)
        finished = self._phase == "done" or (self._phase == "finish" and not done)
        slowest = total if finished else min(done.values(), default=0)
        return Progress(
            phase=self._phase,
            version=self._version,
            done_nbytes=slowest,
            total_nbytes=total,
            seconds=time.perf_counter() - self._started,
            receivers=done,
        )

    def _say(self, progress: Progress) -> None:
        try:
            if self._callback is not None:
                self._callback(progress)
        except Exception:
            self._callback = None
            logger.warning("the progress callback failed and is not called again", exc_info=True)


def _taken(reader_progress: ReaderProgress, place: int) -> int:
    """Between two updates the ring may just be closed: then nothing is known."""
    try:
        return reader_progress.taken_nbytes(place)
    except (ValueError, IndexError):
        return 0
