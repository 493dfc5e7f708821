"""`weightsync.send_weights`: one call a step, the connection kept per target."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.segments import opened_since
from weightsync.shm.segment import live_segments
from weightsync.wire.messages import CALLS

WAIT_S = 60.0
FORKS = """
import os, threading
import torch
import weightsync as ws

entered, go = threading.Event(), threading.Event()

def slow(pairs):
    list(pairs)
    entered.set()
    go.wait(60)

weights = {"w": torch.ones(8)}
receiver = ws.WeightReceiver(slow)
sending = threading.Thread(target=ws.send_weights, args=(weights, receiver.handle))
sending.start()
entered.wait(60)
child = os.fork()
if not child:
    other = ws.WeightReceiver(lambda pairs: list(pairs) and None)
    print(ws.send_weights(weights, other.handle).version, flush=True)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go.set()
sending.join()
print(code, receiver.version, flush=True)
"""


class Watched:
    """A receiver that counts the calls it gets."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.receiver = ws.WeightReceiver(model)
        self.calls: list[str] = []

    def __call__(self, message: dict[str, object]) -> object:
        self.calls.append(str(message["call"]))
        return self.receiver.handle(message)

    def holds(self, model: nn.Module) -> bool:
        mine, theirs = self.model.state_dict(), model.state_dict()
        return all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.fixture
def watched() -> Iterator[Watched]:
    before = live_segments()
    made = Watched(nn.Linear(30, 20))
    yield made
    ws.close()
    made.receiver.close()
    assert not opened_since(before)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["module", "mapping", "generator"])
def test_each_kind_of_source(watched: Watched, kind: str, packed: bool) -> None:
    model = nn.Linear(30, 20)
    for version in (1, 2, 3):
        nn.init.normal_(model.weight)
        source = {
            "module": model,
            "mapping": model.state_dict(),
            "generator": ((name, p.detach()) for name, p in model.named_parameters()),
        }[kind]
        report = ws.send_weights(source, to=watched, packed=packed)  # type: ignore[arg-type]  # any of three
        assert report.version == version
        assert watched.holds(model)
    assert watched.calls.count("init_weight_transfer_engine") == 1
    assert watched.calls.count("update_weights") == 3
    assert set(watched.calls) <= set(CALLS)


def test_other_names_make_a_new_connection(watched: Watched) -> None:
    model = nn.Linear(30, 20)
    ws.send_weights(model.state_dict(), to=watched)
    with pytest.raises(ws.ManifestMismatchError) as caught:
        ws.send_weights({"other": torch.zeros(2)}, to=watched)
    assert caught.value.unexpected == ("other",)
    assert watched.holds(model)
    backwards = dict(reversed(model.state_dict().items()))
    assert ws.send_weights(backwards, to=watched).version == 2
    assert watched.calls.count("init_weight_transfer_engine") == 3


def test_close_ends_and_the_next_call_begins_again(watched: Watched) -> None:
    before = live_segments()
    model = nn.Linear(30, 20)
    ws.send_weights(model, to=watched)
    ws.close()
    ws.close()
    assert not opened_since(before)
    assert "shutdown_weight_transfer_engine" in watched.calls
    assert ws.send_weights(model, to=watched).version == 2


def test_a_cast_and_a_rewind(watched: Watched) -> None:
    watched.receiver.close()
    served = Watched(nn.Linear(30, 20, dtype=torch.bfloat16))
    model = nn.Linear(30, 20)
    ws.send_weights(dict(model.state_dict()), to=served, dtype=torch.bfloat16, version=9)
    assert served.holds(nn.Linear(30, 20).to(torch.bfloat16)) is False
    assert served.holds(model.to(torch.bfloat16))
    with pytest.raises(ws.StaleVersionError):
        ws.send_weights(dict(model.state_dict()), to=served, version=4)
    assert ws.send_weights(dict(model.state_dict()), to=served, version=4, rewind=True).version == 4


def test_no_target_is_an_error() -> None:
    with pytest.raises(ws.ConfigError, match="no receiver"):
        ws.send_weights({"a": torch.zeros(1)}, to=[])


class Held:
    """A receiver whose hook keeps the sender waiting until `go` is set."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.receiver = ws.WeightReceiver(self._load)
        self.to = self.receiver.handle

    def _load(self, pairs: Any) -> None:
        list(pairs)
        self.entered.set()
        assert self.go.wait(WAIT_S)


def test_calls_to_two_targets_take_no_turns(watched: Watched) -> None:
    held = Held()
    weights = nn.Linear(30, 20).state_dict()
    with closing(held.receiver), ThreadPoolExecutor(2) as threads:
        first = threads.submit(ws.send_weights, weights, to=held.to)
        try:
            assert held.entered.wait(WAIT_S)
            second = threads.submit(ws.send_weights, weights, to=watched)
            assert second.result(WAIT_S / 2).version == 1
            assert not first.done()
        finally:
            held.go.set()
        assert first.result(WAIT_S).version == 1


def test_calls_to_one_target_take_turns() -> None:
    held = Held()
    weights = {"w": torch.zeros(8)}
    with closing(held.receiver), ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(ws.send_weights, weights, to=held.to) for _ in range(3)]
        assert held.entered.wait(WAIT_S)
        held.go.set()
        assert sorted(call.result(WAIT_S).version for call in calls) == [1, 2, 3]
        ws.close()


def test_a_close_waits_for_a_call_and_ends_its_connection() -> None:
    held = Held()
    weights = {"w": torch.zeros(8)}
    with closing(held.receiver), ThreadPoolExecutor(2) as threads:
        sending = threads.submit(ws.send_weights, weights, to=held.to)
        assert held.entered.wait(WAIT_S)
        ended = threads.submit(ws.close)
        held.go.set()
        assert sending.result(WAIT_S).version == 1
        ended.result(WAIT_S)
        assert not held.receiver.status().senders


def test_threads_that_send_one_module_in_place_do_not_change_it_for_each_other() -> None:
    """The first call of each connection moves the parameters that it reads in place."""
    model = nn.Linear(30, 20)
    for _ in range(5):
        to = [Watched(nn.Linear(30, 20)) for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:
            sent = threads.map(lambda one: ws.send_weights(model, to=one, packed=False), to)
            assert [report.version for report in sent] == [1, 1, 1]
        ws.close()
        for one in to:
            assert one.holds(model)
            one.receiver.close()


def test_a_child_that_is_forked_during_a_call_has_connections_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS],
        timeout=2 * WAIT_S,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.stdout, done.stderr) == ("1\n0 1\n", "")


def test_targets_may_be_an_iterator(watched: Watched) -> None:
    model = nn.Linear(30, 20)
    assert ws.send_weights(model, to=iter([watched])).version == 1
    assert watched.holds(model)
