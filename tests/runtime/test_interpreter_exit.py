"""Members of private groups are ended when the interpreter exits, whatever one of them does."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

from tests.children import CONTEXT
from tests.e2e import processes
from weightsync.errors import TransferError
from weightsync.runtime import interpreter_exit
from weightsync.runtime.tracebacks import concise

RAISES = """
from weightsync.runtime.interpreter_exit import end_at_exit

class Member:
    def __init__(self, name):
        self.name, self.left = name, False

    def end(self, timeout_s):
        if not self.left:
            self.left = True
            print(self.name, flush=True)
            raise {error}

members = [Member("one"), Member("other"), Member("third")]
for member in members:
    end_at_exit(member)
"""
NEWCOMERS = """
import sys, threading
from weightsync.runtime.interpreter_exit import end_at_exit

class Member:
    ended = 0

    def end(self, timeout_s):
        Member.ended += 1
        if Member.ended == 1:
            print("ends", flush=True)

members = [Member() for _ in range(10_000)]
for member in members:
    end_at_exit(member)

def add():
    while True:
        members.append(Member())
        end_at_exit(members[-1])

sys.setswitchinterval(1e-5)
threading.Thread(target=add, daemon=True).start()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], timeout=120, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("error", ["RuntimeError", "KeyboardInterrupt"])
def test_one_that_raises_does_not_keep_the_others_from_their_end(error: str) -> None:
    done = run(RAISES.format(error=error))
    assert sorted(done.stdout.split()) == ["one", "other", "third"], done.stderr
    assert error in done.stderr


def test_members_that_come_meanwhile_do_no_harm() -> None:
    done = run(NEWCOMERS)
    assert (done.stdout, done.stderr) == ("ends\n", "")


def _raise_as_the_interpreter_exits(end: Connection) -> None:
    """Tell whether memory was freed that the frames of an error in a daemon thread hold."""
    freed = []

    class Memory:
        def __del__(self) -> None:
            freed.append(True)

    @concise
    def fail() -> None:
        memory = Memory()
        raise TransferError(f"with {memory} in a frame")

    def work() -> None:
        with suppress(TransferError):
            fail()

    interpreter_exit._end_all()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    end.send(freed)


def test_a_forked_child_frees_nothing_in_threads_as_it_exits() -> None:
    """It forgets the members of the process that it was forked from, and has some of its own."""
    ours, theirs = CONTEXT.Pipe()
    with processes.started(_raise_as_the_interpreter_exits, theirs):
        assert ours.recv() == []
