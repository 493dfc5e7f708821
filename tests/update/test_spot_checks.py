"""Weights in use that other code threw away: seen before the next delta, which is then refused.

torch counts no writes through `.data`, and a delta leaves most bytes as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import weightsync as ws
from tests.update.test_deltas import Model, equal, sent
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.shards import local_of
from weightsync.weights.lines import spot_check
from weightsync.weights.lines.spot_check import SpotCheck


@pytest.fixture(params=["compiled", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(spot_check, "why_no_kernels", lambda: "numba is not installed")


def zeroed(tensor: nn.Parameter) -> None:
    tensor.data.zero_()


def noisy(tensor: nn.Parameter) -> None:
    """As memory that was freed, given to something else, and mapped again."""
    tensor.data.view(torch.uint8).numpy()[:] ^= 0xFF


def freed(tensor: nn.Parameter) -> None:
    tensor.data = torch.empty(0, dtype=tensor.dtype)
    tensor.untyped_storage().resize_(0)


def reallocated(tensor: nn.Parameter) -> None:
    tensor.data = torch.zeros_like(tensor)


def small_change(trainer: Model) -> None:
    """Change a few elements of one tensor; a delta leaves all others as they are."""
    with torch.no_grad():
        trainer.p0[0, :3] += 1


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]  # set by now
    for name, parameter in list(model.named_parameters()):
        shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(model, name, nn.Parameter(shard, requires_grad=False))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("discard", [zeroed, noisy, reallocated])
def test_a_discarded_tensor_is_refused_at_once_and_the_whole_model_follows(
    apply: Any, discard: Callable[[nn.Parameter], None]
) -> None:
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(server, apply=apply)
    with ws.connect(trainer, to=receiver, delta="always", scrub=0.0) as sender:
        sender.send_weights()
        for name in ("p5", "p4", "p1"):  # large, of one element, and of two lines
            small_change(trainer)
            assert sent(sender.send_weights())
            discard(getattr(server, name))
            small_change(trainer)
            report = sender.send_weights()
            assert report.delta is not None
            assert not report.delta.sent
            assert "other code has changed" in report.delta.reason
            if discard is not reallocated:  # else the address says it, and no name
                assert f"1 tensors of the weights in use since the last update: {name};" in (
                    report.delta.reason
                )
            assert report.verified == "held"
            assert equal(trainer, server)
            assert receiver.status().state == "READY"
            # Of the two copies of a staged receiver the one that was spoilt is right again, too.
            for _ in range(2):
                small_change(trainer)
                assert sent(sender.send_weights())
                assert equal(trainer, server)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_memory_that_was_freed_is_not_read(apply: Any) -> None:
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(server, apply=apply)
    with ws.connect(trainer, to=receiver, delta="always", scrub=0.0) as sender:
        sender.send_weights()
        small_change(trainer)
        assert sent(sender.send_weights())
        freed(server.p3)
        small_change(trainer)
        with pytest.raises(ws.ManifestMismatchError, match="p3"):
            sender.send_weights()
        server.p3.data = torch.zeros_like(trainer.p3)
        assert not sent(sender.send_weights())
        assert equal(trainer, server)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_shards_are_looked_at_too(apply: Any) -> None:
    """The sums of the trainer's lines say nothing about a shard; what it held before does."""
    trainer, server = Model(), Model(1)
    with one_rank():
        sharded(server)
        receiver = ws.WeightReceiver(server, apply=apply)
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            sender.send_weights()
            small_change(trainer)
            assert sent(sender.send_weights())
            server.p3._local_tensor.data.zero_()  # type: ignore[attr-defined]  # a DTensor now
            small_change(trainer)
            report = sender.send_weights()
            assert report.delta is not None
            assert not report.delta.sent
            assert "p3" in report.delta.reason
        held = {name: local_of(tensor) for name, tensor in server.named_parameters()}
        assert all(torch.equal(held[name], tensor) for name, tensor in trainer.named_parameters())


