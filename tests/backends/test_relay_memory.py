"""A relay receives into memory again only when what it sent from there is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.backends.gloo import relay
from weightsync.backends.gloo.header import HeaderBuffer
from weightsync.backends.gloo.relay import ChainRelay, Downstream
from weightsync.errors import TransferError


class Group:
    """Sends that are under way until they are waited for; notes what is done, and where."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.fails = False

    def send(self, memory: torch.Tensor, rank: int, lane: int) -> Any:
        self.done.append(("send", memory.data_ptr()))

        def wait(timeout_s: float) -> None:
            self.done.append(("sent", memory.data_ptr()))
            if self.fails:
                raise TransferError("the next host is gone")

        return SimpleNamespace(wait=wait)

    def receive(self, memory: torch.Tensor, rank: int, lane: int) -> None:
        self.done.append(("receive", memory.data_ptr()))


def downstream(group: Group, failures: list[TransferError]) -> Downstream:
    info: Any = SimpleNamespace(rank=1, members=[None] * 3, timeout_s=1.0)
    return Downstream(group, info, failures.append)  # type: ignore[arg-type]


def test_a_header_is_received_where_the_last_one_was_sent_from() -> None:
    group = Group()
    headers = [HeaderBuffer(4) for _ in range(relay._HEADERS)]
    self: Any = SimpleNamespace(
        _headers=headers, _downstream=downstream(group, []), _group=group, _rank=1
    )
    self._receive = lambda memory, lane: ChainRelay._receive(self, memory, lane)
    for turn in range(2 * relay._HEADERS):
        memory = headers[turn % relay._HEADERS].memory
        ChainRelay._post_header(self, turn)
        self._downstream.send(memory, 0)
    for header in headers:
        own = [what for what, address in group.done if address == header.memory.data_ptr()]
        assert own == ["receive", "send", "sent", "receive", "send"]


def test_nothing_is_sent_after_a_send_that_failed() -> None:
    group, failures = Group(), list[TransferError]()
    sends = downstream(group, failures)
    first, second = torch.zeros(2, 8, dtype=torch.uint8)
    sends.send(first, 0)
    group.fails = True
    sends.wait(first)
    sends.send(second, 0)
    sends.wait(second)
    sends.wait_all()
    assert [str(error) for error in failures] == ["the next host is gone"]
    assert [what for what, _ in group.done] == ["send", "sent"]
    with pytest.raises(StopIteration):  # nothing is left to wait for
        next(iter(sends._sent))
