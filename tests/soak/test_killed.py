"""SIGKILL at every boundary of an update: survivors hold one known version, and the next heals."""

from __future__ import annotations

import gc
import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.models import digests, fill
from tests.e2e.processes import Apply, Host, Remote, wait_until
from tests.e2e.test_fault_matrix import bounded
from tests.soak import victims
from tests.soak.sizes import sizes
from weightsync.shm.segment import find_leftovers, live_segments, remove_leftovers

pytestmark = pytest.mark.usefixtures("frozen")
KILLED = -signal.SIGKILL
SETTLED = {"READY", "TORN", "PREPARED"}
paths = pytest.mark.parametrize("path", victims.PATHS)
applies = pytest.mark.parametrize("apply", ["staged", "in_place"])
# The size is a stride: every fifth boundary, or every one.
strides = sizes(quick=5, whole=1)
Known = dict[int, dict[str, str]]


class Versions:
    """The model of one trainer, and the digests of all that it ever was."""

    def __init__(self) -> None:
        self.model = models.make("plain", seed=1)
        self.last = 1
        self.known: Known = {1: digests(self.model)}

    def next(self, *, elsewhere: bool = False) -> int:
        """Fill the model, or one like it in another process, with what the next version is."""
        self.last += 1
        model = models.make("plain") if elsewhere else self.model
        fill(model, seed=self.last)
        self.known[self.last] = digests(model)
        return self.last

    def check(self, remote: Remote, *, may_be_torn: bool) -> int | None:
        """Exactly one of the last two versions that were sent, or a refusal that says why."""
        try:
            version = remote.reading(timeout_s=0.1)
        except ws.NotReadyError:
            status = remote.status()
            assert may_be_torn
            assert status["detail"]
            assert status["may_generate"] is False
            return None
        assert version in (self.last - 1, self.last)
        assert remote.digests() == self.known[version]
        return version

    def check_all(self, remotes: list[Remote]) -> None:
        assert [remote.reading() for remote in remotes] == [self.last] * len(remotes)
        assert all(remote.digests() == self.known[self.last] for remote in remotes)


class Footprints:
    """What survivors hold besides memory: as much after every death as at the start."""

    def __init__(self, host: Host, *, connections: int = 0) -> None:
        """`connections` more may be open: an abort beside a long call has its own, and keeps it."""
        self._host = host
        self._start = self._now()
        self._room = (0, 0, connections, connections)
        self._own = len(live_segments())

    def check(self, boundary: str) -> None:
        deadline = time.monotonic() + processes.WAIT_S / 6
        while self._grown() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self._grown(), f"after {boundary}: {self._start}, now {self._now()}"
        assert len(live_segments()) == self._own

    def _grown(self) -> bool:
        counts = zip(self._now(), self._start, self._room, strict=True)
        return any(new > old + room for new, old, room in counts)

    def _now(self) -> tuple[int, int, int, int]:
        """Mapped segments and open files: the survivors' process, and this one."""
        gc.collect()  # ended processes are let go of with their objects
        theirs, ours = self._host.footprint(), processes.footprint()
        return theirs["segments"], ours["segments"], theirs["fds"], ours["fds"]


def settled(remotes: list[Remote]) -> bool:
    return all(r.status()["state"] in SETTLED and not r.status().get("busy") for r in remotes)


@pytest.fixture
def uncollected(host: Host) -> Iterator[None]:
    """Mappings of the dead are let go of, not left to the collector of cycles, whenever it runs."""
    host.run(victims.without_collector)
    logging.disable(logging.WARNING)  # pytest keeps records, and with them errors and their frames
    yield
    logging.disable(logging.NOTSET)
    host.run(victims.with_collector)


@applies
def test_an_error_keeps_nothing_of_the_dead_mapped(
    host: Host, uncollected: None, apply: Apply
) -> None:
    """Whole models in shared memory: the error of the update that they died in refers to them."""
    receiver = host.receiver("http", apply=apply, model="plain")
    dies = (victims.send_and_die, [receiver.url], "unpacked", 1, "before fingerprints 1")
    assert processes.ended(*dies) == KILLED
    wait_until(
        lambda: not receiver.status().get("shared_memory"), "the end of what the dead one shared"
    )
    assert host.footprint()["segments"] == 0
    remove_leftovers()


