"""Transports of the user's, and by means of another one: all that one can do is forwarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

import weightsync as ws
from weightsync.errors import AuthError, ProtocolError
from weightsync.testing import FaultyTransport
from weightsync.transports.base import BaseTransport, WrappingTransport, complete
from weightsync.transports.callback import CallbackTransport

DECLARED = sorted(name for name in dir(BaseTransport) if not name.startswith("_"))


class Everything(BaseTransport):
    """Has all that BaseTransport declares, as a class that does not derive from it might."""

    path, paths, local_address, round = "pigeon", ("a", "b"), "192.0.2.7", "one for all"
    whole: Any = None

    def call(self, request: Any, *, timeout_s: float) -> Any:
        return request, timeout_s

    def expand(self, paths: Sequence[str]) -> list[BaseTransport]:
        return [Everything(path) for path in paths]

    def check_access(self, timeout_s: float) -> None:
        raise AuthError(f"refused within {timeout_s} s")


class Foreign:
    """The five members of Transport, and no more."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._inner = CallbackTransport(receiver.handle, "foreign")
        self.target, self.sent_nbytes, self.sent_messages = "foreign", 0, 0

    def call(self, request: Any, *, timeout_s: float) -> Any:
        self.sent_messages += 1
        return self._inner.call(request, timeout_s=timeout_s)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("name", DECLARED)
def test_all_that_is_declared_is_forwarded(name: str) -> None:
    assert name in vars(WrappingTransport)


@pytest.mark.parametrize("wrap", [WrappingTransport, FaultyTransport])
def test_what_the_other_one_can_do(wrap: type[WrappingTransport]) -> None:
    inner = Everything("x")
    inner.whole = Everything("server")
    made = wrap(inner)
    assert (made.target, made.path, made.paths) == ("x", "pigeon", ("a", "b"))
    assert (made.local_address, made.round) == ("192.0.2.7", "one for all")
    assert made.whole is inner.whole
    assert [each.target for each in made.expand(["c", "d"])] == ["c", "d"]
    with pytest.raises(AuthError, match="within 3 s"):
        made.check_access(3)


def test_the_workers_of_a_server_have_the_same_faults() -> None:
    made = FaultyTransport(Everything("x"))
    workers = made.expand(["c"])
    assert [getattr(worker, "faults", None) for worker in workers] == [made.faults]


def test_one_of_the_users_has_the_defaults() -> None:
    receiver = ws.WeightReceiver(nn.Linear(2, 2))
    mine: Any = Foreign(receiver)
    made = complete(mine)
    assert (made.path, made.paths, made.local_address, made.whole) == ("", (), None, None)
    assert made.round is made == complete(mine)
    made.check_access(1.0)
    with pytest.raises(ProtocolError, match="foreign is a server of 2 workers"):
        made.expand(["a", "b"])
    with ws.connect(nn.Linear(2, 2), to=mine) as sender:
        assert sender.send_weights().version == 1
        assert mine.sent_messages > 2
    receiver.close()
