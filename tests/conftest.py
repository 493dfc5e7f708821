"""One thread per process, GPU tests skipped without a GPU, and a check of /dev/shm."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

# Set before torch loads, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

from tests.side_by_side import begin_at_own_part, may_mount, mount_own_shm, number_of_workers, turn
from weightsync.shm.segment import find_leftovers, live_segments

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background makes all their processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)

# A slow machine is no failure.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

GRACE_S = 5.0
TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Keep these tests apart from those of other workers of pytest-xdist, and of other runs."""
    if hasattr(config, "workerinput") or may_mount():
        mount_own_shm()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers for -n auto."""
    return number_of_workers()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker load the folders of tests in a turn of its own.

    To rewrite the assertions of a file takes as long as all else that a worker does before its
    first test, and is done once for all workers if no two come to the file at the same time.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and collector.path == TESTS and isinstance(collector, pytest.Dir):
        begin_at_own_part(report.result, int(worker["workerid"][2:]), worker["workercount"])
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where torch finds no CUDA GPU, and those marked soak unasked."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn(item.nodeid))  # for all workers the same
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA GPU")
    if "soak" not in config.getoption("markexpr"):
        skips["soak"] = pytest.mark.skip(reason="takes long: -m soak")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the collected tests from garbage collections, which tests that count objects make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def frozen() -> None:
    """Leave what there is out of garbage collections, for a file whose tests make many of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def shm_clean() -> Iterator[None]:
    """Fail the test if it leaves segments in /dev/shm, its own or a dead process's.

    Processes that the test ended may need a moment to release memory, hence a bounded grace.
    Segments of other living programs on the machine do not count.
    """
    own, dead = set(live_segments()), set(find_leftovers())
    yield
    assert not set(live_segments()) - own
    deadline = time.monotonic() + GRACE_S
    while (left := set(find_leftovers()) - dead) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"the test left {sorted(leftover.name for leftover in left)}"


@pytest.fixture
def keeps_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `weightsync serve` run in this process, whose resource tracker it would end.

    It would wait for ever: a fork server of other tests keeps the tracker alive.
    """
    from weightsync.cli import serve

    monkeypatch.setattr(serve, "_end_tracker", lambda: None)