def test_all_receivers_get_the_whole_model_and_one_that_joined_is_looked_at() -> None:
    trainer, servers = Model(), [Model(1), Model(2)]
    receivers = [ws.WeightReceiver(server) for server in servers]
    with ws.connect(trainer, to=receivers[0], delta="always", scrub=0.0) as sender:
        sender.send_weights()
        small_change(trainer)
        sender.send_weights()
        sender.add(receivers[1])
        small_change(trainer)
        assert sent(sender.send_weights())  # what it fetched was read, too
        zeroed(servers[1].p3)
        small_change(trainer)
        assert not sent(sender.send_weights())
        assert all(equal(trainer, server) for server in servers)
        small_change(trainer)
        assert sent(sender.send_weights())


def test_a_receiver_that_fetched_and_lost_it_before_the_first_delta() -> None:
    trainer, servers = Model(), [Model(1), Model(2)]
    receivers = [ws.WeightReceiver(server) for server in servers]
    with ws.connect(trainer, to=receivers[0], delta="always", scrub=0.0) as sender:
        sender.send_weights()
        small_change(trainer)
        sender.send_weights()
        sender.add(receivers[1])
        zeroed(servers[1].p3)
        small_change(trainer)
        report = sender.send_weights()
        assert report.delta is not None
        assert "p3" in report.delta.reason
        assert all(equal(trainer, server) for server in servers)


