"""Child processes of a verb, which end with it: lines in, lines out, each wait with a time limit.

The child's side is `python -m weightsync.cli.child PARENT_PID MODULE ARGUMENT …`.
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Self

from weightsync.cli.output import raise_exit
from weightsync.errors import RemoteError, TransportTimeout
from weightsync.runtime.processes import end_with

END_TIMEOUT_S = 10.0
QUOTED_LINES = 30
_READ_NBYTES = 1 << 16


class Child:
    """A process that runs a module with `python -m`; the end of a `with` block ends it.

    The child gets SIGTERM when the thread that made this object ends, however that happens.
    `environment` replaces the variables of this process. Errors call the child `name`, and quote
    the last `quoted_lines` lines that it wrote to stderr. The child blocks when it has written 64
    KiB to stdout that `receive` or `find` has not read.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        quoted_lines: int = QUOTED_LINES,
    ) -> None:
        self._name, self._quoted_lines = name, quoted_lines
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        me = "weightsync.cli.child"
        self._process = subprocess.Popen(
            [sys.executable, "-m", me, str(os.getpid()), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends its children
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended by itself, or was ended."""
        return self._process.poll() is not None

    def send(self, line: bytes = b"") -> None:
        """Write a line to the child's stdin; nothing happens where the child has closed it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next `receive` raises, with the exit status
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> bytes:
        """Return the next line of the child's stdout, without its line break.

        Raises TransportTimeout after `timeout_s`, and RemoteError where the child has ended.
        """
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise TransportTimeout(
                    f"the {self._name} wrote nothing for {timeout_s:.0f} s{self._quote()}"
                )
            read = os.read(self._process.stdout.fileno(), _READ_NBYTES)
            if not read:
                status = self._wait()
                raise RemoteError(f"the {self._name} ended with status {status}{self._quote()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def find(self, pattern: re.Pattern[bytes], timeout_s: float) -> str:
        """Return the first match in the lines to come. Raises as `receive` does."""
        deadline = time.monotonic() + timeout_s
        while True:
            if found := pattern.search(self.receive(deadline - time.monotonic())):
                return found.group().decode()

    def end(self) -> None:
        """End the process by SIGTERM, and by SIGKILL if that takes too long. Idempotent."""
        self._process.terminate()
        try:
            self._wait()
        finally:
            for stream in (self._process.stdin, self._process.stdout, self._log):
                with suppress(BrokenPipeError):  # lines that the child has not read
                    assert stream is not None
                    stream.close()

    def _wait(self) -> int:
        """Return the exit status of a process that is about to end; kill it if that is too slow."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        finally:
            self._process.kill()  # after a timeout or a second Ctrl-C; else it has ended
            status = self._process.wait()
        return status

    def _quote(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        # By `pread`, because the child writes at the position that `read` would move.
        log = os.pread(self._log.fileno(), _READ_NBYTES, max(0, size - _READ_NBYTES))
        lines = log.decode(errors="replace").strip().splitlines()
        if not lines:
            return ""
        if self._quoted_lines == 1:
            return f": {lines[-1]}"
        return "\n".join(["; its last lines:", *lines[-self._quoted_lines :]])


def take_stdout() -> Callable[[bytes], None]:
    """Return a call that writes a line to the parent; other output to stdout goes to stderr.

    Called by a child before it calls a library that may print, as Gloo does when it connects.
    """
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send(line: bytes) -> None:
        stream.write(line + b"\n")
        stream.flush()

    return send


def main() -> None:
    """Run the module that the command line names, with the arguments after it."""
    parent, module, *arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, raise_exit)
    try:
        end_with(int(parent))
    except ProcessLookupError as exc:
        sys.exit(str(exc))
    logging.basicConfig()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # The process ends now; SIGTERM must not interrupt the exit handlers of torch.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    main()
