"""API servers on one socket, the wait for everything at once, and the end of process trees."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.children import CONTEXT
from tests.serve import supervised
from tests.serve.supervised import WAIT_S
from tests.shm.processes import line_of
from weightsync.errors import ConfigError, ProcessLostError
from weightsync.serve import process_managers
from weightsync.serve.child_process import ChildSpec
from weightsync.serve.process_managers import (
    APIServerProcessManager,
    ProcessManager,
    how_ended,
    kill_process_tree,
    shutdown,
    wait_all,
    wait_any,
    wait_for_completion_or_failure,
)
from weightsync.serve.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("shm_clean")
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def api_servers(listener: socket.socket, count: int = 2) -> APIServerProcessManager:
    return APIServerProcessManager(
        supervised.answer,
        listener,
        input_addresses=[f"ipc://in{index}" for index in range(count)],
        output_addresses=[f"ipc://out{index}" for index in range(count)],
        stats_update_address="ipc://stats",
        args=("hello",),
    )


def engines(*targets: str) -> Supervisor:
    tree = Supervisor()
    specs = [
        ChildSpec(
            name=f"engine core {index}",
            target=getattr(supervised, name),
            args=(0,)[: name == "ends"],
        )
        for index, name in enumerate(targets)
    ]
    tree.launch("engine cores", specs)
    return tree


def end_as_told(word: Path) -> None:
    """End with the exit code that a file says."""
    deadline = time.monotonic() + WAIT_S
    while not word.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    raise SystemExit(int(word.read_text(encoding="ascii")))


class Started:
    """A manager of one process, which ends when and as it is told."""

    def __init__(self, word: Path) -> None:
        self._word = word
        self.processes: list[BaseProcess] = [CONTEXT.Process(target=end_as_told, args=(word,))]
        self.processes[0].start()
        self.closed = False

    def end(self, code: int) -> None:
        told = self._word.with_suffix(".new")
        told.write_text(str(code), encoding="ascii")
        told.rename(self._word)

    def close(self) -> None:
        self.closed = True
        self.processes[0].kill()
        self.processes[0].join(WAIT_S)


def ask(address: tuple[str, int]) -> list[object]:
    with socket.create_connection(address, timeout=WAIT_S) as client:
        said: list[object] = json.loads(client.makefile("rb").read())
        return said


class TestApiServers:
    def test_all_answer_on_one_socket_and_know_who_they_are(self, listener: socket.socket) -> None:
        manager = api_servers(listener)
        try:
            found: dict[object, list[object]] = {}
            deadline = time.monotonic() + WAIT_S
            while len(found) < 2 and time.monotonic() < deadline:
                said = ask(listener.getsockname())
                found[said[0]] = said
            assert found == {
                index: [index, 2, f"ipc://in{index}", f"ipc://out{index}", "ipc://stats", "hello"]
                for index in range(2)
            }
            assert [process.name for process in manager.processes] == [
                "api server 0",
                "api server 1",
            ]
        finally:
            manager.close()
        assert not any(process.is_alive() for process in manager.processes)
        manager.close()

    def test_they_end_when_their_manager_is_collected(self, listener: socket.socket) -> None:
        manager = api_servers(listener, 1)
        processes = manager.processes
        del manager
        gc.collect()
        assert not any(process.is_alive() for process in processes)

    @pytest.mark.parametrize("name", ["serve_asleep", "serve_with_gil", "serve_and_fork"])
    def test_they_end_when_their_parent_is_killed(self, name: str) -> None:
        """Without a supervisor too, whatever code they run and whatever keeps pipes open."""
        with supervised.program(name, mark="") as program:
            try:
                pid = int(line_of(program))
                server = psutil.Process(pid)
                assert line_of(program) == str(pid)  # of the server and of its parent
                program.kill()
                assert comes_true(lambda: not is_alive(server), within_s=10)
            finally:
                os.killpg(program.pid, signal.SIGKILL)

    @pytest.mark.parametrize(("ins", "outs"), [([], []), (["a"], []), (["a"], ["b", "c"])])
    def test_addresses_that_are_missing(
        self, listener: socket.socket, ins: list[str], outs: list[str]
    ) -> None:
        with pytest.raises(ConfigError, match=f"{len(ins)} input addresses and {len(outs)} output"):
            APIServerProcessManager(
                supervised.answer, listener, input_addresses=ins, output_addresses=outs
            )


class TestWaitForAll:
    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_the_first_that_fails_is_raised_and_all_are_closed(
        self, listener: socket.socket, victim: int
    ) -> None:
        managers: list[ProcessManager] = [
            api_servers(listener, 1),
            engines("idle"),
            engines("idle"),
        ]
        try:
            killed = managers[victim].processes[0]
            killed.kill()
            with pytest.raises(ProcessLostError, match=rf"{killed.name} \(pid {killed.pid}\) .*-9"):
                wait_for_completion_or_failure(managers[0], managers[1], managers[2])
            assert not any(p.is_alive() for manager in managers for p in manager.processes)
        finally:
            for manager in managers:
                manager.close()

    @pytest.mark.parametrize("last", [0, 3])
    def test_clean_ends_are_waited_for_until_all_have_ended_or_one_fails(
        self, tmp_path: Path, last: int
    ) -> None:
        started = [Started(tmp_path / str(index)) for index in range(2)]
        with ThreadPoolExecutor(1) as pool:
            try:
                waiting = pool.submit(wait_for_completion_or_failure, *started)
                started[0].end(0)
                # Not by join: a process of the fork server is asked by one thread at a time.
                assert connection.wait([started[0].processes[0].sentinel], WAIT_S)
                with pytest.raises(TimeoutError):
                    waiting.result(0.5)
                started[1].end(last)
                if last == 0:
                    assert waiting.result(WAIT_S) is None
                else:
                    with pytest.raises(ProcessLostError, match="exit code 3"):
                        waiting.result(WAIT_S)
                assert [one.closed for one in started] == [True, True]
            finally:
                for one in started:
                    one.close()

    def test_one_that_fails_ends_those_that_still_run(self, tmp_path: Path) -> None:
        started = [Started(tmp_path / str(index)) for index in range(3)]
        try:
            started[0].end(0)
            started[1].end(5)
            with pytest.raises(ProcessLostError, match="exit code 5"):
                wait_for_completion_or_failure(*started)
            assert not started[2].processes[0].is_alive()
        finally:
            for one in started:
                one.close()

    def test_ctrl_c_ends_it_cleanly(self, listener: socket.socket) -> None:
        servers = api_servers(listener, 1)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            wait_for_completion_or_failure(servers)
            assert not servers.processes[0].is_alive()
        finally:
            timer.cancel()
            timer.join()
            servers.close()


def sleep_deaf() -> None:
    """Ignore SIGTERM, having started a process that does not know of it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, env={})
    time.sleep(WAIT_S * 10)