@pytest.mark.parametrize(("scrub", "shards"), [(0.0, False), (0.25, False), (0.25, True)])
def test_a_delta_says_what_was_compared(scrub: float, *, shards: bool) -> None:
    """Shards are not compared with the sums of whole lines, so no part of `scrub` counts."""
    trainer, server = Model(), Model(1)
    with one_rank():
        if shards:
            sharded(server)
        receiver = ws.WeightReceiver(server)
        with ws.connect(trainer, to=receiver, delta="always", scrub=scrub) as sender:
            whole = sender.send_weights()
            small_change(trainer)
            report = sender.send_weights()
        last = receiver.last_reply
    count = sum(-(-tensor.nbytes // 64) for tensor in trainer.state_dict().values())
    assert report.delta is not None
    assert report.delta.sent
    sampled = len(trainer.state_dict()) + (0 if shards else int(scrub * count) + (scrub > 0))
    assert report.delta.sampled == pytest.approx(sampled / count)
    assert "which changed, and a sample of" in report.compared
    assert "sample" not in whole.compared
    assert last is not None
    assert last.delta


class TestDiscarded:
    """`receiver.discarded()`: the user says that the weights in use are gone."""

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_nothing_generates_until_the_whole_model_came(self, apply: Any) -> None:
        trainer, server = Model(), Model(1)
        receiver = ws.WeightReceiver(server, apply=apply)
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            sender.send_weights()
            small_change(trainer)
            assert sent(sender.send_weights())
            receiver.discarded()
            status = receiver.status()
            assert (status.state, status.may_generate, status.version) == ("TORN", False, 2)
            assert "were discarded" in status.detail
            with pytest.raises(ws.NotReadyError, match="were discarded"):
                receiver.reading().__enter__()
            with pytest.raises(ws.UpdateConflictError), sender.update(partial=True) as update:
                update.send([("p1", trainer.p1)])
            small_change(trainer)
            report = sender.send_weights()
            assert report.delta is not None
            assert not report.delta.sent
            with receiver.reading() as version:
                assert version == report.version
            assert equal(trainer, server)
            small_change(trainer)
            assert sent(sender.send_weights())
            assert equal(trainer, server)

    def test_before_any_update_and_twice(self) -> None:
        receiver = ws.WeightReceiver(server := Model(1))
        receiver.discarded()
        receiver.discarded()
        assert receiver.status().state == "TORN"
        with ws.connect(trainer := Model(), to=receiver) as sender:
            sender.send_weights()
        assert receiver.status().state == "READY"
        assert equal(trainer, server)

    def test_an_open_update_is_aborted_and_the_next_one_heals(self) -> None:
        trainer, server = Model(), Model(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            sender.send_weights()

            def discarded_meanwhile() -> None:
                with sender.update() as update:
                    update.send(list(trainer.state_dict().items()))
                    receiver.discarded()

            with pytest.raises(ws.WeightSyncError):
                discarded_meanwhile()
            assert receiver.status().state == "TORN"
            assert sender.send_weights().verified == "held"
        assert receiver.status().state == "READY"
        assert equal(trainer, server)

    def test_it_waits_for_a_step(self) -> None:
        """Here a delta that is being committed: it has built on the weights that are gone."""
        trainer, server = Model(), Model(1)
        committing, go_on = threading.Event(), threading.Event()

        def clear() -> None:
            committing.set()
            assert go_on.wait(30)

        receiver = ws.WeightReceiver(server, on_clear_cache=clear)
        with ws.connect(trainer, to=receiver) as sender:
            threads = [
                threading.Thread(target=work) for work in (sender.send_weights, receiver.discarded)
            ]
            threads[0].start()
            try:
                assert committing.wait(30)
                threads[1].start()
                assert receiver.status().state == "PREPARED"
            finally:
                go_on.set()
                for thread in threads:
                    thread.join()
        assert receiver.status().state == "TORN"
        assert receiver.version == 1


@pytest.mark.usefixtures("loops")
def test_any_change_of_the_lines_that_were_read_is_seen() -> None:
    random = np.random.default_rng(3)
    sizes = [0, 1, 7, 63, 64, 65, 200, 4096]
    for shift in (0, 1):  # memory of a tensor may begin at any address
        tensors = [
            torch.from_numpy(random.integers(0, 256, size + shift, np.uint8))[shift:]
            for size in sizes
        ]
        check = SpotCheck(Memory(tensors))
        assert check.changed() == []
        for i, tensor in enumerate(tensors):
            begin = int(check._begins[i])
            assert begin % 64 == 0
            assert begin + min(sizes[i], 64) <= sizes[i]
            for at in {begin, begin + min(sizes[i], 64) - 1} if sizes[i] else ():
                tensor[at] ^= 1
                assert check.changed() == [i]
                tensor[at] ^= 1
                assert check.changed() == []


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("copied_nbytes", [0, 5000, 1 << 30])
def test_lines_are_looked_up_in_tensors_of_any_layout(
    copied_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spot_check, "_COPIED_NBYTES", copied_nbytes)
    held = [torch.rand(30, 4 + i).T for i in range(20)] + [torch.rand(3), torch.zeros(0, 2)]
    memory = Memory([t.contiguous().view(-1).view(torch.uint8) for t in held])
    check = SpotCheck(memory)
    assert check.changed_in(held) == []
    kept = [tensor.clone() for tensor in held]
    for i in (2, 7, 19, 20):
        held[i].fill_(3.0)
    assert check.changed_in(held) == [2, 7, 19, 20]
    assert check.changed_in(kept) == []
    assert check.changed_in([*kept[:-2], torch.rand(4), kept[-1]]) == list(range(22))
    assert check.changed_in(kept[:-1]) == list(range(22))
    kept[3] = kept[3].contiguous()
    kept[3].untyped_storage().resize_(0)
    assert check.changed_in(kept) != []


def test_a_look_goes_by_the_loop_that_read_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loop may be ready only later; its sums are others."""
    memory = Memory([torch.arange(200, dtype=torch.uint8)])
    monkeypatch.setattr(spot_check, "why_no_kernels", lambda: "not yet")
    check = SpotCheck(memory)
    monkeypatch.undo()
    assert check.changed() == []
    assert check.changed_in(memory.tensors) == []


def test_the_lines_are_others_each_time_and_all_have_their_turn() -> None:
    memory = Memory([torch.zeros(64 * 5, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)])
    first = SpotCheck(memory)
    begins = {int(SpotCheck(memory, first.places)._begins[0]) for _ in range(200)}
    assert begins == {0, 64, 128, 192, 256}


def test_one_that_was_not_told_of_a_delta_has_looked_all_the_same() -> None:
    """Every commit reads a line of each tensor, since the weights may be lent, too."""
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(server)

    def silent(message: Mapping[str, object]) -> object:
        body = message["body"]
        assert isinstance(body, dict)
        return receiver.handle(
            {**message, "body": {**body, "delta_follows": False}}
            if "delta_follows" in body
            else message
        )

    with ws.connect(trainer, to=silent, delta="always") as sender:
        sender.send_weights()
        zeroed(server.p3)
        small_change(trainer)
        report = sender.send_weights()
        assert not sent(report)
        assert report.delta is not None
        assert "last update: p3;" in report.delta.reason
        assert equal(trainer, server)
