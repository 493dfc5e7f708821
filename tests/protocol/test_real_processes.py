"""The kit's faults on real processes: the promise holds, and the next update heals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from torch import nn

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.models import digests, fill
from tests.e2e.processes import Apply, Host, Remote
from weightsync.testing import Act, Fault, Faults, FaultyTransport
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.factory import Targets
from weightsync.transports.http import HttpTransport

TIMEOUT_S = 10.0
CHANCES: dict[Act, float] = {
    "drop": 0.06,
    "drop_reply": 0.06,
    "repeat": 0.08,
    "delay": 0.05,
    "late": 0.06,
}
UPDATES = 25
Known = dict[int, dict[str, str]]


def faulty(
    remote: Remote, faults: Faults, on_kill: Callable[[], None] | None = None
) -> FaultyTransport:
    """A transport to a receiver in another process, by whatever carries its messages."""
    http = remote.carrier == "http"
    carried = HttpTransport(remote.url) if http else CallbackTransport(remote, remote.name)
    return FaultyTransport(carried, faults, on_kill=on_kill)


def check(remote: Remote, known: Known) -> int | None:
    """Exactly one version that was sent, or a refusal; return the version."""
    try:
        version = remote.reading(timeout_s=0.2)
    except ws.NotReadyError:
        assert remote.status()["may_generate"] is False
        return None
    assert remote.digests() == known[version]
    return version


def send_once(model: nn.Module, to: Targets) -> None:
    with ws.connect(model, to=to, packed=True, timeout_s=TIMEOUT_S) as sender:
        sender.send_weights()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_by_chance(host: Host, packed: bool, seed: int) -> None:
    """One step fails after the other, and whoever generates holds one whole version."""
    applies: list[Apply] = ["staged", "in_place", "staged"]
    remotes = [
        host.receiver("http" if i % 2 == 0 else "callback", apply=apply, model="pages")
        for i, apply in enumerate(applies)
    ]
    model = models.make("pages", seed=0)
    known: Known = {0: digests(models.make("pages"))}
    all_faults = [Faults() for _ in remotes]
    lines = [faulty(remote, faults) for remote, faults in zip(remotes, all_faults, strict=True)]
    failed = 0
    with ws.connect(
        model, to=lines, packed=packed, bucket_nbytes=16 << 10, num_buckets=2, timeout_s=TIMEOUT_S
    ) as sender:
        for i, line in enumerate(lines):
            line.faults = Faults(seed=f"{seed}/{i}", chances=CHANCES)
        for version in range(1, UPDATES):
            fill(model, seed=version)
            known[version] = digests(model)
            try:
                sender.send_weights(version)
            except ws.WeightSyncError:
                failed += 1
            for remote in remotes:
                check(remote, known)
        for line in lines:
            line.faults.clear()
            line.deliver_late()
        fill(model, seed=UPDATES)
        known[UPDATES] = digests(model)
        with suppress(ws.WeightSyncError):  # what came late may have ended a connection
            sender.send_weights(UPDATES)
        sender.send_weights(UPDATES + 1)
        known[UPDATES + 1] = known[UPDATES]
        assert [check(remote, known) for remote in remotes] == [UPDATES + 1] * 3
    assert 0 < failed < UPDATES - 1


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("act", ["kill", "kill_after"])
@pytest.mark.parametrize(
    "call", ["weight_info", "init_weight_transfer_engine", "update_weights", "finish_weight_update"]
)
def test_a_receiver_is_killed_at_every_message(
    host: Host, call: str, act: Act, apply: Apply
) -> None:
    """SIGKILL, before and after it acted; the other one holds one version, the next one heals."""
    survivor = host.receiver("http", apply=apply, model="pages")
    model = models.make("pages", seed=1)
    known: Known = {0: digests(models.make("pages")), 1: digests(model)}
    early = call in ("weight_info", "init_weight_transfer_engine")
    with processes.host() as theirs:
        victim = theirs.receiver("callback", apply=apply, model="pages")
        fatal = faulty(victim, Faults(Fault(act, call)), on_kill=theirs.kill)
        with pytest.raises(ws.TransportError):
            send_once(model, [fatal, survivor.url])
        assert fatal.killed
        held = check(survivor, known)
        assert held is not None or apply == "in_place"
        assert held != 1 or not early
    again = host.receiver("callback", apply=apply, model="pages")
    fill(model, seed=2)
    known[2] = digests(model)
    with ws.connect(model, to=[again, survivor.url], timeout_s=TIMEOUT_S) as sender:
        sender.send_weights(2)
    assert (check(again, known), check(survivor, known)) == (2, 2)
