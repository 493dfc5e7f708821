"""Progress of real updates: packed and unpacked, to two receivers."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import weightsync as ws
from weightsync import observe
from weightsync.errors import install_hint
from weightsync.observe import Observer, ProgressBar

BUCKET: dict[str, Any] = {"bucket_nbytes": 8192, "num_buckets": 2}
NBYTES = 4 * (64 * 64 + 64) * 6


def make() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


class SlowLoader:
    """A hook that waits in the middle, until the progress callback has seen what it should."""

    def __init__(self, go: threading.Event, after: int) -> None:
        self.go, self.left = go, after

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, _ in weights:
            names.add(name)
            self.left -= 1
            if self.left == 0:
                assert self.go.wait(30)
        return names


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.usefixtures("shm_clean")
def test_a_callback_hears_of_every_update(packed: bool) -> None:
    seen: list[ws.Progress] = []
    receivers = [ws.WeightReceiver(make()), ws.WeightReceiver(make())]
    targets = [receiver.handle for receiver in receivers]
    with ws.connect(make(), to=targets, packed=packed, progress=seen.append) as sender:
        assert seen == []
        for version in (1, 2):
            seen.clear()
            sender.send_weights()
            assert [p.phase for p in seen].count("done") == 1
            first, last = seen[0], seen[-1]
            assert first.phase == "transfer"
            assert (last.phase, last.version) == ("done", version)
            assert last.total_nbytes == last.done_nbytes == NBYTES
            assert list(last.receivers.values()) == [NBYTES, NBYTES]
            assert list(last.receivers) == sender.targets
            assert last.seconds_left == 0
            assert last.gbps > 0
            assert len(seen) <= 2 + last.seconds / 0.1


@pytest.mark.usefixtures("shm_clean")
def test_it_hears_how_far_the_slowest_is() -> None:
    go, seen = threading.Event(), list[ws.Progress]()

    def hear(progress: ws.Progress) -> None:
        seen.append(progress)
        values = sorted(progress.receivers.values())
        if len(values) == 2 and 0 < values[0] < NBYTES:
            go.set()

    slow = ws.WeightReceiver(SlowLoader(go, 6), apply="in_place")
    quick = ws.WeightReceiver(make())
    source = make()
    targets = [slow.handle, quick.handle]
    with ws.connect(source, to=targets, packed=True, progress=hear, **BUCKET) as sender:
        sender.send_weights()
    assert go.is_set()
    middle = [p for p in seen if 0 < p.done_nbytes < p.total_nbytes]
    assert middle
    assert all(p.done_nbytes == min(p.receivers.values()) for p in middle)
    assert [p.done_nbytes for p in seen] == sorted(p.done_nbytes for p in seen)


@pytest.mark.usefixtures("shm_clean")
def test_a_failed_update_ends_as_failed() -> None:
    seen: list[ws.Progress] = []

    def refuse(weights: object) -> set[str]:
        raise RuntimeError("no")

    target = ws.WeightReceiver(refuse).handle
    sender = ws.connect(make(), to=target, packed=True, progress=seen.append)
    with sender, pytest.raises(ws.WeightSyncError):
        sender.send_weights()
    assert seen[-1].phase == "failed"
    assert "done" not in {p.phase for p in seen}


def test_a_failing_callback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(progress: ws.Progress) -> None:
        calls.append(progress)
        raise RuntimeError("the callback's own fault")

    receiver = ws.WeightReceiver(make())
    with (
        caplog.at_level(logging.WARNING, "weightsync"),
        ws.connect(make(), to=receiver.handle, progress=fail) as sender,
    ):
        assert sender.send_weights().version == 1
        assert sender.send_weights().version == 2
    assert len(calls) == 1
    assert sum("progress callback failed" in r.message for r in caplog.records) == 1


def test_a_late_call_says_nothing_of_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of the first update ends when the second one is over."""
    with monkeypatch.context() as hurried:
        hurried.setattr(observe, "_LAST_CALL_S", 0.01)
        check_a_late_call(lambda: hurried.setattr(observe, "_LAST_CALL_S", 30.0))


