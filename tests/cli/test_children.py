"""Children of a verb end with it, and what they say is read with a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from weightsync.cli.children import command, run_child
from weightsync.errors import RemoteError, TransportTimeout

WAIT_S = 60

SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
TIDY = """
import pathlib, time
try:
    print("up", flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes just before a long one would wait for its end
finally:
    pathlib.Path("tidied").touch()
"""
PARENT = """
import os, pathlib, sys, time
from weightsync.cli.children import command, run_child
with run_child("child", command("sleeper"), os.environ, pathlib.Path()) as child:
    child.line(60)
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose modules children find."""
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((root, str(tmp_path))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ends(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_child_is_ended_and_may_tidy_up(place: Path) -> None:
    (place / "tidy.py").write_text(TIDY)
    with run_child("child", command("tidy"), os.environ, place) as child:
        assert child.line(WAIT_S) == b"up\n"
        pid = child.pid
    assert not psutil.pid_exists(pid)
    assert (place / "tidied").exists()


def test_a_child_ends_when_its_parent_is_killed(place: Path) -> None:
    (place / "sleeper.py").write_text(SLEEPER)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate(timeout=WAIT_S)
    assert ends(pid)


def test_a_child_that_fails_is_quoted(place: Path) -> None:
    (place / "broken.py").write_text("print('half way', flush=True)\nraise SystemExit('no luck')")
    with run_child("server", command("broken"), os.environ, place) as child:
        assert child.line(WAIT_S) == b"half way\n"
        with pytest.raises(RemoteError, match=r"(?s)server ended with status 1.*no luck"):
            child.line(WAIT_S)


def test_a_silent_child_is_named_when_the_time_is_over(place: Path) -> None:
    (place / "sleeper.py").write_text(SLEEPER)
    with run_child("server", command("sleeper"), os.environ, place) as child:
        assert child.find(re.compile(b"[a-z]+"), WAIT_S) == "up"
        with pytest.raises(TransportTimeout, match="the server said nothing"):
            child.find(re.compile(b"down"), 0.1)
