"""Trees of real processes: started, watched and ended, whoever dies first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from tests.serve import supervised
from tests.serve.supervised import MARK, WAIT_S, start, tree_of_three
from tests.shm.processes import line_of
from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    ProcessLostError,
    RemoteError,
    TransportTimeout,
)
from weightsync.serve.child_process import READY_NBYTES, ChildSpec
from weightsync.serve.supervisor import Supervisor
from weightsync.shm.segment import DIRECTORY

pytestmark = pytest.mark.usefixtures("frozen", "shm_clean")
BOUND_S = 60.0
LOOKS = 3
"""Who starts another and ends may be gone, and the other not yet there, in one look."""


def having(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def left_of(mark: str, *, sweeping: bool) -> list[psutil.Process]:
    """Those that are there; `sweeping`: also who removes segments, and loads torch for it."""
    left = []
    for process in having(mark):
        with suppress(psutil.Error):
            if sweeping or not any("cleanup_stale" in word for word in process.cmdline()):
                left.append(process)
    return left


def come(mark: str, count: int) -> bool:
    """Whether so many processes of the tree come to be; one that starts is not seen at once."""
    deadline = time.monotonic() + WAIT_S
    while len(having(mark)) != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def gone_soon(mark: str) -> bool:
    """Whether the tree goes within the bound, and the last one of all some time later."""
    for sweeping, within_s in ((False, BOUND_S), (True, WAIT_S)):
        deadline = time.monotonic() + within_s
        empty = 0
        while empty < LOOKS:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
            empty = 0 if left_of(mark, sweeping=sweeping) else empty + 1
    return True


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable that every process of the test has; all of them are gone after it."""
    resource_tracker.ensure_running()  # once for all tests, so without the variable
    name = secrets.token_hex(8)
    monkeypatch.setenv(MARK, name)
    yield name
    gc.collect()
    left = [process for process in having(name) if process.pid != os.getpid()]
    for process in left:
        process.kill()
    assert not left


def child(name: str, target: object, *args: object) -> ChildSpec:
    assert callable(target)
    return ChildSpec(name=name, target=target, args=args)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_whoever_is_killed_is_named_and_nothing_is_left(mark: str, victim: int) -> None:
    with Supervisor() as tree:
        start(tree, tree_of_three())
        assert oct(tree.directory.stat().st_mode)[-4:] == "0700"
        killed = tree.processes[victim]
        assert killed.pid is not None
        # Three of the tree, a grandchild, the reaper.
        assert come(mark, 5)
        begin = time.monotonic()
        os.kill(killed.pid, signal.SIGKILL)
        message = rf"process {killed.name} \(pid {killed.pid}\) was ended by SIGKILL \(exit code -9"
        with pytest.raises(ProcessLostError, match=message) as caught:
            tree.wait(WAIT_S)
    assert time.monotonic() - begin < BOUND_S
    lost = caught.value
    assert (lost.process, lost.pid, lost.exitcode) == (killed.name, killed.pid, -9)
    assert gone_soon(mark)
    assert not tree.directory.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_supervisor_that_is_killed_leaves_nothing(mark: str, number: int) -> None:
    with supervised.program("serve", mark) as program:
        try:
            segment, directory = DIRECTORY / line_of(program), Path(line_of(program))
            assert segment.exists()
            # The supervisor, its resource tracker, a reaper, three children and a grandchild.
            assert come(mark, 7)
            program.send_signal(number)
            program.wait(WAIT_S)
        finally:
            program.kill()
    assert gone_soon(mark)
    assert not directory.exists()
    assert not segment.exists()


def test_ctrl_c_ends_everything_soon_and_cleanly(mark: str) -> None:
    with supervised.program("serve", mark) as program:
        try:
            segment, directory = DIRECTORY / line_of(program), Path(line_of(program))
            begin = time.monotonic()
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the whole group
            assert line_of(program) == "closed"
            assert time.monotonic() - begin < BOUND_S
            assert program.wait(WAIT_S) == 0
        finally:
            program.kill()
    assert gone_soon(mark)
    assert not directory.exists()
    assert not segment.exists()