def check_a_late_call(give_time: Callable[[], None]) -> None:
    go, seen, threads = threading.Event(), list[ws.Progress](), list[threading.Thread]()

    def late(progress: ws.Progress) -> None:
        seen.append(progress)
        threads.append(threading.current_thread())
        assert go.wait(30)

    receiver = ws.WeightReceiver(make())
    with ws.connect(make(), to=receiver.handle, progress=late) as sender:
        sender.send_weights()
        while not threads:
            time.sleep(0.01)
        sender.send_weights()
        give_time()
        go.set()
        for thread in threads.copy():
            thread.join(30)
        assert [progress.phase for progress in seen][1:] == ["done"]
        assert seen[1].version == 1
        sender.send_weights()
    assert (seen[-1].phase, seen[-1].version) == ("done", 3)


def test_an_observer_that_raises_does_not_affect_the_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = [name for name in vars(Observer) if name.startswith("on_")]

    def fail(*_: object) -> None:
        raise RuntimeError("the observer's own fault")

    failing = type("Failing", (Observer,), dict.fromkeys(hooks, fail))
    model, target = make(), make()
    with ws.connect(model, to=ws.WeightReceiver(target).handle) as sender:
        sender._group.observers.append(failing())
        with caplog.at_level(logging.WARNING, "weightsync.observe"):
            report = sender.send_weights()
    assert report.version == 1
    assert all(map(torch.equal, target.parameters(), model.parameters()))
    assert len(hooks) == 6
    assert {r.message for r in caplog.records} == {"Failing failed"}
    assert len(caplog.records) >= len(hooks)


def test_the_bar_shows_bytes_rate_and_time_left() -> None:
    out = io.StringIO()
    bar = ProgressBar(Console(file=out, force_terminal=True, width=120))
    for done in (0, 30_000_000):
        bar(
            ws.Progress(
                phase="transfer", version=3, done_nbytes=done, total_nbytes=60_000_000, seconds=1.0
            )
        )
    bar(
        ws.Progress(
            phase="done", version=3, done_nbytes=60_000_000, total_nbytes=60_000_000, seconds=2.0
        )
    )
    text = out.getvalue()
    assert "version 3: transfer" in text
    assert "30.0/60.0 MB" in text
    assert "/s" in text


def test_a_bar_writes_nothing_where_stderr_is_no_terminal() -> None:
    out = io.StringIO()
    bar = ProgressBar(Console(file=out))
    bar(ws.Progress(phase="transfer", version=3, done_nbytes=1, total_nbytes=2, seconds=1.0))
    bar(ws.Progress(phase="done", version=3, done_nbytes=2, total_nbytes=2, seconds=2.0))
    assert out.getvalue() == ""


def test_a_bar_without_rich_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ws.BackendUnavailableError, match=re.escape(install_hint("cli"))):
        ws.connect(make(), to=ws.WeightReceiver(make()).handle, progress=True)
    with pytest.raises(ws.ConfigError, match="progress must be"):
        ws.connect(make(), to=[], progress=3)  # type: ignore[arg-type]  # that it is refused


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.usefixtures("shm_clean")
def test_the_report_says_which_receiver_was_slow(packed: bool) -> None:
    """A ring of two buckets makes all receivers wait for the slowest."""

    def slow(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:
            time.sleep(0.05)

    receivers = [ws.WeightReceiver(make()), ws.WeightReceiver(slow, apply="in_place")]
    targets = [receiver.handle for receiver in receivers]
    with ws.connect(make(), to=targets, packed=packed, verify=False, **BUCKET) as sender:
        quick, late = sender.send_weights().receivers
    busy = [one.seconds["load"] - one.seconds.get("wait", 0.0) for one in (quick, late)]
    assert busy[1] >= 12 * 0.05
    assert busy[0] < busy[1] / 2


QUIET = """
import torch
import weightsync as ws
receiver = ws.WeightReceiver(torch.nn.Linear(4, 4))
with ws.connect(torch.nn.Linear(4, 4), to=receiver.handle) as sender:
    sender.send_weights()
import logging
assert not logging.getLogger().handlers
"""


def test_a_plain_script_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=240, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
