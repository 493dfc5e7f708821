"""Tests of engines that are Ray actors beside processes. Run by test_ray.py, in a sandbox."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.serve.supervised import answer
from weightsync.errors import ConfigError, ProcessLostError
from weightsync.serve.process_managers import (
    APIServerProcessManager,
    wait_for_completion_or_failure,
)
from weightsync.serve.ray_engines import RayEngines

WAIT_S = 60.0


class Engine:
    """Runs until a file gives the kind of its end."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, word: Path) -> None:
        while not word.exists():
            time.sleep(0.02)
        if word.read_text() == "fail":
            raise KeyError("no such layer")


pytestmark = pytest.mark.usefixtures("node")


@pytest.fixture
def servers() -> Iterator[APIServerProcessManager]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        manager = APIServerProcessManager(
            answer, listener, input_addresses=["i"], output_addresses=["o"], args=("hello",)
        )
        yield manager
        manager.close()


def engines(folder: Path) -> tuple[RayEngines, dict[str, Any]]:
    """Return two running engines, whose `pid` can be called meanwhile."""
    remote: Any = ray.remote
    kind = remote(num_cpus=0, max_concurrency=2)(Engine)
    actors = {f"engine core {i}": kind.remote() for i in range(2)}
    refs = {name: actor.run.remote(folder / name) for name, actor in actors.items()}
    return RayEngines(actors, refs), actors


def _ask_until(actor: Any, deadline: float) -> None:
    """Poll, because Ray ends actors some time after the call."""
    while time.monotonic() < deadline:
        ray.get(actor.pid.remote(), timeout=WAIT_S)


def assert_all_ended(servers: APIServerProcessManager, actors: dict[str, Any]) -> None:
    assert not any(process.is_alive() for process in servers.processes)
    for actor in actors.values():
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(ray.exceptions.RayActorError):
            _ask_until(actor, deadline)


def test_an_actor_that_is_killed(servers: APIServerProcessManager, tmp_path: Path) -> None:
    manager, actors = engines(tmp_path)
    pid = ray.get(actors["engine core 1"].pid.remote(), timeout=WAIT_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match=r"the Ray actor engine core 1 died") as caught:
        wait_for_completion_or_failure(servers, manager)
    assert caught.value.process == "engine core 1"
    assert str(pid) in str(caught.value)
    assert_all_ended(servers, actors)


def test_an_actor_that_has_finished(servers: APIServerProcessManager, tmp_path: Path) -> None:
    manager, actors = engines(tmp_path)
    (tmp_path / "engine core 0").write_text("end")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_completion_or_failure, servers, manager)
        ray.wait([next(iter(manager._names))], timeout=WAIT_S)
        with pytest.raises(TimeoutError):
            waiting.result(1.5)
        (tmp_path / "engine core 1").write_text("fail")
        with pytest.raises(ProcessLostError, match=r"core 1 failed: KeyError: 'no such layer'$"):
            waiting.result(WAIT_S)
    assert_all_ended(servers, actors)


def test_names_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="each actor has one call"):
        RayEngines({}, {})