def test_a_second_ctrl_c_breaks_nothing_off(mark: str) -> None:
    with supervised.program("serve_stubborn", mark) as program:
        try:
            directory = Path(line_of(program))
            os.killpg(program.pid, signal.SIGINT)
            assert line_of(program) == "closing"
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                time.sleep(0.3)
                program.send_signal(number)
            assert line_of(program) == "closed"
            assert program.wait(WAIT_S) == 0
        finally:
            program.kill()
    assert gone_soon(mark)
    assert not directory.exists()


class TestStart:
    def test_each_says_something_when_it_is_ready(self, mark: str) -> None:
        with Supervisor() as tree:
            tree.launch("workers", [child("worker 0", supervised.idle)])
            env = {"WEIGHTSYNC_TEST_GIVEN": "here"}
            target = supervised.say_environment
            spec = ChildSpec(name="core", target=target, args=("WEIGHTSYNC_TEST_GIVEN",), env=env)
            tree.launch("cores", [spec, child("interrupts", supervised.say_interrupts)])
            assert tree.await_ready("cores", timeout_s=WAIT_S) == [b"here", b"True True"]
            (said,) = tree.await_ready("workers", timeout_s=WAIT_S)
            assert int(said) == tree.processes[0].pid
            assert "WEIGHTSYNC_TEST_GIVEN" not in os.environ
            assert tree.wait(0.1) is False

    def test_the_first_child_of_a_process_is_spared_of_ctrl_c_too(self, mark: str) -> None:
        with supervised.program("start_first", mark) as program:
            try:
                assert line_of(program) == "True True"
                assert program.wait(WAIT_S) == 0
            finally:
                program.kill()
        assert gone_soon(mark)

    def test_errors_at_start_are_raised_as_they_were(self, mark: str) -> None:
        specs = [child("worker 1", supervised.fails_at_start)]
        with Supervisor() as tree:
            with pytest.raises(ManifestMismatchError, match=r"^worker 1: two tensors") as caught:
                tree.start("workers", specs, timeout_s=WAIT_S)
            assert caught.value.missing == ("a", "b")

    def test_foreign_errors_keep_their_type_and_text(self, mark: str) -> None:
        specs = [child("core 0", supervised.fails_strangely)]
        message = r"^core 0: the peer raised KeyError: 'no such layer'"
        with Supervisor() as tree:
            with pytest.raises(RemoteError, match=message) as caught:
                tree.start("cores", specs, timeout_s=WAIT_S)
            assert caught.value.remote_type == "KeyError"

    @pytest.mark.parametrize("code", [0, 3])
    def test_an_end_instead_of_a_start(self, mark: str, code: int) -> None:
        specs = [child("core 0", supervised.leaves_at_start, code)]
        message = f"core 0 .* exit code {code}: it was not ready"
        with Supervisor() as tree, pytest.raises(ProcessLostError, match=message):
            tree.start("cores", specs, timeout_s=WAIT_S)

    def test_one_that_hangs_is_named(self, mark: str) -> None:
        with Supervisor() as tree:
            tree.launch("all", [child("good", supervised.idle)])
            tree.await_ready("all", timeout_s=WAIT_S)
            with pytest.raises(
                TransportTimeout, match=r"1 of 1 cores were not .* 1 s: core 0 \("
            ) as e:
                tree.start("cores", [child("core 0", supervised.never_ready)], timeout_s=1)
            assert str(tree.processes[1].pid) in str(e.value)
        assert not any(process.is_alive() for process in tree.processes)

    def test_an_earlier_group_is_watched_meanwhile(self, mark: str) -> None:
        with Supervisor() as tree:
            tree.start("workers", [child("worker 0", supervised.idle)], timeout_s=WAIT_S)
            tree.launch("cores", [child("core 0", supervised.never_ready)])
            tree.processes[0].kill()
            with pytest.raises(ProcessLostError, match=r"worker 0 .* SIGKILL"):
                tree.await_ready("cores", timeout_s=WAIT_S)

    def test_what_cannot_be_started(self, mark: str) -> None:
        message = r"lambda 0 cannot be started: .*pickle"
        with Supervisor() as tree, pytest.raises(ConfigError, match=message):
            tree.start("lambdas", [child("lambda 0", lambda _: None)], timeout_s=WAIT_S)

    def test_a_forked_process_supervises_nothing(self) -> None:
        script = (
            "import os\nfrom weightsync.serve.supervisor import Supervisor\n"
            "if not os.fork():\n    Supervisor()\nelse:\n    os.wait()"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        )
        assert "a process cannot be made in process" in done.stderr


