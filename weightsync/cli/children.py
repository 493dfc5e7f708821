"""Child processes of a verb: their lines are read with a time limit, and they end with the verb."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from weightsync.errors import RemoteError, TransportTimeout

END_TIMEOUT_S = 10.0
LOG_LINES = 30


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs `module` as a child of this process, and no longer.

    The child gets SIGTERM when the thread that started it ends, however that happens.
    """
    me = "weightsync.cli.child"
    return [sys.executable, "-m", me, str(os.getpid()), module, *arguments]


class Child:
    """A process whose lines of standard output are read by a thread, so that no wait is endless."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._name, self._process, self._log = name, process, log
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._said: list[bytes] = []
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def line(self, timeout_s: float) -> bytes:
        """Return the next line. Raises RemoteError with the log when the process has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TransportTimeout(
                f"the {self._name} said nothing for {timeout_s:.0f} s{self._tail()}"
            ) from None
        if line is None:
            status = self._process.wait(END_TIMEOUT_S)
            raise RemoteError(f"the {self._name} ended with status {status}{self._tail()}")
        self._said.append(line)
        return line

    def find(self, pattern: re.Pattern[bytes], timeout_s: float) -> str:
        """Return the first match in the lines to come."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = pattern.search(self.line(max(0.0, deadline - time.monotonic())))
            if found:
                return found.group().decode()

    def end(self) -> None:
        """End the process, by SIGTERM and, when that takes too long, by SIGKILL."""
        # A second Ctrl-C must not leave a process behind.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.terminate()
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)
            self._reader.join(END_TIMEOUT_S)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def _tail(self) -> str:
        said = self._log.read_bytes().splitlines(keepends=True) or self._said
        text = b"".join(said[-LOG_LINES:]).decode(errors="replace").rstrip()
        return f"; its last lines:\n{text}" if text else ""


@contextmanager
def run_child(
    name: str, line: list[str], environment: Mapping[str, str], logs: Path
) -> Iterator[Child]:
    """Run a command of `command()`; it has ended when the block has."""
    log = logs / f"{name}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C reaches the demo alone, which ends its children
        )
    child = Child(name, process, log)
    try:
        yield child
    finally:
        child.end()
