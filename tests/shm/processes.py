"""Processes that use segments, and a directory in shared memory for one test."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import weightsync
from tests.children import Program
from tests.segments import opened_since
from weightsync.shm.segment import DIRECTORY, live_segments

ROOT = Path(weightsync.__path__[0]).parent
PRELUDE = """
import os, signal, sys
from pathlib import Path
from weightsync.errors import SegmentError
from weightsync.shm.segment import *
from weightsync.shm.segment import Segment, Leftover
directory, *args = Path(sys.argv[1]), *sys.argv[2:]
"""
WAIT_S = 60.0
UNSHARE = ("unshare",) if os.geteuid() == 0 else ("unshare", "--map-root-user")
"""The start of a command in new namespaces; without root also in a user namespace."""
OWNER = """
segment = Segment.create(4096, directory=directory)
print(segment.name, flush=True)
signal.pause()
"""


@contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory in shared memory that no other test sees; every segment must be closed."""
    path = Path(tempfile.mkdtemp(prefix="segment-test-", dir=DIRECTORY))
    before = live_segments()
    try:
        yield path
        assert not opened_since(before)
    finally:
        for segment in live_segments():
            if segment not in before:
                segment.close()
        shutil.rmtree(path)


class Script(list[str]):
    """A command of Python's, which may be run by itself in a forked process."""

    def __init__(self, script: str, *args: object) -> None:
        super().__init__([sys.executable, "-c", script, *map(str, args)])


def python(script: str, *args: object) -> Script:
    return Script(PRELUDE + script, *args)


def environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), inherited)))}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    if isinstance(command, Script):
        with tempfile.TemporaryFile("w+") as errors:
            with Program(*command[2:], env=environment(), stderr=errors.fileno()) as program:
                program.stdin.close()
                said = program.stdout.read()
                code = program.wait(WAIT_S)
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, said, errors.read())
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env=environment(), check=False
    )


def output(command: list[str]) -> str:
    done = run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    if isinstance(command, Script):  # a program has what tests use of a Popen
        process = cast("subprocess.Popen[str]", Program(*command[2:], env=environment()))
    else:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """Read a single line: `select` does not see the content of a buffer."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
        assert ready, f"the process did not reply in time to {line!r}"
        piece = os.read(process.stdout.fileno(), 1)
        if not piece:
            break
        line += piece
    return line.decode().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(WAIT_S)
