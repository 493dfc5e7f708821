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

from weightsync.cli import child as child_module
from weightsync.cli.child import Child
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
import time
from weightsync.cli.child import Child
with Child("child", "sleeper") as child:
    child.receive(60)
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
    with Child("child", "tidy") as child:
        assert child.receive(WAIT_S) == b"up"
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
    with Child("server", "broken") as child:
        assert child.receive(WAIT_S) == b"half way"
        with pytest.raises(RemoteError, match=r"(?s)server ended with status 1.*no luck"):
            child.receive(WAIT_S)


ECHO = """
import sys
from weightsync.cli.child import take_stdout
send = take_stdout()
for line in sys.stdin.buffer:
    print("a library prints this", flush=True)
    send(line.strip() * 2)
"""


def test_lines_go_both_ways_and_other_output_is_quoted_instead(place: Path) -> None:
    (place / "echo.py").write_text(ECHO)
    with Child("echo", "echo", quoted_lines=1) as child:
        for line in (b"a", b"b" * (1 << 20)):
            child.send(line)
            assert child.receive(WAIT_S) == line * 2
        assert not child.has_ended
        with pytest.raises(TransportTimeout, match=r"0 s: a library prints this$"):
            child.receive(0.1)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(RemoteError, match="echo ended with status -9: a library"):
            child.receive(WAIT_S)
        child.send(b"no process reads this")
        assert child.has_ended


def test_a_child_that_does_not_end_is_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "END_TIMEOUT_S", 0.5)
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (place / "stubborn.py").write_text(stubborn + SLEEPER)
    with Child("child", "stubborn") as child:
        child.receive(WAIT_S)
    assert not psutil.pid_exists(child.pid)


def test_a_silent_child_is_named_when_the_time_is_over(place: Path) -> None:
    (place / "sleeper.py").write_text(SLEEPER)
    with Child("server", "sleeper") as child:
        assert child.find(re.compile(b"[a-z]+"), WAIT_S) == "up"
        with pytest.raises(TransportTimeout, match="the server wrote nothing"):
            child.find(re.compile(b"down"), 0.1)