def _start_and_wait(tree: Supervisor, spec: ChildSpec) -> None:
    tree.start("cores", [spec], timeout_s=WAIT_S)
    tree.wait(WAIT_S)


class TestWait:
    def test_a_clean_end_is_an_end(self, mark: str) -> None:
        with Supervisor() as tree:
            tree.start("cores", [child("core 0", supervised.ends, 0)], timeout_s=WAIT_S)
            assert tree.wait(WAIT_S) is True

    def test_what_it_failed_with_is_told(self, mark: str) -> None:
        message = r"core 0 \(pid \d+\) ended with exit code 1: core 0: the weights are gone"
        # It may fail before its being ready is noticed: then it is the start that tells.
        with pytest.raises(ProcessLostError, match=message), Supervisor() as tree:
            _start_and_wait(tree, child("core 0", supervised.fails_later))

    def test_ctrl_c_ends_the_wait_alone(self, mark: str) -> None:
        with Supervisor() as tree:
            tree.start("cores", [child("core 0", supervised.idle)], timeout_s=WAIT_S)
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            assert tree.wait(WAIT_S) is False
            timer.join()
            assert tree.processes[0].is_alive()

    def test_a_forked_grandchild_hides_no_death(self, mark: str) -> None:
        with Supervisor() as tree:
            tree.start("cores", [child("core 0", supervised.with_forked_child)], timeout_s=WAIT_S)
            tree.processes[0].kill()
            with pytest.raises(ProcessLostError, match=r"core 0 .* SIGKILL"):
                tree.wait(WAIT_S)

    def test_the_end_of_the_thread_that_started_them_is_none(self, mark: str) -> None:
        with Supervisor() as tree:
            specs = [child("core 0", supervised.idle)]
            thread = threading.Thread(target=tree.launch, args=("cores", specs))
            thread.start()
            thread.join(WAIT_S)
            tree.await_ready("cores", timeout_s=WAIT_S)
            assert tree.wait(0.3) is False
            assert tree.processes[0].is_alive()

    def test_nothing_is_not_waited_for(self, mark: str) -> None:
        with Supervisor() as tree, pytest.raises(ConfigError, match="nothing to wait for"):
            tree.wait()


class TestClose:
    def test_groups_end_in_reverse_and_each_has_time(self, mark: str, tmp_path: Path) -> None:
        names = ["workers", "cores", "servers"]
        # Longer than by default: an interpreter with torch in it takes its time to end.
        with Supervisor(grace_s=30, shutdown_s=90) as tree:
            log = tmp_path / "log"
            start(tree, {n: [child(n, supervised.note_end, log)] for n in names})
        assert log.read_text().split() == names[::-1]
        assert [process.exitcode for process in tree.processes] == [143, 143, 143]
        tree.close()

    def test_whoever_ignores_sigterm_is_killed(self, mark: str) -> None:
        tree = Supervisor(grace_s=0.5, shutdown_s=1.5)
        with tree:
            tree.start("cores", [child("core 0", supervised.stubborn)], timeout_s=WAIT_S)
        assert [process.exitcode for process in tree.processes] == [-9]

    def test_segments_of_the_killed_are_removed(self, mark: str) -> None:
        with Supervisor() as tree:
            (name,) = tree.start(
                "cores", [child("c", supervised.with_belongings)], timeout_s=WAIT_S
            )
            assert (DIRECTORY / name.decode()).exists()
            tree.processes[0].kill()
            with pytest.raises(ProcessLostError):
                tree.wait(WAIT_S)
        assert not (DIRECTORY / name.decode()).exists()


def test_what_a_child_says_is_limited() -> None:
    from weightsync.serve.child_process import Ready

    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with ours, theirs:
        ready = Ready(theirs)
        with pytest.raises(ConfigError, match=f"at most {READY_NBYTES} may"):
            ready(bytes(READY_NBYTES + 1))
        ready(bytes(READY_NBYTES))
        with pytest.raises(ConfigError, match="it is called once"):
            ready()
