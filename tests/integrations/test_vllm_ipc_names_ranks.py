"""The known sender under torch.distributed: every rank calls, rank 0 alone delivers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore

import weightsync as ws
from tests.crew import GROUP_TIMEOUT, Crew, Died, crew
from weightsync.integrations.vllm import ipc_engine
from weightsync.shm.segment import live_segments
from weightsync.wire.messages import UpdateRequest

TIMEOUT_S = 30.0
NBYTES = 1024

Engine = ws.IPCWeightTransferEngine
Seen = tuple[str, str]
"""An error as it can travel: its class and its message."""


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def tensors(count: int = 8) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(count):
        yield f"layer.{i}", torch.full((NBYTES // 4,), float(i))


def arguments(send_mode: Any, **others: Any) -> dict[str, Any]:
    return {"send_mode": send_mode, "timeout_s": TIMEOUT_S} | others


def packed(send_mode: Any, **others: Any) -> dict[str, Any]:
    return arguments(send_mode, packed=True, packed_buffer_size_bytes=NBYTES, **others)


def seen(pairs: Any, given: dict[str, Any]) -> Seen:
    try:
        Engine.trainer_send_weights(pairs, given)
    except Exception as exc:  # noqa: BLE001  # every error is what is asked about
        return type(exc).__name__, str(exc)
    return "", ""


def count(rank: int, given: dict[str, Any]) -> tuple[int, list[list[str]]]:
    """Send as if each rank had a host, and so a device, of its own; return the messages."""
    keys: list[list[str]] = []

    def deliver(info: Any) -> None:
        handles = [info.ipc_handles] if info.packed else info.ipc_handles
        keys.extend(sorted(handle) for handle in handles)

    with on_a_host_of_its_own(rank):
        Engine.trainer_send_weights(tensors(), given | {"send_mode": deliver})
    return len(keys), keys


def on_a_host_of_its_own(rank: int) -> AbstractContextManager[object]:
    return mock.patch(
        "weightsync.integrations.vllm.ipc_engine.host_key", return_value=f"HOST-{rank}"
    )


def test_rank_0_alone_delivers_one_merged_message_for_all_devices(two: Crew) -> None:
    both = ["HOST-0", "HOST-1"]
    assert two.run(count, packed(None)) == [(8, [both] * 8), (0, [])]
    assert two.run(count, arguments(None)) == [(8, [both] * 8), (0, [])]  # one handle per tensor


def lent_here(rank: int, given: dict[str, Any]) -> int:
    """Return how many segments this rank has while its last tensor is asked for."""
    most = 0

    def look() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for pair in tensors():
            yield pair
            most = max(most, len(live_segments()))

    got: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> None:
        got.update({name: tensor.clone() for name, tensor in pairs})

    engine = Engine()
    given = given | {"send_mode": lambda info: engine.receive_weights(info, load)}
    Engine.trainer_send_weights(look(), given)
    assert live_segments() == []
    if rank == 0:
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors())
    return most


def test_of_one_hosts_ranks_one_lends_its_memory(two: Crew) -> None:
    assert two.run(lent_here, packed(None)) == [1, 0]


def late(rank: int, given: dict[str, Any]) -> tuple[int, bool]:
    """Rank 1 comes when rank 0 has long been ready; return what a receiver in rank 0 holds."""
    model = nn.Linear(8, 4)
    receiver = ws.WeightReceiver(model)
    try:
        if rank == 1:
            time.sleep(0.5)
        sent = nn.Linear(8, 4)
        for parameter in sent.parameters():
            nn.init.constant_(parameter, 3.0)

        def deliver(info: Any) -> None:
            receiver.dispatch(UpdateRequest(update_info=info))

        Engine.trainer_send_weights(sent.named_parameters(), given | {"send_mode": deliver})
        return receiver.version, torch.equal(model.weight, sent.weight)
    finally:
        receiver.close()


def test_a_late_rank_makes_no_update_of_its_own(two: Crew) -> None:
    assert two.run(late, arguments(None)) == [(1, True), (0, False)]


def fail(rank: int, failing: int, where: str) -> tuple[Seen, Seen, int]:
    """Fail on one rank, then call again; return both outcomes and the deliveries of this rank."""
    delivered = 0

    def deliver(_: Any) -> None:
        nonlocal delivered
        delivered += 1
        if where == "delivery" and delivered == 3:
            raise ZeroDivisionError("a broken receiver")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(tensors()):
            if where == "source" and rank == failing and i == 4:
                raise ZeroDivisionError("a broken source")
            yield pair

    given = packed(deliver)
    if where == "arguments" and rank == failing:
        given["packed_buffer_size_bytes"] = 0
    first = seen(broken(), given)
    second = seen(tensors(), packed(deliver))
    return first, second, delivered


@pytest.mark.parametrize(
    ("failing", "where", "told", "kind", "deliveries"),
    [
        (0, "delivery", "rank 0: ZeroDivisionError: a broken receiver", "RemoteError", 3),
        (1, "source", "rank 1: ZeroDivisionError: a broken source", "RemoteError", 3),
        (1, "arguments", "rank 1: packed_buffer_size_bytes must be", "ConfigError", 0),
    ],
    ids=["delivery", "source", "arguments"],
)
def test_what_fails_on_one_rank_fails_on_all_by_name(
    two: Crew, failing: int, where: str, told: str, kind: str, deliveries: int
) -> None:
    results = two.run(fail, failing, where)
    for first, second, _ in results:
        assert first[0] == kind
        assert first[1].startswith(told)
        assert second == ("", "")
    assert [delivered for *_, delivered in results] == [deliveries + 8, 0]


def send_others(rank: int, difference: str) -> tuple[Seen, int]:
    pairs = list(tensors(7 if rank == 1 and difference == "count" else 8))
    if rank == 1 and difference.startswith("bytes"):
        pairs[2][1].add_(1)
    delivered: list[Any] = []
    given = arguments if difference.endswith("unpacked") else packed
    with nullcontext() if "one host" in difference else on_a_host_of_its_own(rank):
        error = seen(pairs, given(delivered.append))
    return error, len(delivered)


@pytest.mark.parametrize(
    ("difference", "kind", "told", "delivered"),
    [
        (
            "count",
            "ManifestMismatchError",
            "at position 0 rank 1 has nothing, rank 0 has layer.7 float32[256]; every rank has to "
            "give trainer_send_weights() the same tensors",
            7,
        ),
        ("bytes", "VerificationError", "on rank 1 1 tensors are not those of rank 0: layer.2", 2),
        ("bytes, one host", "VerificationError", "are not those of rank 0: layer.2", 2),
        ("bytes, one host, unpacked", "VerificationError", "are not those of rank 0: layer.2", 0),
    ],
)
def test_ranks_that_send_different_tensors_are_told(
    two: Crew, difference: str, kind: str, told: str, delivered: int
) -> None:
    results = two.run(send_others, difference)
    assert [error[0] for error, _ in results] == [kind, kind]
    assert all(told in error[1] for error, _ in results)
    assert [count for _, count in results] == [delivered, 0]


def stay_away(rank: int) -> tuple[Seen, Seen]:
    """Rank 1 does not call before rank 0 has given up; then both do."""
    first = ("", "")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        first = seen(tensors(), arguments(ignore, timeout_s=0.5))
        store.set("given up", "1")
    else:
        store.wait(["given up"])
    return first, seen(tensors(), arguments(ignore))


def ignore(_: Any) -> None:
    """Deliver nowhere."""


def test_a_rank_that_stays_away_is_named_and_the_next_call_works(two: Crew) -> None:
    (first, second), (_, third) = two.run(stay_away)
    assert first[0] == "TransferTimeout"
    assert first[1].startswith("rank 1 of 2 did not call trainer_send_weights() within 0.5 s")
    assert second == third == ("", "")


def twice(_: int) -> int:
    delivered: list[Any] = []
    for _ in range(2):
        Engine.trainer_send_weights(tensors(), arguments(delivered.append))
    return len(delivered)


def test_a_process_group_of_one_rank_sends_again_and_again() -> None:
    with crew(1) as made:
        assert made.run(twice) == [2]


def again(rank: int) -> list[int]:
    """Send, leave the process group and join another one, and send there, too."""
    delivered: list[Any] = []
    for _ in range(2):
        Engine.trainer_send_weights(tensors(), arguments(delivered.append))
        Engine.trainer_send_weights(tensors(), arguments(delivered.append))
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=PrefixStore("again", store),
            rank=rank,
            world_size=2,
            timeout=GROUP_TIMEOUT,
        )
    return [len(delivered), len(ipc_engine._groups_of_ranks)]


def test_another_process_group_gets_ranks_of_its_own(two: Crew) -> None:
    assert two.run(again) == [[4, 0], [0, 0]]


def die(rank: int) -> Seen:
    """Rank 1 dies between two of its tensors, after calls that went well."""

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(tensors()):
            if rank == 1 and i == 4:
                os._exit(1)
            yield pair

    kind, said = seen(pairs(), packed(ignore))
    return kind, said[: len("rank 1 of 2")]


def test_a_rank_that_dies_is_named() -> None:
    with crew(2) as made:
        error, died = made.run(die)
    assert error == ("TransferError", "rank 1 of 2")
    assert isinstance(died, Died)