@strides
@applies
@paths
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("uncollected")
def test_the_trainer_dies(host: Host, path: str, apply: Apply, size: int, tmp_path: Path) -> None:
    receivers = [host.receiver("http", apply=apply, model="plain") for _ in range(2)]
    urls = [receiver.url for receiver in receivers]
    versions = Versions()
    listed = tmp_path / "passed.json"

    def heal() -> int:
        left = set(find_leftovers())
        with ws.connect(versions.model, to=urls, **victims.PATHS[path]) as sender:
            sender.send_weights(versions.next())
            versions.check_all(receivers)
            assert not left & set(find_leftovers()), (
                "what the dead one left survived the next start"
            )
        return len(left)

    dry_run = (urls, path, versions.next(elsewhere=True), "", listed)
    assert processes.ended(victims.send_and_die, *dry_run) == 0
    boundaries = json.loads(listed.read_text(encoding="utf-8"))
    assert len(boundaries) >= (40 if path == "packed" else 12), boundaries
    heal()
    footprints = Footprints(host)
    held: set[int | None] = set()
    left = 0
    for boundary in boundaries[::size]:
        version = versions.next(elsewhere=True)
        code = processes.ended(victims.send_and_die, urls, path, version, boundary)
        assert code == KILLED, f"it never came to {boundary}"
        wait_until(lambda: settled(receivers), f"the end of the update after {boundary}")
        for receiver in receivers:
            at = versions.check(receiver, may_be_torn=apply == "in_place")
            held.add(at and at - version)
        left += heal()
        footprints.check(boundary)
    assert left
    # It died before something came to be, and after it had; and in place, in between.
    assert held == ({-1, 0, None} if apply == "in_place" else {-1, 0})


@strides
@applies
@paths
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("uncollected")
def test_a_receiver_dies(host: Host, path: str, apply: Apply, size: int) -> None:
    survivor = host.receiver("http", apply=apply, model="plain")
    versions = Versions()
    now: list[Remote] = []
    footprints: list[Footprints] = []

    def restarted(theirs: Host) -> Remote:
        now[:] = [theirs.receiver(apply=apply, model="plain")]
        return now[0]

    def die_at(sender: ws.WeightSender, boundary: str) -> None:
        with processes.host() as theirs:
            victim = restarted(theirs)
            sender.send_weights(versions.next())
            versions.check_all([victim, survivor])
            if not footprints:
                footprints.append(Footprints(host, connections=1))
            footprints[0].check(boundary)
            theirs.run(victims.arm, boundary)
            versions.next()
            error = bounded(sender.send_weights)
            theirs.process.join(processes.WAIT_S)
            assert theirs.process.exitcode == KILLED, f"it never came to {boundary}"
        assert isinstance(error, ws.TransportError | ws.TransferError), f"{boundary}: {error}"
        assert settled([survivor])
        versions.check(survivor, may_be_torn=apply == "in_place")

    def begin(stack: ExitStack) -> tuple[ws.WeightSender, list[str]]:
        """Connect, and list the boundaries that a receiver passes in one update."""
        with processes.host() as first:
            restarted(first)
            to: Any = [lambda message: now[0](message), survivor.url]  # noqa: PLW0108 # whoever is there
            path_options = victims.PATHS[path]
            sender = stack.enter_context(
                ws.connect(versions.model, to=to, timeout_s=victims.TIMEOUT_S, **path_options)
            )
            sender.send_weights(versions.last)
            first.run(victims.arm, "")
            sender.send_weights(versions.next())
            passed = list(first.run(victims.passed))
            first.kill()
        return sender, passed

    with ExitStack() as stack:
        sender, boundaries = begin(stack)
        assert len(boundaries) >= (40 if path == "packed" else 8), boundaries
        for boundary in boundaries[::size]:
            die_at(sender, boundary)
