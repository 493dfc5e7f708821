"""A small process that outlives a supervisor which was killed, to clean up after it.

The kernel ends a dead supervisor's children, but neither what those had started nor directories.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from weightsync.serve import process_tree

_END_S = 2.0
_NOTHING_TO_DO = b"closed"
_SCRIPT = f"""
import os, runpy, sys
code, marker, directory = sys.argv[1:]
said = sys.stdin.buffer.read()  # to its end, which is the supervisor's
if said != {_NOTHING_TO_DO!r}:
    runpy.run_path(code)["remove_all"](marker, directory)
    sweep = "from weightsync.shm.segment import sweep; sweep()"
    os.execv(sys.executable, [sys.executable, "-c", sweep])
"""


class OrphanReaper:
    """Waits for this process's death; then it kills the processes that have the variable `marker`.

    It removes `directory` and dead owners' segments too. While it waits it takes about 10 MB.
    """

    def __init__(self, marker: str, directory: Path) -> None:
        """Start it; raises OSError."""
        code = process_tree.__file__
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, code, marker, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def close(self) -> None:
        """End it, since there is nothing left to do for it; idempotent."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed:
            with suppress(BrokenPipeError), stdin:
                stdin.write(_NOTHING_TO_DO)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
