"""Owners that die, fork and live in other namespaces, and the cleanup after them."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.shm.processes import (
    OWNER,
    UNSHARE,
    WAIT_S,
    kill,
    line_of,
    output,
    private_directory,
    python,
    run,
    running,
)
from weightsync.shm.segment import (
    Leftover,
    Segment,
    find_leftovers,
    remove_leftovers,
)


@pytest.fixture
def shm() -> Iterator[Path]:
    with private_directory() as path:
        yield path


class TestForks:
    def test_interpreter_exit_unlinks(self, shm: Path) -> None:
        output(python("Segment.create(64, directory=directory)", shm))
        assert list(shm.iterdir()) == []

    def test_forked_children_neither_unlink_nor_unlock_but_end_their_own(self, shm: Path) -> None:
        script = """
import multiprocessing

def forked(leave):
    child = os.fork()
    if child == 0:
        leave()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def close_inherited():
    assert not segment.owner and segment.owner_alive()
    segment.close()
    sys.exit(0)

def make_own():
    own = Segment.create(64, directory=directory)
    assert own.owner and not segment.owner and len(os.listdir(directory)) == 2

segment = Segment.create(64, directory=directory)
forked(lambda: sys.exit(0))
forked(close_inherited)
worker = multiprocessing.get_context("fork").Process(target=make_own)
worker.start()
worker.join()
assert worker.exitcode == 0
assert os.listdir(directory) == [segment.name]
assert segment.owner and remove_leftovers(directory) == []
print("done")
"""
        assert output(python(script, shm)).strip() == "done"
        assert list(shm.iterdir()) == []

    def test_no_fork_inherits_a_lock_while_segments_come_and_go(self, shm: Path) -> None:
        script = """
import threading

def churn():
    while not stop.is_set():
        Segment.create(64, directory=directory, prefault=False).close()

def locks():
    infos = Path("/proc/self/fdinfo")
    return sum("FLOCK" in (infos / fd).read_text() for fd in set(os.listdir(infos)) & fds())

def fds():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fdinfo/{fd}")}

stop = threading.Event()
segment = Segment.create(64, directory=directory)
assert locks() == 1
threads = [threading.Thread(target=churn) for _ in range(2)]
for thread in threads:
    thread.start()
inherited = 0
for _ in range(40):
    child = os.fork()
    if child == 0:
        os._exit(locks())
    inherited += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
stop.set()
for thread in threads:
    thread.join()
print(inherited)
"""
        assert output(python(script, shm)).strip() == "0"


class TestLeftovers:
    def test_killed_owner_leaves_one_that_is_found_and_removed(self, shm: Path) -> None:
        with running(python(OWNER, shm)) as owner, Segment.create(64, directory=shm) as living:
            name = line_of(owner)
            with Segment.open(name, nbytes=4096, directory=shm) as reader:
                assert reader.owner_alive()
                assert remove_leftovers(shm) == []
                kill(owner)
                assert not reader.owner_alive()
                assert find_leftovers(shm) == [Leftover(name, 4096)]
                assert remove_leftovers(shm) == [Leftover(name, 4096)]
                assert remove_leftovers(shm) == []
                assert not reader.owner_alive()
            assert [path.name for path in shm.iterdir()] == [living.name]

    def test_a_socket_goes_with_the_segment_that_it_lay_beside(self, shm: Path) -> None:
        with running(python(OWNER, shm)) as owner, Segment.create(64, directory=shm) as living:
            name = line_of(owner)
            lost = f"weightsync-{'0' * 32}"
            others = ("other.sock", f"{lost}.sock.sock", f"weightsync-{'1' * 32}.sock")
            with ExitStack() as sockets:
                for beside in (name, living.name, lost):
                    listener = sockets.enter_context(socket.socket(socket.AF_UNIX))
                    listener.bind(str(shm / f"{beside}.sock"))
                for other in others:
                    (shm / other).touch()
                assert find_leftovers(shm) == [Leftover(f"{lost}.sock", 0)]
                assert remove_leftovers(shm) == [Leftover(f"{lost}.sock", 0)]
                kill(owner)
                removed = [Leftover(name, 4096), Leftover(f"{name}.sock", 0)]
                assert remove_leftovers(shm) == removed
            kept = {living.name, f"{living.name}.sock", *others}
            assert {path.name for path in shm.iterdir()} == kept

    def test_forked_child_does_not_keep_a_killed_owners_lock(self, shm: Path) -> None:
        script = """
segment = Segment.create(4096, directory=directory)
view = segment.tensor()
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.readline()
    print(segment.owner_alive(), int(view.sum()), flush=True)
    os._exit(0)
signal.pause()
"""
        with running(python(script, shm)) as owner:
            assert line_of(owner) == "forked"
            assert find_leftovers(shm) == []
            kill(owner)
            found = find_leftovers(shm)
            assert [leftover.nbytes for leftover in found] == [4096]
            assert remove_leftovers(shm) == found
            assert owner.stdin is not None
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert line_of(owner) == "False 0"

    def test_somebody_who_looks_makes_nobody_believe_in_a_dead_owner(self, shm: Path) -> None:
        with running(python(OWNER, shm)) as owner:
            name = line_of(owner)
            kill(owner)
        looking = os.open(shm / name, os.O_RDONLY)
        try:
            fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with Segment.open(name, nbytes=4096, directory=shm) as reader:
                assert not reader.owner_alive()
                assert remove_leftovers(shm) == [Leftover(name, 4096)]
        finally:
            os.close(looking)

    def test_janitor_never_catches_a_segment_in_the_making(self, shm: Path) -> None:
        caught: list[Leftover] = []
        rounds = 0
        stop = threading.Event()

        def tidy() -> None:
            nonlocal rounds
            while not stop.is_set():
                caught.extend(remove_leftovers(shm))
                rounds += 1

        janitor = threading.Thread(target=tidy)
        janitor.start()
        made, deadline = 0, time.monotonic() + WAIT_S
        try:
            while made < 1000 or rounds < 100:
                assert time.monotonic() < deadline
                Segment.create(64, directory=shm).close()
                made += 1
        finally:
            stop.set()
            janitor.join(WAIT_S)
        assert caught == []

    def test_other_files_are_left_alone(self, shm: Path) -> None:
        others = [shm / f"weightsync-{digit * 32}" for digit in "0123"] + [shm / "weightsync-x"]
        others[0].symlink_to(others[4])
        others[1].mkdir()
        os.mkfifo(others[2])
        os.mkfifo(others[3])
        others[4].write_bytes(b"kept")
        assert find_leftovers(shm) == []
        assert remove_leftovers(shm) == []
        assert sorted(shm.iterdir()) == sorted(others)

    def test_living_owner_in_another_pid_namespace_is_alive(self, shm: Path) -> None:
        if run([*UNSHARE, "-pf", "--mount-proc", "true"]).returncode != 0:
            pytest.skip("a new pid namespace is not permitted here")
        inside = [*UNSHARE, "-pf", "--mount-proc"]
        janitor = python("print(remove_leftovers(directory))", shm)
        with Segment.create(64, directory=shm):
            assert output([*inside, *janitor]).strip() == "[]"
        with running([*inside, "--kill-child", *python(OWNER, shm)]) as owner:
            name = line_of(owner)
            with Segment.open(name, nbytes=4096, directory=shm) as reader:
                assert reader.owner_alive()
                assert remove_leftovers(shm) == []
                assert (shm / name).exists()
