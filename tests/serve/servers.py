"""`weightsync serve` as a process of its own, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil
import requests

from tests.children import Program
from tests.serve import forked

START_S = 240.0  # eight processes that load transformers, on a busy machine
END_S = 60.0
WAIT_S = 60.0
LINE = re.compile(r"weightsync serve: (listening on|token) (\S+)\n")


def arguments(*options: str, model: str = "tiny") -> list[str]:
    return ["serve", "--model", model, "--port", "0", *options]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "weightsync", *arguments(*options)]


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "WEIGHTSYNC_TOKEN"}
    return kept | {"OMP_NUM_THREADS": "1"} | extra


def members(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Return the processes of a server's tree by the names that `ps` shows."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(OSError):
            found[Path(f"/proc/{child.pid}/comm").read_text().strip()] = child
    return found


@contextmanager
def server(
    *options: str, want_token: bool = True, stderr: IO[str] | None = None, **extra: str
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A server whose processes are started as users start them: `members` has them."""
    process = subprocess.Popen(
        command(*options),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(**extra),
    )
    with _running(process, want_token=want_token) as (url, token):
        yield url, token, process


@contextmanager
def forked_server(
    *options: str,
    model: str = "tiny",
    want_token: bool = True,
    stderr: IO[str] | None = None,
    **extra: str,
) -> Iterator[tuple[str, str]]:
    """A server that does the same, and is there sooner: see `tests.serve.forked`."""
    process = forked.program(
        arguments(*options, model=model),
        env=environment(**extra),
        stderr=None if stderr is None else stderr.fileno(),
    )
    with _running(process, want_token=want_token) as found:
        yield found


def refused(*options: str) -> tuple[int, str]:
    """Run such a server, which does not start, to its end; return its exit code and stderr."""
    with tempfile.TemporaryFile("w+") as errors:
        stderr = errors.fileno()
        with forked.program(arguments(*options), env=environment(), stderr=stderr) as process:
            code = process.wait(START_S)
        errors.seek(0)
        return code, errors.read()


@contextmanager
def _running(
    process: subprocess.Popen[str] | Program, *, want_token: bool
) -> Iterator[tuple[str, str]]:
    """Read what a server prints, and end it with the block."""
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        first = LINE.fullmatch(process.stdout.readline())
        assert first
        second = LINE.fullmatch(process.stdout.readline()) if want_token else None
        assert bool(second) is want_token
        watchdog.cancel()
        yield first[2], second[2] if second else ""
    finally:
        watchdog.cancel()
        process.terminate()  # in order, so that no process of it is left
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S / 6)
        process.kill()
        process.wait(END_S)
        for end in (process.stdin, process.stdout):
            if end is not None:
                end.close()


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition; `what` is the message of the failure."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def running(url: str) -> tuple[int, int]:
    """Return the numbers of running and of waiting completions, over all replicas."""
    replicas = requests.get(f"{url}/status.json", timeout=WAIT_S).json()["replicas"]
    return sum(r["running"] for r in replicas), sum(r["waiting"] for r in replicas)
