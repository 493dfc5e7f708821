"""Whoever starts next removes what dead owners left in /dev/shm itself, and only that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from torch import nn

import weightsync as ws
from tests.shm.processes import (
    UNSHARE,
    WAIT_S,
    kill,
    line_of,
    output,
    python,
    run,
    running,
)
from weightsync.shm.segment import DIRECTORY, cleanup_stale

OWNER = """
segment = Segment.create(4096)
print(segment.name, flush=True)
signal.pause()
"""
FORKING_OWNER = """
segment = Segment.create(4096)
child = os.fork()
if child == 0:
    assert not segment.owner
    from weightsync.shm.segment import cleanup_stale
    cleanup_stale()
    os.write(1, b"swept\\n")  # whole lines, whatever the other process writes
    signal.pause()
os.write(1, f"{segment.name} {child}\\n".encode())
signal.pause()
"""
SWEEP = "from weightsync.shm.segment import cleanup_stale; cleanup_stale(); print('swept')"
INSIDE = [*UNSHARE, "-pf", "--mount-proc"]


def exists(name: str) -> bool:
    return (DIRECTORY / name).exists()


@contextmanager
def receiver() -> Iterator[None]:
    started = ws.WeightReceiver(nn.Linear(1, 1))
    yield
    started.close()


@contextmanager
def sender() -> Iterator[None]:
    held = ws.WeightReceiver(nn.Linear(1, 1))
    with ws.connect(nn.Linear(1, 1), to=held.handle):
        yield
    held.close()


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("starts", [receiver, sender])
def test_a_living_foreign_owner_keeps_its_segment_and_a_dead_one_does_not(
    starts: Callable[[], AbstractContextManager[None]],
) -> None:
    with running(python(OWNER, DIRECTORY)) as living, running(python(OWNER, DIRECTORY)) as dying:
        kept, left = line_of(living), line_of(dying)
        with starts():
            assert exists(kept)
            assert exists(left)
        kill(dying)
        with starts():
            assert exists(kept)
            assert not exists(left)
        kill(living)
        cleanup_stale()
        assert not exists(kept)


@pytest.mark.usefixtures("shm_clean")
def test_a_forked_child_neither_removes_nor_keeps() -> None:
    with running(python(FORKING_OWNER, DIRECTORY)) as owner:
        lines = {line_of(owner), line_of(owner)}
        name, child = (lines - {"swept"}).pop().split()
        assert "swept" in lines
        try:
            assert exists(name), "the child took its parent's segment for a dead owner's"
            cleanup_stale()
            assert exists(name)
            kill(owner)
            os.kill(int(child), 0)
            cleanup_stale()
            assert not exists(name), "the child kept the lock of its dead parent"
        finally:
            os.kill(int(child), 9)


@pytest.mark.usefixtures("shm_clean")
def test_pids_of_another_namespace_mean_nothing() -> None:
    if run([*INSIDE, "true"]).returncode != 0:
        pytest.skip("a new pid namespace is not permitted here")
    with running(python(OWNER, DIRECTORY)) as owner:
        name = line_of(owner)
        assert output([*INSIDE, *python(SWEEP, DIRECTORY)]).strip() == "swept"
        assert exists(name), "an owner outside was taken for dead"
        kill(owner)
        assert output([*INSIDE, *python(SWEEP, DIRECTORY)]).strip() == "swept"
        assert not exists(name)
    with running([*INSIDE, "--kill-child", *python(OWNER, DIRECTORY)]) as owner:
        name = line_of(owner)
        cleanup_stale()
        assert exists(name), "an owner inside was taken for dead"
    deadline = time.monotonic() + WAIT_S
    while exists(name) and time.monotonic() < deadline:
        cleanup_stale()
        time.sleep(0.01)
