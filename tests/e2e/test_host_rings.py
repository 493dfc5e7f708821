"""Receivers that share the ring of their host: one that fails holds up none of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.processes import Host, Remote, wait_until
from weightsync.observe import Observer

TIMEOUT_S = 30.0
"""A third of it is time enough for a busy machine, and far from all of it."""
backends = pytest.mark.parametrize("backend", ["tcp", "nixl"])


class Transferred(Observer):
    """Sets `event` when the sender has passed on all bytes of an update."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def on_command(self, name: str) -> None:
        if name == "transfer":
            self.event.set()


class Pair:
    """A member, and a second receiver whose hook is slow, each in a process of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.first, self.second = (stack.enter_context(processes.host()) for _ in range(2))
        self.member: Remote = self.first.receiver("http", model="plain")
        self.slow: Remote = self.second.receiver(
            "http", model="plain", sink="hook", apply="in_place"
        )
        self.model = models.make("plain", seed=1)
        self.transferred = Transferred()

    def connect(self, **options: Any) -> ws.WeightSender:
        given = {"backend": "tcp", "bucket_nbytes": 16 << 10, "timeout_s": TIMEOUT_S, **options}
        sender = ws.connect(self.model, to=[self.member.url, self.slow.url], **given)
        self._stack.enter_context(sender)
        sender.send_weights()
        sender._group.observers.append(self.transferred)
        self.transferred.event.clear()
        models.fill(self.model, seed=2)
        return sender

    def in_the_middle(self, act: Any, backend: str = "tcp") -> threading.Thread:
        """Call `act` when the second one is in its hook.

        By `tcp` the sender has passed on all bytes by then: what the ring does not hold is on its
        way. By `nixl` it waits until they are read.
        """

        def wait() -> None:
            if backend == "tcp":
                assert self.transferred.event.wait(processes.WAIT_S)
            wait_until(lambda: not self.slow.status()["may_generate"], "the hook to be called")
            self.began = time.monotonic()
            act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@backends
def test_a_second_receiver_that_is_killed_is_an_error_at_once(pair: Pair, backend: str) -> None:
    held = models.digests(pair.model)
    sender = pair.connect(backend=backend)
    pair.slow.hinder(delay_s=processes.WAIT_S)
    thread = pair.in_the_middle(pair.second.kill, backend)
    with pytest.raises(ws.TransportError) as caught:
        sender.send_weights()
    assert time.monotonic() - pair.began < TIMEOUT_S / 3
    thread.join()
    assert pair.slow.url in str(caught.value)
    assert pair.member.digests() == held
    assert pair.member.reading() == 1


@backends
def test_a_second_receiver_that_is_killed_costs_only_itself(pair: Pair, backend: str) -> None:
    sender = pair.connect(backend=backend, on_failure="drop")
    pair.slow.hinder(delay_s=processes.WAIT_S)
    thread = pair.in_the_middle(pair.second.kill, backend)
    report = sender.send_weights()
    assert time.monotonic() - pair.began < TIMEOUT_S / 3
    thread.join()
    assert list(report.dropped) == [pair.slow.url]
    assert [at.target for at in report.receivers] == [pair.member.url]
    assert pair.member.digests() == models.digests(pair.model)
    models.fill(pair.model, seed=3)
    sender.send_weights()
    assert pair.member.digests() == models.digests(pair.model)


def test_a_second_receiver_whose_hook_raises_once_is_sent_the_weights_again(pair: Pair) -> None:
    """In the same call, as it loads in place; the member does not wait for it before."""
    sender = pair.connect()
    pair.slow.hinder(failing_calls=1)
    began = time.monotonic()
    assert sender.send_weights().rule == "roll-forward"
    assert time.monotonic() - began < TIMEOUT_S / 3
    assert pair.slow.digests() == pair.member.digests() == models.digests(pair.model)


def test_a_second_receiver_that_is_stopped_costs_only_itself(pair: Pair) -> None:
    """It is the one that is to blame, not the member that waits for it."""
    timeout_s = 10.0
    sender = pair.connect(timeout_s=timeout_s, on_failure="drop")
    pair.slow.hinder(delay_s=0.5)
    pid = _pid(pair.second)
    thread = pair.in_the_middle(lambda: processes.stop(pid))
    report = sender.send_weights()
    took_s = time.monotonic() - pair.began
    thread.join()
    # The member would give it up by itself after 2 times `timeout_s`.
    assert timeout_s / 2 < took_s < 1.8 * timeout_s
    assert list(report.dropped) == [pair.slow.url]
    assert pair.member.digests() == models.digests(pair.model)
    pair.second.kill()


def _pid(host: Host) -> int:
    assert host.process.pid is not None
    return host.process.pid
