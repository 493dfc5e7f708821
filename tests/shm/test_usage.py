"""Memory in use: the list of the sender, of the receiver, and of the whole host."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
import requests
import torch
from torch import nn

import weightsync as ws
from tests.cli.running import TOKEN, answer_of, weightsync
from tests.server.live import make_app, serving
from tests.shm.processes import OWNER, kill, line_of, private_directory, python, running
from weightsync.backends.ipc.memory import unreleased
from weightsync.cli.status import COLUMNS
from weightsync.shm.ring import Control, RingWriter
from weightsync.shm.segment import Segment, live_segments
from weightsync.shm.usage import list_segments
from weightsync.transports.callback import CallbackTransport
from weightsync.wire.messages import SharedMemoryUsage

WAIT_S = 60.0
OTHER_READER = """
reader = Segment.open(args[0], nbytes=4096, directory=directory)
print("open", flush=True)
signal.pause()
"""


def by_kind(usage: Iterable[SharedMemoryUsage]) -> dict[str, SharedMemoryUsage]:
    return {entry.kind: entry for entry in usage}


@pytest.mark.usefixtures("shm_clean")
class TestOfASender:
    def test_every_segment_of_its_own_is_in_it_with_its_readers(self) -> None:
        model = nn.Linear(64, 64)
        receivers = {name: ws.WeightReceiver(nn.Linear(64, 64)) for name in ("first", "second")}
        before = live_segments()
        with ws.connect(model, to=[named(r, n) for n, r in receivers.items()]) as sender:
            sender.send_weights()
            usage = sender.shared_memory_usage()
            own = {s.name: s.nbytes for s in live_segments() if s.owner and s not in before}
            assert {entry.name: entry.nbytes for entry in usage} == own
            assert set(by_kind(usage)) == {"control", "ring", "probe", "storage"}
            for entry in usage:
                assert entry.owner
                assert entry.age_s >= 0
                assert entry.readers == ["first", "second"]
                assert entry.unreleased == []
            sender.remove("first")
            assert {tuple(entry.readers) for entry in sender.shared_memory_usage()} == {("second",)}
            sender.release()
            assert sender.shared_memory_usage() == []
            sender.send_weights()
            assert len(sender.shared_memory_usage()) == 4
        assert sender.shared_memory_usage() == []
        for receiver in receivers.values():
            assert receiver.shared_memory_usage() == []
            receiver.close()

    def test_it_grows_older_and_no_longer(self) -> None:
        receiver = ws.WeightReceiver(nn.Linear(8, 8))
        with ws.connect(nn.Linear(8, 8), to=receiver.handle) as sender:
            first = sender.shared_memory_usage()
            for _ in range(5):
                sender.send_weights()
            last = sender.shared_memory_usage()
        receiver.close()
        assert [(e.kind, e.name, e.nbytes) for e in first] == [
            (e.kind, e.name, e.nbytes) for e in last
        ]
        assert all(b.age_s > a.age_s for a, b in zip(first, last, strict=True))

    def test_a_reader_holds_no_chunk_of_an_update_before_its_own(self) -> None:
        with closing(Control.create(slots=2, readers=2, entries=2)) as control:
            writer = RingWriter(control)
            writer.begin([0], 1)
            writer.publish(0)
            assert unreleased(writer) == [0]
            control.release(0, 1)
            writer.begin([0, 1], 1)  # reader 1 is new, and nothing is published for it yet
            assert unreleased(writer) == []
            writer.publish(0)
            assert unreleased(writer) == [0, 1]

    def test_who_has_not_released_the_ring_is_named(self) -> None:
        asleep, wake = threading.Event(), threading.Event()

        def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            list(pairs)
            asleep.set()
            assert wake.wait(WAIT_S)

        slow = ws.WeightReceiver(hook, apply="in_place")
        quick = ws.WeightReceiver(nn.Linear(64, 64))
        to = [named(slow, "slow"), named(quick, "quick")]
        with ws.connect(nn.Linear(64, 64), to=to, packed=True) as sender:
            work = threading.Thread(target=sender.send_weights)
            work.start()
            try:
                assert asleep.wait(WAIT_S)
                entries = by_kind(sender.shared_memory_usage())
                assert "slow" in entries["ring"].unreleased
                assert entries["control"].unreleased == []
                held = by_kind(slow.shared_memory_usage())
                assert held["ring"].unreleased == ["this receiver"]
                assert held["control"].unreleased == []
                assert {entry.sender for entry in held.values()} == set(slow.status().senders)
            finally:
                wake.set()
                work.join(WAIT_S)
            assert by_kind(sender.shared_memory_usage())["ring"].unreleased == []
            assert by_kind(slow.shared_memory_usage())["ring"].unreleased == []
        slow.close()
        quick.close()


def named(receiver: ws.WeightReceiver, name: str) -> CallbackTransport:
    return CallbackTransport(receiver.handle, name)


@pytest.mark.usefixtures("shm_clean")
def test_metrics_count_what_a_receiver_has_open() -> None:
    receiver = ws.WeightReceiver(nn.Linear(64, 64))
    with serving(make_app(receiver, TOKEN)) as url:

        def lines() -> list[str]:
            said = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
            return [line for line in said if line.startswith("weightsync_shared_memory")]

        assert lines() == []
        with ws.connect(nn.Linear(64, 64), to=url, token=TOKEN) as sender:
            for _ in range(3):
                sender.send_weights()
                for entry in receiver.shared_memory_usage():
                    size = (
                        f'weightsync_shared_memory_bytes{{kind="{entry.kind}"}} {entry.nbytes:.1f}'
                    )
                    assert size in [number(line) for line in lines()]
                assert 'weightsync_shared_memory_entries{kind="ring"} 1.0' in lines()
                assert 'weightsync_shared_memory_unreleased{kind="ring"} 0.0' in lines()
                (age,) = [line for line in lines() if 'oldest_seconds{kind="ring"}' in line]
                assert (
                    0
                    < float(age.rpartition(" ")[2])
                    <= by_kind(receiver.shared_memory_usage())["ring"].age_s
                )
        assert lines() == []
    receiver.close()


@pytest.mark.usefixtures("shm_clean")
def test_metrics_and_status_show_a_ring_that_is_not_released() -> None:
    asleep, wake = threading.Event(), threading.Event()

    def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        list(pairs)
        asleep.set()
        assert wake.wait(WAIT_S)

    receiver = ws.WeightReceiver(hook, apply="in_place")
    with (
        serving(make_app(receiver, TOKEN)) as url,
        ws.connect(nn.Linear(64, 64), to=url, token=TOKEN, packed=True) as sender,
    ):
        work = threading.Thread(target=sender.send_weights)
        work.start()
        try:
            assert asleep.wait(WAIT_S)
            said = requests.get(f"{url}/metrics", timeout=10).text
            assert 'weightsync_shared_memory_unreleased{kind="ring"} 1.0' in said.splitlines()
            assert "not released by this receiver" in weightsync("status", url).stdout
            # It may not generate now, so the exit code is not 0.
            (server,) = json.loads(weightsync("status", url, "--json").stdout)["servers"]
        finally:
            wake.set()
            work.join(WAIT_S)
    receiver.close()
    rows = {entry["kind"]: entry for entry in server["shared_memory"]}
    assert rows["ring"]["unreleased"] == ["this receiver"]
    assert rows["ring"].keys() >= {"owner", "sender", "nbytes", "age_s", "name"}


def number(line: str) -> str:
    """Return a line with its value written out: large ones have an exponent."""
    name, _, value = line.rpartition(" ")
    return f"{name} {float(value):.1f}"


class TestOfTheHost:
    def test_owners_and_readers_of_other_processes_are_seen(self) -> None:
        with private_directory() as shm, running(python(OWNER, shm)) as owner:
            name = line_of(owner)
            with running(python(OTHER_READER, shm, name)) as reader:
                assert line_of(reader) == "open"
                (seen,) = list_segments(shm)
                assert (seen.name, seen.nbytes, seen.owner_alive) == (name, 4096, True)
                for process in (owner, reader):
                    assert any(f"({process.pid})" in one for one in seen.mapped_by)
                kill(owner)
                (seen,) = list_segments(shm)
                assert not seen.owner_alive
                assert not any(f"({owner.pid})" in one for one in seen.mapped_by)
                assert any(f"({reader.pid})" in one for one in seen.mapped_by)
            Path(shm, name).unlink()

    def test_status_shows_them_with_a_server_and_without(self) -> None:
        with Segment.create(1 << 20) as segment:
            found = answer_of(weightsync("status", "--host", "--json"))
            assert found["servers"] == []
            (own,) = [one for one in found["host"] if one["name"] == segment.name]
            assert (own["nbytes"], own["owner_alive"], own["named"]) == (1 << 20, True, True)
            assert any(f"({os.getpid()})" in one for one in own["mapped_by"])
            said = weightsync("status", "--host").stdout
            assert all(column in said for column in COLUMNS)
            assert segment.name in said
            with Segment.open(segment.name, nbytes=1 << 20):
                segment.unlink()
                found = answer_of(weightsync("status", "--host", "--json"))
            (own,) = [one for one in found["host"] if one["name"] == segment.name]
            assert not own["named"]

    def test_status_of_nothing_is_refused(self) -> None:
        assert weightsync("status").exit_code == 2
