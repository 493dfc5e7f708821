"""Every place where a process can die during an update: around its messages and its chunks.

A boundary is named by what is about to happen, or has just happened, for the n-th time: `before
publish 3`. In a process of receivers or in a trainer, `Boundaries` counts them all, and kills its
own process at one of them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from weightsync.receiver import WeightReceiver
from weightsync.shm.ring import Control, RingReader, RingWriter
from weightsync.transports.http import HttpTransport
from weightsync.weights.copying.copy_plan import CopyAndHash, HostCopies, HostCopyUnit
from weightsync.wire.messages import CALL_OF, StatusRequest

Label = Callable[..., str]


class Boundaries:
    """The boundaries that this process has passed; it dies at `fatal`."""

    def __init__(self, fatal: str = "") -> None:
        self.fatal = fatal
        self.passed: list[str] = []
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def of_trainer(self) -> Boundaries:
        """Count the messages that this process sends, and the chunks that it fills."""
        self._around(HttpTransport, "call", _call)
        self._around(RingWriter, "acquire", lambda *_, **__: "acquire")
        self._around(RingWriter, "publish", lambda *_: "publish")
        self._around(RingWriter, "drain", lambda *_, **__: "drain")
        self._around(Control, "write_fingerprints", lambda *_: "fingerprints")
        return self

    def of_receiver(self) -> Boundaries:
        """Count the messages that this process handles, and the chunks that it reads."""
        self._around(WeightReceiver, "dispatch", _call)
        self._around(RingReader, "wait", lambda *_, **__: "wait")
        self._around(RingReader, "release", lambda *_: "release")
        self._around(HostCopyUnit, "copy", lambda *_: "copy")
        for joined in (HostCopies, CopyAndHash):
            self._around(joined, "run", lambda *_: "copy")
        return self

    def begin(self, fatal: str = "") -> None:
        """Reset the counts."""
        with self._counting:
            self.fatal = fatal
            self.passed.clear()
            self._counts.clear()

    def _around(self, owner: type, name: str, label_of: Label) -> None:
        genuine = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            label = label_of(*args, **kwargs)
            if not label:
                return genuine(*args, **kwargs)
            with self._counting:
                self._counts[label] += 1
                nth = self._counts[label]
            self._reach(f"before {label} {nth}")
            result = genuine(*args, **kwargs)
            self._reach(f"after {label} {nth}")
            return result

        setattr(owner, name, counted)

    def _reach(self, boundary: str) -> None:
        if boundary == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        with self._counting:
            self.passed.append(boundary)


def _call(_: object, request: object, **__: object) -> str:
    """A status request is no step of an update, and the tests send some."""
    return "" if isinstance(request, StatusRequest) else CALL_OF[type(request)]  # type: ignore[index]  # one of Request
