"""The private group by itself: who comes, who is missed, and how waits end."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import weightsync as ws
from tests.shm.processes import Script, line_of, running
from weightsync.backends.gloo.group import (
    HEADER_LANE,
    GroupRendezvous,
    LivenessSocket,
    PrivateGroup,
    data_lane,
)
from weightsync.backends.gloo.header import ChunkHeader, HeaderBuffer, HeaderStatus, patience_s
from weightsync.backends.gloo.sender import Chain

ADDRESS = "127.0.0.1"
TIMEOUT_S = 20.0
SHORT_S = 0.3


@contextmanager
def group(size: int = 2, address: str = ADDRESS) -> Iterator[list[PrivateGroup]]:
    """A whole group in this process, one thread for each member while they meet."""
    host = GroupRendezvous.host(address, epoch=1, timeout_s=TIMEOUT_S)

    def member(rank: int) -> tuple[GroupRendezvous, PrivateGroup]:
        meeting = GroupRendezvous.reach(address, host.port, epoch=1, timeout_s=TIMEOUT_S)
        meeting.enter(rank, TIMEOUT_S)
        return meeting, PrivateGroup(meeting, rank, size, TIMEOUT_S)

    with ThreadPoolExecutor(size) as pool:
        joining = [pool.submit(member, rank) for rank in range(1, size)]
        assert host.gather(range(1, size), TIMEOUT_S, given_up=lambda: False) == []
        groups = [PrivateGroup(host, 0, size, TIMEOUT_S)]
        members = [joined.result() for joined in joining]
    groups += [made for _, made in members]
    try:
        yield groups
    finally:
        for made in groups:
            made.abort()
            made.close()
        for meeting, _ in members:
            meeting.close()


@pytest.mark.parametrize("address", [ADDRESS, "::1"])
def test_bytes_arrive_in_order_on_every_lane(address: str) -> None:
    sent = [torch.full((1000,), i, dtype=torch.uint8) for i in range(6)]
    with group(address=address) as (first, second):
        for lane in (data_lane(0), data_lane(1), HEADER_LANE):
            got = [torch.zeros_like(tensor) for tensor in sent]
            arriving = [second.receive(tensor, 0, lane) for tensor in got]
            for tensor in sent:
                first.send(tensor, 1, lane).wait(TIMEOUT_S)
            for pending in arriving:
                pending.wait(TIMEOUT_S)
            assert all(map(torch.equal, got, sent))


def test_it_listens_on_the_address_given_and_on_no_other() -> None:
    with group() as groups:
        assert groups
        assert own_listeners() == {ipaddress.ip_address(ADDRESS)}


def own_listeners() -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses on which this process listens."""
    links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    ours = {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in ours:
                words = bytes.fromhex(fields[1].partition(":")[0])
                swapped = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(ipaddress.ip_address(swapped))
    return found


def test_a_wait_that_runs_out_is_a_timeout() -> None:
    with (
        group() as (_, second),
        pytest.raises(ws.TransferTimeout, match=r"nothing moved for 0\.3 s"),
    ):
        second.receive(torch.zeros(1, dtype=torch.uint8), 0, HEADER_LANE).wait(SHORT_S)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_blocked_wait_ends_when_its_group_is_severed(rank: int) -> None:
    with group(3) as groups, ThreadPoolExecutor(1) as pool:
        groups[(rank + 2) % 3].abort()  # a connection that is lost already must not hide the rest
        buffer = torch.zeros(8, dtype=torch.uint8)
        pending = groups[rank].receive(buffer, (rank + 1) % 3, HEADER_LANE)
        waiting = pool.submit(pending.wait, None)
        time.sleep(SHORT_S / 3)
        started = time.monotonic()
        groups[rank].abort()
        with pytest.raises(ws.TransferError):
            waiting.result(TIMEOUT_S)
        assert time.monotonic() - started < TIMEOUT_S / 4


def test_a_group_that_is_closed_refuses_work() -> None:
    with group() as (first, _):
        first.close()
        with pytest.raises(ws.TransferError, match="was closed"):
            first.send(torch.zeros(1, dtype=torch.uint8), 1, HEADER_LANE)


def test_the_first_witness_is_believed() -> None:
    host = GroupRendezvous.host(ADDRESS, epoch=3, timeout_s=TIMEOUT_S)
    member = GroupRendezvous.reach(ADDRESS, host.port, epoch=3, timeout_s=TIMEOUT_S)
    stale = GroupRendezvous.reach(ADDRESS, host.port, epoch=2, timeout_s=TIMEOUT_S)
    try:
        assert str(member.report(ws.TransferTimeout("c hangs"))) == "c hangs"
        told = host.report(ws.TransferError("b is gone"))
        assert (str(told), type(told)) == ("c hangs", ws.TransferTimeout)
        assert type(host.reported()) is ws.TransferTimeout
        assert stale.reported() is None
    finally:
        member.close()
        stale.close()


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(ws.ConnectError, match=r"cannot listen on 192\.0\.2\.1"):
        GroupRendezvous.host("192.0.2.1", epoch=1, timeout_s=SHORT_S)


def test_a_sender_that_is_not_there_cannot_be_reached() -> None:
    with socket.socket() as bound:
        bound.bind((ADDRESS, 0))
        port = bound.getsockname()[1]
    with pytest.raises(ws.ConnectError, match=f"{ADDRESS}:{port} cannot be reached"):
        GroupRendezvous.reach(ADDRESS, port, epoch=1, timeout_s=SHORT_S)


def test_what_listens_but_does_not_answer_is_no_sender() -> None:
    with socket.create_server((ADDRESS, 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(ws.ConnectError, match=r"no answer within 0\.3 s"):
            GroupRendezvous.reach(ADDRESS, port, epoch=1, timeout_s=SHORT_S)


def test_a_sender_that_falls_silent_holds_nobody_for_ever() -> None:
    script = f"""
import signal
from weightsync.backends.gloo.group import GroupRendezvous
meeting = GroupRendezvous.host({ADDRESS!r}, epoch=1, timeout_s=5)
meeting.give_up(3)
print(meeting.port, flush=True)
signal.pause()
"""
    with running(Script(script)) as process, ThreadPoolExecutor(1) as pool:
        member = GroupRendezvous.reach(ADDRESS, int(line_of(process)), epoch=1, timeout_s=SHORT_S)
        try:
            assert member.given_up(3)
            process.send_signal(signal.SIGSTOP)
            time.sleep(SHORT_S)
            told = pool.submit(member.report, ws.TransferTimeout("it hangs"))
            assert str(told.result(TIMEOUT_S)) == "it hangs"
            assert not member.given_up(3)  # nobody knows
            with pytest.raises(ws.TransferError, match="no answer within"):
                PrivateGroup(member, 1, 2, SHORT_S)
            process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + TIMEOUT_S
            while not member.given_up(3) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert member.given_up(3)
        finally:
            process.send_signal(signal.SIGCONT)
            member.close()


def test_those_who_do_not_come_are_named() -> None:
    chain = Chain(ADDRESS, ["here", "not here", "nor here"], epoch=1, timeout_s=SHORT_S)
    first = GroupRendezvous.reach(ADDRESS, chain.info(1).port, epoch=1, timeout_s=TIMEOUT_S)
    try:
        first.store.set("here/1", "")
        with pytest.raises(ws.TransferTimeout, match=r"2 of 3 hosts .* not here, nor here; can"):
            chain.join()
        assert chain.broken
    finally:
        first.close()
        chain.close()


def test_a_chain_that_closes_ends_its_join() -> None:
    chain = Chain(ADDRESS, ["never"], epoch=1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(chain.join)
        time.sleep(SHORT_S / 3)
        chain.close()
        with pytest.raises(ws.TransferError, match="was closed while its members joined"):
            joining.result(TIMEOUT_S / 4)


def test_the_lifeline_shows_a_sender_that_died() -> None:
    script = f"""
from weightsync.backends.gloo.group import GroupRendezvous
meeting = GroupRendezvous.host({ADDRESS!r}, epoch=1, timeout_s=5)
print(meeting.port, flush=True)
signal.pause()
"""
    with running(Script("import signal\n" + script)) as process:
        lifeline = LivenessSocket(ADDRESS, int(line_of(process)), TIMEOUT_S)
        try:
            assert lifeline.holds()
            process.kill()
            process.wait(TIMEOUT_S)
            deadline = time.monotonic() + TIMEOUT_S
            while lifeline.holds() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not lifeline.holds()
        finally:
            lifeline.close()


def test_a_forked_child_does_not_hide_the_end_of_its_sender() -> None:
    script = f"""
import os, signal
from weightsync.backends.gloo.group import GroupRendezvous
meeting = GroupRendezvous.host({ADDRESS!r}, epoch=1, timeout_s=5)
print(meeting.port, flush=True)
input()
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""
    with running(Script(script)) as process:
        lifeline = LivenessSocket(ADDRESS, int(line_of(process)), TIMEOUT_S)
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        child = int(line_of(process))
        try:
            assert lifeline.holds()
            process.kill()
            process.wait(TIMEOUT_S)
            deadline = time.monotonic() + TIMEOUT_S
            while lifeline.holds() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not lifeline.holds()
        finally:
            lifeline.close()
            os.kill(child, signal.SIGKILL)  # which also shows that it was there


def test_a_head_says_what_was_filled_in() -> None:
    said = ChunkHeader(HeaderStatus.CHUNK, 7, 2, 3, 99, [2**64 - 1, 5])
    head = HeaderBuffer(4)
    head.write(said)
    copy = HeaderBuffer(4)
    copy.memory.copy_(head.memory)
    assert copy.read() == said
    assert said.last
    with pytest.raises(ws.TransferError, match="5 fingerprints do not fit a header of 4"):
        head.write(said._replace(fingerprints=[0] * 5))


def test_whoever_is_further_down_runs_out_of_patience_first() -> None:
    waits = [
        patience_s(10, rank, 4, at_ring=at_ring) for rank in range(4) for at_ring in (False, True)
    ]
    assert waits == sorted(waits, reverse=True)
    assert min(waits) >= 5
    assert max(waits) < 10


def test_threads_end_with_the_group() -> None:
    before = threading.active_count()
    with group(3):
        pass
    assert threading.active_count() == before
