"""Ranks of one trainer that give a call different arguments: one error, on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.crew import Crew, crew

Seen = tuple[str, str]
OF_TWO = "every rank has to give the same"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def seen(act: Callable[[], Any]) -> Seen:
    try:
        act()
    except ws.WeightSyncError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


class Pair:
    """A receiver in rank 0's process, and a model on every rank."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Linear(4, 3)
        self.receiver = ws.WeightReceiver(nn.Linear(4, 3))

    def connect(self, to: Any = None, **settings: Any) -> ws.WeightSender:
        return ws.connect(self.model, to=to or self.receiver.handle, timeout_s=20.0, **settings)


def connect_with(rank: int, settings: list[dict[str, Any]]) -> tuple[Seen, int]:
    """Return how `connect` ends with this rank's settings, and the version after a good one."""
    pair = Pair()
    found = seen(lambda: pair.connect(**settings[rank]))
    with pair.connect() as sender:
        version = sender.send_weights().version
    return found, version


SETTINGS = [
    ({"verify": False}, {}, "verify= is False on rank 0 and True on rank 1"),
    ({}, {"on_failure": "drop"}, "on_failure= is 'abort' on rank 0 and 'drop' on rank 1"),
    ({"dtype": "bf16"}, {}, "dtype= is 'bfloat16' on rank 0 and None on rank 1"),
    ({}, {"packed": True}, "packed= is None on rank 0 and True on rank 1"),
    ({"bucket_nbytes": "1MiB"}, {}, "bucket_nbytes= is 1048576 on rank 0 and None on rank 1"),
    ({}, {"num_buckets": 3}, "num_buckets= is None on rank 0 and 3 on rank 1"),
    ({"backend": "ipc"}, {}, "backend= is 'ipc' on rank 0 and 'auto' on rank 1"),
    ({}, {"check_finite": "raise"}, "check_finite= is 'off' on rank 0 and 'raise' on rank 1"),
    ({"wait_s": 1.0}, {}, "wait_s= is 1.0 on rank 0 and 0.0 on rank 1"),
    ({}, {"takeover": True}, "takeover= is False on rank 0 and True on rank 1"),
    ({"yields": True}, {}, "yields= is True on rank 0 and False on rank 1"),
    ({}, {"delta": "off"}, "delta= is 'auto' on rank 0 and 'off' on rank 1"),
    ({"scrub": 0.5}, {}, "scrub= is 0.5 on rank 0 and 0.015625 on rank 1"),
    (
        {"to": ["http://127.0.0.1:1/a", "http://127.0.0.1:1/b"]},
        {"to": "http://127.0.0.1:1/a"},
        "to= is http://127.0.0.1:1/a, http://127.0.0.1:1/b on rank 0 and http://127.0.0.1:1/a on "
        "rank 1",
    ),
]


@pytest.mark.parametrize(("first", "second", "named"), SETTINGS)
def test_a_setting_that_differs_is_named_with_its_ranks(
    ranks: Crew, first: dict[str, Any], second: dict[str, Any], named: str
) -> None:
    """At once, before anything is sent, and the next `connect` works."""
    for error, version in ranks.run(connect_with, [first, second]):
        assert error[0] == "ConfigError"
        assert f"connect(): the trainer's ranks differ: {named}; {OF_TWO}" in error[1]
        assert version == 1


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_setting_that_one_rank_gives_wrongly_is_its_error_on_all(ranks: Crew, wrong: int) -> None:
    settings: list[dict[str, Any]] = [{}, {}]
    settings[wrong] = {"verify": "yes"}
    for error, version in ranks.run(connect_with, settings):
        assert error == ("ConfigError", f"rank {wrong}: verify is True or False, not 'yes'")
        assert version == 1


def no_difference(rank: int) -> list[Seen]:
    """What looks different and is not: an order, objects of this process, and no receiver."""
    found = []
    for to in (
        lambda pair: [pair.receiver.handle],
        lambda pair: pair.receiver,
        lambda pair: pair.receiver.handle if rank == 0 else (),
        lambda pair: pair.receiver.handle if rank == 0 else None,
    ):
        pair = Pair()
        target = to(pair)

        def connect(pair: Pair = pair, target: Any = target) -> None:
            with ws.connect(pair.model, to=target, timeout_s=20.0) as sender:
                sender.send_weights()

        found.append(seen(connect))
    urls = [f"http://127.0.0.1:1/{name}" for name in "ab"]
    found.append(seen(lambda: Pair().connect(urls if rank else urls[::-1])))
    return found


def test_targets_that_do_not_differ(ranks: Crew) -> None:
    for found in ranks.run(no_difference):
        assert found[:4] == [("", "")] * 4
        assert found[4][0] == "ConnectError"  # which the order of the same two did not prevent


def call_with(rank: int, name: str, arguments: list[dict[str, Any]]) -> tuple[Seen, str | None]:
    """Return how a call ends with this rank's arguments, and the label of the next update."""
    pair = Pair()
    with pair.connect() as sender:
        if name == "update":

            def act() -> None:
                with sender.update(**arguments[rank]) as update:
                    update.send(pair.model.state_dict().items())
        elif name == "send_async":

            def act() -> None:
                sender.send_async(**arguments[rank]).result(30)
        else:

            def act() -> None:
                getattr(sender, name)(**arguments[rank])

        found = seen(act)
        return found, sender.send_weights(label="next").label


CALLS = [
    ("send_weights", {"label": "a"}, {"label": "b"}, "label= is 'a' on rank 0 and 'b' on rank 1"),
    ("send_weights", {"version": 3}, {}, "version= is 3 on rank 0 and None on rank 1"),
    ("send_async", {"label": "a"}, {}, "label= is 'a' on rank 0 and None on rank 1"),
    ("update", {}, {"label": "b"}, "label= is None on rank 0 and 'b' on rank 1"),
    ("update", {}, {"rewind": True}, "rewind= is False on rank 0 and True on rank 1"),
    (
        "resync",
        {"target": "http://a"},
        {"target": "http://b"},
        "target= is http://a on rank 0 and http://b on rank 1",
    ),
]


@pytest.mark.parametrize(("name", "first", "second", "named"), CALLS)
def test_an_argument_that_differs_is_named_with_its_ranks(
    ranks: Crew, name: str, first: dict[str, Any], second: dict[str, Any], named: str
) -> None:
    for error, label in ranks.run(call_with, name, [first, second]):
        wanted = f"{name}(): the trainer's ranks differ: {named}; {OF_TWO}"
        assert error == ("ConfigError", wanted)
        assert label == "next"
