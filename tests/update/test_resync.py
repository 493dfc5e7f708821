"""A version is sent again only where fingerprints show that the source still has its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.e2e.models import digests, fill, make
from weightsync.ranks.commands import LINES_DIGEST
from weightsync.update.outgoing import LastVersion
from weightsync.wire.messages import StartTerms

UNKNOWN = "whether the weights have changed since version 1 was sent cannot be told"
CHANGED = "the weights have changed since version 1 was sent"


class Hook:
    """A `load_weights` hook that copies; in place, no other receiver can fetch from it."""

    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}

    def __call__(self, pairs: Any) -> None:
        self.got.update((name, tensor.clone()) for name, tensor in pairs)


def far(receiver: ws.WeightReceiver) -> Callable[[Mapping[str, Any]], Any]:
    """Return a receiver that says that it is on another host, so that it is sent to by tcp."""

    def handle(message: Mapping[str, Any]) -> Any:
        reply = receiver.handle(message)
        _move(reply)
        return reply

    return handle


def _move(reply: Any) -> None:
    if isinstance(reply, dict):
        if "device_keys" in reply:
            reply["device_keys"] = ["HOST-elsewhere"]
        for value in reply.values():
            _move(value)


@contextmanager
def fleet(near: Any, apply: Any = "auto", **options: Any) -> Iterator[tuple[Any, ws.WeightSender]]:
    """A trainer that has sent version 1 to one receiver of its host."""
    trainer, receiver = make("plain"), ws.WeightReceiver(near, apply=apply)
    with ws.connect(trainer, to=receiver.handle, **options) as sender:
        sender.send_weights()
        yield trainer, sender


@pytest.mark.parametrize("options", [{}, {"packed": True}], ids=str)
def test_a_changed_source_is_not_sent_by_a_path_that_came_since(options: Any) -> None:
    one, two, three = make("plain", 1), make("plain", 2), make("plain", 3)
    second = ws.WeightReceiver(two)
    with fleet(one, **options) as (trainer, sender):
        version_1 = digests(trainer)
        sender.add(far(second))
        assert digests(two) == version_1
        fill(trainer, 9)
        for target in sender.targets:
            with pytest.raises(ws.TransferError, match=UNKNOWN):
                sender.resync(target)
        assert (second.version, second.status().state) == (1, "READY")
        sender.add(far(ws.WeightReceiver(three)))
        assert digests(one) == digests(two) == digests(three) == version_1
        sender.send_weights()
        assert digests(one) == digests(two) == digests(three) == digests(trainer)
        for target in sender.targets:  # by these paths the last version was sent
            assert sender.resync(target).verified == "held"
        fill(trainer, 10)
        for target in sender.targets:
            with pytest.raises(ws.TransferError, match="have changed since version 2"):
                sender.resync(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lines_are_compared_whatever_the_path(dtype: torch.dtype) -> None:
    """Those of tensors that lie still, and those of casts, which are made while they are sent."""
    one, two = make("plain", 1).to(dtype), make("plain", 2).to(dtype)
    with fleet(one, delta="always", dtype=dtype) as (trainer, sender):
        version_1 = digests(one)
        sender.add(far(ws.WeightReceiver(two)))
        two.get_parameter("large").data.zero_()
        assert sender.resync(sender.targets[1]).verified == "held"
        assert digests(two) == version_1
        trainer.get_parameter("large").data[0, 0] += 1
        for target in sender.targets:
            with pytest.raises(ws.TransferError, match=CHANGED):
                sender.resync(target)
        assert digests(one) == digests(two) == version_1


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"delta": "always"}], ids=str)
def test_one_that_joins_by_another_path_waits_where_none_can_lend(
    options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Hook(), Hook()
    second = ws.WeightReceiver(two, apply="in_place")
    with fleet(one, "in_place", **options) as (trainer, sender):
        fill(trainer, 9)
        with caplog.at_level(logging.WARNING, "weightsync.update.coordinator"):
            assert sender.add(far(second)) is None
        assert UNKNOWN in caplog.text
        assert (second.version, second.status().state, two.got) == (0, "CATCHING_UP", {})
        sender.send_weights()
        assert digests(one.got.items()) == digests(two.got.items()) == digests(trainer)
        assert second.status().state == "READY"


def test_one_in_place_is_not_written_to_where_nothing_can_be_compared() -> None:
    two = make("plain", 2)
    second = ws.WeightReceiver(two, apply="in_place")
    with fleet(make("plain", 1), "in_place") as (trainer, sender):
        version_1 = digests(trainer)
        sender.add(far(second))
        fill(trainer, 9)
        with pytest.raises(ws.TransferError, match=UNKNOWN):
            sender.resync(sender.targets[1])
        assert (second.version, second.status().state) == (1, "READY")
        assert digests(two) == version_1


def test_one_that_joins_by_the_same_path_is_refused_a_changed_source() -> None:
    second = ws.WeightReceiver(Hook())
    with fleet(Hook(), "in_place") as (trainer, sender):
        fill(trainer, 9)
        with pytest.raises(ws.TransferError, match=CHANGED):
            sender.add(second.handle)
        assert len(sender.targets) == 1


def test_without_verification_a_warning_says_that_nothing_was_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = make("plain", 2)
    with fleet(make("plain", 1), verify=False) as (trainer, sender):
        sender.add(far(ws.WeightReceiver(two)))
        fill(trainer, 9)
        with caplog.at_level(logging.WARNING, "weightsync.update.outgoing"):
            report = sender.resync(sender.targets[1])
        assert "version 1 is sent again unchecked" in caplog.text
        assert report.verified == "none"


A, B, NONE = "a" * 32, "b" * 32, None


@pytest.mark.parametrize(
    ("before", "now", "same_layout", "wanted"),
    [
        ([{"ipc": A}], [{"ipc": A}], True, ""),
        ([{"ipc": A}], [{"ipc": B}], True, CHANGED),
        ([{"ipc": A}], [{"ipc": A}], False, UNKNOWN),
        ([{"ipc": A}], [{"ipc": B}], False, UNKNOWN),
        ([{"ipc": A}], [{"ipc": A, "tcp": A}], True, UNKNOWN),
        ([{"ipc": A}], [{"ipc": B, "tcp": A}], True, CHANGED),
        ([{"ipc": A, "tcp": A}], [{"ipc": NONE, "tcp": A}], True, ""),
        ([{"ipc": NONE, "lines": A}], [{"ipc": B, "lines": A}], True, ""),
        ([{"ipc": A}], [{"ipc": A, "lines": B}], True, ""),
        ([{"ipc": A, "lines": A}], [{"tcp": B, "lines": A}], False, ""),
        ([{"ipc": A, "lines": A}], [{"tcp": B, "lines": B}], False, CHANGED),
        ([{"ipc": A, "lines": NONE}], [{"tcp": B, "lines": B}], False, UNKNOWN),
        ([{"ipc": A}, {"ipc": A}], [{}, {"ipc": A}], True, ""),
        ([{"ipc": A}, {"ipc": A}], [{"ipc": A}, {"ipc": B}], True, CHANGED),
        ([{"ipc": A}, {}], [{"ipc": A}, {"ipc": A}], True, UNKNOWN),
        ([{"ipc": NONE}], [{"ipc": NONE}], True, UNKNOWN),
        ([], [{"ipc": A}], True, UNKNOWN),
    ],
)
def test_what_is_compared(before: Any, now: Any, same_layout: bool, wanted: str) -> None:
    assert LINES_DIGEST == "lines"
    last = LastVersion(StartTerms(version=1), "layout", before)
    layout = "layout" if same_layout else "another"
    if wanted:
        with pytest.raises(ws.TransferError, match=wanted):
            last.check_unchanged(now, layout, verify=True)
    else:
        last.check_unchanged(now, layout, verify=True)