def leave_one_behind() -> None:
    """End on SIGTERM, and leave a process."""
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, env={})
    time.sleep(WAIT_S * 10)


@pytest.mark.parametrize(("target", "code"), [(sleep_deaf, -9), (leave_one_behind, -15)])
def test_shutdown_ends_whole_trees(target: object, code: int) -> None:
    assert callable(target)
    processes = [SPAWN.Process(target=target) for _ in range(2)]
    never = SPAWN.Process(target=target)
    for process in processes:
        process.start()
    try:
        below = [one for process in processes for one in children_of(process)]
        shutdown([*processes, never], timeout_s=1.5)
        assert [process.exitcode for process in processes] == [code, code]
        assert not any(is_alive(one) for one in below)
        shutdown(processes)
    finally:
        for process in processes:
            process.kill()
            process.join(WAIT_S)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; init may take its time to collect what has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def comes_true(what: Callable[[], bool], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children_of(process: BaseProcess) -> list[psutil.Process]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found: list[psutil.Process] = psutil.Process(process.pid).children()
        if any(one.name() == "sleep" for one in found):
            return found
        time.sleep(0.05)
    raise AssertionError("it started nothing in time")


class OneProcess:
    """A manager like vLLM's coordinator: one process, and shutdown() in the place of close()."""

    def __init__(self, target: Callable[[], None]) -> None:
        self.proc = SPAWN.Process(target=target, name="coordinator")
        self.proc.start()
        self.ended = False

    def shutdown(self) -> None:
        self.proc.kill()
        self.proc.join(WAIT_S)
        self.ended = True


def test_a_manager_of_one_process_is_waited_for_and_ended() -> None:
    coordinator = OneProcess(supervised.fails_alone)
    with pytest.raises(RuntimeError, match="coordinator") as caught:  # as vLLM raises
        wait_for_completion_or_failure(engines("idle"), coordinator=coordinator)  # type: ignore[arg-type]
    assert isinstance(caught.value, ProcessLostError)
    assert coordinator.ended


def test_a_process_and_its_descendants_are_killed_by_pid() -> None:
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & sleep 600 & wait"], stdout=subprocess.DEVNULL
    )
    tree = psutil.Process(process.pid)
    deadline = time.monotonic() + WAIT_S
    while len(tree.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    children = tree.children()
    assert len(children) == 2
    kill_process_tree(process.pid)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert not any(map(process_managers.is_alive, children))
    kill_process_tree(process.pid)  # it is gone


def test_waits_have_an_end() -> None:
    process = SPAWN.Process(target=time.sleep, args=(WAIT_S,))
    process.start()
    try:
        assert wait_any([process], timeout_s=0.05) == ([], [])
        assert wait_all([process], 0.05) is False
        process.kill()
        assert wait_any([process], timeout_s=WAIT_S) == ([process], [])
        assert wait_all([process], WAIT_S) is True
        assert wait_any([process], timeout_s=None) == ([process], [])
    finally:
        process.kill()
        process.join(WAIT_S)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was ended by SIGKILL (exit code -9)"),
        (-64 - 99, "was ended by signal 163 (exit code -163)"),
        (1, "ended with exit code 1"),
        (143, "ended with exit code 143, which says SIGTERM"),
        (None, "is still running"),
    ],
)
def test_ends_in_words(code: int | None, words: str) -> None:
    assert how_ended(code) == words


def kill(process: psutil.Process) -> None:
    """Kill it as trees are killed, in one pass."""
    process_managers.kill_all(lambda: {process}, timeout_s=0)


def test_a_pid_that_is_used_again_is_another_process() -> None:
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) as program:
        try:
            (own,) = (
                one for one in process_managers.descendants([os.getpid()]) if one.pid == program.pid
            )
            former: Any = psutil.Process(own.pid)
            pid, started = former._ident
            former._ident = (pid, started - 1)
            assert not process_managers.is_alive(former)
            kill(former)
            assert program.poll() is None
            assert process_managers.is_alive(own)
            kill(own)
            assert program.wait(WAIT_S) == -signal.SIGKILL
            assert not process_managers.is_alive(own)
        finally:
            program.kill()


def test_marked_processes_are_found_by_the_whole_name() -> None:
    env = {**os.environ, "WEIGHTSYNC_TEST_SEEN": "1"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as one:
        try:
            assert {found.pid for found in process_managers.marked("WEIGHTSYNC_TEST_SEEN")} == {
                one.pid
            }
            assert not process_managers.marked("EIGHTSYNC_TEST_SEEN")
            assert not process_managers.marked("WEIGHTSYNC_TEST_SEE")
        finally:
            one.kill()
