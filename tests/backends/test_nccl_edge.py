"""Where NCCL's driver edge fails: what torch raises there, and what a sender makes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import weightsync as ws
from tests.backends.hosts import WAIT_S
from weightsync.backends import nccl_wire
from weightsync.backends.base import Check
from weightsync.backends.chain_sending import Sending
from weightsync.backends.data_group import DataGroup
from weightsync.backends.private_group import PrivateGroup

# The edge itself, without its driver: what torch raises is a RuntimeError


class _Broken:
    """A communicator, a mark or a piece of work of a device that has failed."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def fail(*_: object) -> NoReturn:
            raise RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be")

        return fail


@pytest.fixture
def edge_alone(monkeypatch: pytest.MonkeyPatch) -> nccl_wire._NcclWire:
    monkeypatch.setattr(nccl_wire, "_stream", lambda _: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Group, raising=False)
    return nccl_wire._NcclWire(HashStore(), 0, 2, torch.device("cpu"))


class _Group(_Broken):
    class Options:
        pass

    def __init__(self, *_: object) -> None:
        self.abort: Callable[[], None] = lambda: None


def test_what_a_device_raises_is_a_transfer_error(edge_alone: nccl_wire._NcclWire) -> None:
    some = torch.zeros(4, dtype=torch.uint8)
    broken: Any = _Broken()
    failing: list[Callable[[], object]] = [
        lambda: edge_alone.send(some, 1),
        lambda: edge_alone.receive(some, 1),
        lambda: edge_alone.copy(some, some[:3]),
        lambda: edge_alone.memory(-1),
        nccl_wire._NcclFlight(broken, broken).landed,
    ]
    for call in failing:
        with pytest.raises(ws.TransferError, match=r"^NCCL: [^\n]*$"):
            call()


@pytest.mark.parametrize("fails", [False, True])
def test_abort_says_whether_it_is_over(
    monkeypatch: pytest.MonkeyPatch, edge_alone: nccl_wire._NcclWire, fails: bool
) -> None:
    over = threading.Event()
    group = edge_alone._group

    def abort() -> None:
        assert over.wait(WAIT_S)
        if fails:
            raise RuntimeError("NCCL error")

    monkeypatch.setattr(nccl_wire, "_ABORT_S", 0.1)
    group.abort = abort
    assert not edge_alone.abort()
    assert not edge_alone.abort()
    over.set()
    assert edge_alone._ending is not None
    edge_alone._ending.wait(WAIT_S)
    assert edge_alone.abort() is not fails
    with pytest.raises(ws.TransferError, match="were closed"):
        edge_alone.send(torch.zeros(1, dtype=torch.uint8), 1)


# A head whose chunk cannot follow


class _Way:
    """A connection that keeps what it was given; nothing on it ends before it is waited for."""

    depth = 2

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[_Sent] = []
        self._error = error

    def send(self, tensor: torch.Tensor, rank: int, lane: int) -> _Sent:
        if self._error is not None:
            raise self._error
        self.sent.append(_Sent(tensor))
        return self.sent[-1]


class _Sent:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.before = memory, memory.clone()
        self.unchanged = False

    def wait(self, timeout_s: float | None = None) -> None:
        self.unchanged = torch.equal(self.memory, self.before)


class _Chunks:
    epoch = 7
    chunks = (64, 64)
    depth = 4
    fingerprint_room = 2

    def __init__(self, *, fails_at: int | None = None) -> None:
        self._fails_at = fails_at

    def take(self, j: int, check: Check) -> tuple[torch.Tensor, list[int]]:
        if j == self._fails_at:
            raise RuntimeError("a source of the user's")
        return torch.zeros(64, dtype=torch.uint8), []

    def done(self, j: int) -> None:
        pass


def sending(heads: _Way, data: _Way, feed: _Chunks) -> Sending:
    made = Sending(cast(PrivateGroup, heads), cast(DataGroup, data), feed, "h", 2.0, lambda e: e)
    made.thread.join(WAIT_S)
    assert made.ended.is_set()
    return made


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), ws.TransferError("NCCL: it left")])
def test_no_word_is_sent_behind_a_head_without_its_chunk(error: Exception) -> None:
    heads = _Way()
    made = sending(heads, _Way(error), _Chunks())
    assert made.broke
    assert isinstance(made.error, ws.TransferError)
    assert str(error) in str(made.error)
    (head,) = heads.sent
    assert torch.equal(head.memory, head.before)


def test_a_source_that_fails_ends_the_update_behind_what_has_left() -> None:
    heads, data = _Way(), _Way()
    made = sending(heads, data, _Chunks(fails_at=1))
    assert not made.broke
    assert "a source of the user's" in str(made.error)
    assert [len(heads.sent), len(data.sent)] == [2, 1]
    assert all(each.unchanged for each in heads.sent + data.sent)
