"""Updates of a copy: the trainer's optimizer steps while the bytes move, and nothing is mixed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weightsync as ws
from tests.crew import crew
from tests.update.test_source_changes import RING, Layers, fill, in_place, optimizer, values

WAIT_S = 60.0


class SlowHook:
    """A hook that keeps values of the first and last element of each tensor, when it may go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()
        self.held: list[set[float]] = []

    def __call__(self, pairs: Any) -> None:
        self.entered.set()
        assert self.go.wait(WAIT_S)
        seen = set[float]()
        for _, tensor in pairs:
            seen |= {tensor.min().item(), tensor.max().item()}
        self.held.append(seen)


def test_the_source_may_change_when_the_call_returns() -> None:
    model, held = Layers(1.0), Layers(0.0)
    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(model, to=receiver) as sender:
        for step in range(1, 30):
            future = sender.send_async(label=f"step-{step}")
            in_place(model)
            report = future.result(WAIT_S)
            assert report.version == step
            assert report.label == f"step-{step}"
            assert report.verified == "held"
            assert values(held) == {float(step)}


@pytest.mark.parametrize(
    "settings", [{}, {"packed": True, "bucket_nbytes": "16K"}, {"adopt": False}]
)
def test_an_optimizer_that_steps_all_the_time_mixes_nothing(settings: dict[str, Any]) -> None:
    model, held = Layers(0.0, side=256), Layers(-1.0, side=256)
    step = optimizer(model).step
    with (
        closing(ws.WeightReceiver(held)) as receiver,
        ws.connect(model, to=receiver, **settings) as sender,
    ):
        for _ in range(20):
            future = sender.send_async()
            (sent,) = values(model)
            while not future.done():
                step()
            future.result(WAIT_S)
            assert values(held) == {sent}


def test_the_bytes_move_while_the_trainer_goes_on() -> None:
    model, hook = Layers(1.0), SlowHook()
    with closing(ws.WeightReceiver(hook)) as receiver, ws.connect(model, to=receiver) as sender:
        future = sender.send_async()
        assert hook.entered.wait(WAIT_S)
        assert not future.done()
        fill(model, 2.0)
        hook.go.set()
        future.result(WAIT_S)
        assert hook.held == [{1.0}]


def test_a_second_one_waits_for_the_first() -> None:
    model, hook = Layers(1.0), SlowHook()
    with closing(ws.WeightReceiver(hook)) as receiver, ws.connect(model, to=receiver) as sender:
        first = sender.send_async()
        assert hook.entered.wait(WAIT_S)
        threading.Timer(0.2, hook.go.set).start()
        fill(model, 2.0)
        second = sender.send_async()
        assert first.done()
        assert (first.result().version, second.result(WAIT_S).version) == (1, 2)
        assert hook.held == [{1.0}, {2.0}]


def test_a_second_one_replaces_the_first() -> None:
    """The hook of the first is still open when it is cancelled, so it never has its weights."""
    model, held = Layers(1.0), Layers(0.0)
    go = threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()

    with closing(ws.WeightReceiver(held)) as receiver:

        def through(message: Any) -> object:
            if message["call"] == "update_weights":
                go.wait(WAIT_S)
            return receiver.handle(message)

        with ws.connect(slow, to=through) as sender:
            first = sender.send_async()
            fill(model, 2.0)
            (in_flight,) = sender._in_flight

            def let_go() -> None:
                assert in_flight.stop.wait(WAIT_S)
                go.set()

            threading.Thread(target=let_go).start()
            second = sender.send_async(replace=True)
            assert isinstance(first.exception(), ws.errors.TransferCancelled)
            second.result(WAIT_S)
            assert values(held) == {2.0}


def test_other_calls_wait_for_it_and_send_what_the_source_holds_then() -> None:
    model, held = Layers(1.0), Layers(0.0)
    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(model, to=receiver) as sender:
        future = sender.send_async()
        fill(model, 5.0)
        assert sender.send_weights().version == 2
        assert future.done()
        assert values(held) == {5.0}
        with sender.update(partial=True) as update:
            update.send([("rows.0.weight", torch.full((64, 64), 7.0))])
        assert values(held) == {5.0, 7.0}
        future = sender.send_async()
    assert future.result(0).version == 4  # close() has waited
    assert values(held) == {5.0}


def test_a_receiver_that_joins_gets_the_version_that_was_sent() -> None:
    model, held, late = Layers(1.0), Layers(0.0), Layers(0.0)
    with (
        closing(ws.WeightReceiver(held)) as receiver,
        closing(ws.WeightReceiver(late)) as other,
        ws.connect(model, to=receiver) as sender,
    ):
        sender.send_async().result(WAIT_S)
        fill(model, 9.0)
        sender.add(other.handle)
        assert values(late) == values(held) == {1.0}


def test_an_error_is_in_the_future_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fails = [True]

    def hook(pairs: Any) -> None:
        for _ in pairs:
            pass
        if fails:
            raise RuntimeError(f"planted {fails.pop()}")

    model = Layers(1.0)
    with closing(ws.WeightReceiver(hook)) as receiver, ws.connect(model, to=receiver) as sender:
        with pytest.raises(ws.RemoteError, match="planted"):
            sender.send_async().result(WAIT_S)
        assert any("send_async: RemoteError" in r.message for r in caplog.records)
        assert sender.send_async().result(WAIT_S).version == 1


def test_a_copy_that_fails_is_raised_at_once_and_never_sent() -> None:
    model, held, fails = Layers(1.0), Layers(0.0), list[int]()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(model.named_parameters()):
            if index in fails:
                raise RuntimeError("planted")
            yield pair

    with (
        closing(ws.WeightReceiver(held)) as receiver,
        ws.connect(source, to=receiver, verify=False) as sender,
    ):
        sender.send_async().result(WAIT_S)
        fill(model, 2.0)
        fails.append(6)
        for send in (sender.send_async, sender.send_weights):
            with pytest.raises(RuntimeError, match="planted"):
                send()
        with pytest.raises(ws.TransferError, match="there is no whole copy of the weights"):
            sender.resync(sender.targets[0])
        assert values(held) == {1.0}
        fails.clear()
        sender.send_async().result(WAIT_S)
        assert values(held) == {2.0}


def test_a_first_copy_that_fails_is_made_again() -> None:
    """What is sent then is the copy, and not the source."""
    model, hook, fails = Layers(1.0), SlowHook(), list[bool]()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        if fails:
            raise RuntimeError("planted")
        yield from model.named_parameters()

    with closing(ws.WeightReceiver(hook)) as receiver, ws.connect(source, to=receiver) as sender:
        fails.append(True)
        with pytest.raises(RuntimeError, match="planted"):
            sender.send_async()
        fails.clear()
        future = sender.send_async()
        fill(model, 2.0)
        hook.go.set()
        future.result(WAIT_S)
        assert hook.held == [{1.0}]


def test_a_change_while_it_is_copied_is_an_error() -> None:
    model, held = Layers(1.0), Layers(0.0)
    steps: list[Any] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(model.named_parameters()):
            if index == 6 and steps:
                thread = threading.Thread(target=steps.pop())
                thread.start()
                thread.join()
            yield pair

    step = optimizer(model).step
    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(source, to=receiver) as sender:
        sender.send_async().result(WAIT_S)
        for send in (sender.send_async, sender.send_weights):
            steps.append(step)
            with pytest.raises(ws.VerificationError, match="changed while it was copied"):
                send()
        assert values(held) == {1.0}
        assert sender.send_weights().version == 2
        assert values(held) == {3.0}


def test_steps_of_another_thread_are_never_mixed_after_a_copy() -> None:
    model, held = Layers(0.0, side=256, layers=24), Layers(-1.0, side=256, layers=24)
    step, stop, sends, refused = optimizer(model).step, threading.Event(), 0, 0

    def train() -> None:
        while not stop.is_set():
            step()

    deadline = time.monotonic() + WAIT_S

    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(model, to=receiver) as sender:
        sender.send_async().result(WAIT_S)
        thread = threading.Thread(target=train)
        thread.start()
        try:
            while sends < 20 or not refused:
                assert time.monotonic() < deadline
                sends += 1
                try:
                    sender.send_weights()
                except ws.VerificationError:
                    refused += 1
                assert len(values(held)) == 1
        finally:
            stop.set()
            thread.join()


def test_the_copy_is_freed_by_release_and_by_close() -> None:
    model, held = Layers(1.0), Layers(0.0)
    with closing(ws.WeightReceiver(held)) as receiver:
        sender = ws.connect(model, to=receiver)
        sender.send_async().result(WAIT_S)
        snapshot = sender._group.worker._snapshot
        assert snapshot is not None
        assert snapshot.nbytes > 0
        sender.release()
        assert snapshot.nbytes == 0
        fill(model, 2.0)
        sender.send_weights()
        assert values(held) == {2.0}
        sender.close()
        assert snapshot.nbytes == 0


@pytest.mark.parametrize("call", ["whole block", "partial block", "add", "resync"])
def test_after_a_release_other_calls_than_a_send_work_as_well(call: str) -> None:
    model, held, late = Layers(1.0), Layers(0.0), Layers(0.0)
    with (
        closing(ws.WeightReceiver(held)) as receiver,
        closing(ws.WeightReceiver(late)) as other,
        ws.connect(model, to=receiver) as sender,
    ):
        sender.send_async().result(WAIT_S)
        sender.release()
        pairs = [(name, tensor.detach() + 1) for name, tensor in model.named_parameters()]
        match call:
            case "add":
                report = sender.add(other.handle)
                assert values(late) == {1.0}
            case "resync":
                report = sender.resync(sender.targets[0])
                fill(model, 5.0)
                sender.release()
                with pytest.raises(ws.TransferError, match="have changed since version 1"):
                    sender.resync(sender.targets[0])
                assert values(held) == {1.0}
            case _:
                is_partial = call == "partial block"
                with sender.update(partial=is_partial) as update:
                    update.send(pairs[:1] if is_partial else pairs)
                report = update.last_report
                assert values(held) == ({1.0, 2.0} if is_partial else {2.0})
        assert report is not None
        assert report.verified == "held"
        fill(model, 3.0)
        sender.send_weights()
        assert values(held) == {3.0}


def test_what_fails_by_itself_is_told_though_it_was_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go, entered, fails = threading.Event(), threading.Event(), [True]

    def hook(pairs: Any) -> None:
        for _ in pairs:
            pass
        if fails:
            entered.set()
            assert go.wait(WAIT_S)
            raise OSError(f"disk on fire {fails.pop()}")

    model = Layers(1.0)
    with closing(ws.WeightReceiver(hook)) as receiver, ws.connect(model, to=receiver) as sender:
        first = sender.send_async()
        assert entered.wait(WAIT_S)
        threading.Timer(0.3, go.set).start()
        second = sender.send_async(replace=True)
        assert isinstance(first.exception(), ws.RemoteError)
        assert any("disk on fire" in record.message for record in caplog.records)
        second.result(WAIT_S)


def test_close_waits_for_what_a_callback_sends_and_frees_nothing_under_it() -> None:
    model, held = Layers(1.0), Layers(0.0)
    sent: list[Any] = []
    with closing(ws.WeightReceiver(held)) as receiver:
        sender = ws.connect(model, to=receiver)
        first = sender.send_async()
        first.add_done_callback(lambda _: sent.append(sender.send_async()))
        first.result(WAIT_S)
        while not sent:
            time.sleep(0.001)
        sender.close()
        assert sent[0].done()


def test_an_interrupt_while_it_closes_ends_the_update_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, hook = Layers(1.0), SlowHook()
    with closing(ws.WeightReceiver(hook)) as receiver:
        sender = ws.connect(model, to=receiver)
        future = sender.send_async()
        assert hook.entered.wait(WAIT_S)
        settle, interrupts = sender._settle, [True]

        def interrupted(*, stop: bool = False) -> None:
            if interrupts:
                interrupts.pop()
                hook.go.set()
                raise KeyboardInterrupt
            settle(stop=stop)

        monkeypatch.setattr(sender, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.close()
        assert future.done()


def test_its_state_can_be_asked_for_meanwhile() -> None:
    model, held = Layers(1.0), Layers(0.0)
    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(model, to=receiver) as sender:
        for _ in range(10):
            sender.send_async()
            assert "WeightSender at version" in repr(sender)
            sender.shared_memory_usage()
            assert sender.path == "shared_memory"


def test_tied_and_cast_tensors_are_copied_as_they_are_sent() -> None:
    model, held = nn.Module(), nn.Module()
    for module in (model, held):
        module.first = nn.Linear(8, 8, bias=False)
        module.second = nn.Linear(8, 8, bias=False)
        module.second.weight = module.first.weight
    held.bfloat16()
    with closing(ws.WeightReceiver(held)) as receiver:
        with ws.connect(model, to=receiver, dtype="bfloat16") as sender:
            future = sender.send_async()
            (sent,) = (p.detach().clone() for p in model.parameters())
            fill(model, 0.0)
            assert future.result(WAIT_S).tensors == 1
        assert torch.equal(next(held.parameters()), sent.bfloat16())


def test_a_coroutine_copies_before_it_first_waits() -> None:
    model, held = Layers(1.0), Layers(0.0)

    async def overlap(sender: ws.WeightSender) -> list[set[float]]:
        seen = []
        for step in range(2, 6):
            sending = asyncio.create_task(sender.asend_weights(snapshot=True))
            await asyncio.sleep(0)
            fill(model, float(step))
            await sending
            seen.append(values(held))
        return seen

    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(model, to=receiver) as sender:
        assert asyncio.run(overlap(sender)) == [{1.0}, {2.0}, {3.0}, {4.0}]


def test_a_coroutine_that_is_cancelled_stops_its_transfer() -> None:
    model, held = Layers(1.0), Layers(0.0)
    go = threading.Event()

    async def cancel(sender: ws.WeightSender) -> None:
        sending = asyncio.create_task(sender.asend_weights(snapshot=True))
        await asyncio.sleep(0.1)
        sending.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await sending

    with closing(ws.WeightReceiver(held)) as receiver:

        def through(message: Any) -> object:
            if message["call"] == "update_weights":
                go.wait(WAIT_S)
            return receiver.handle(message)

        with ws.connect(model, to=through, **RING) as sender:
            asyncio.run(cancel(sender))
            assert values(held) == {0.0}
            assert sender.send_weights().version == 1


def test_the_memory_of_the_copy_is_in_the_report() -> None:
    model = Layers(1.0)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with (
        closing(ws.WeightReceiver(Layers(0.0))) as receiver,
        ws.connect(model, to=receiver) as sender,
    ):
        before = sender.send_weights().peak_extra_nbytes
        assert sender.send_async().result(WAIT_S).peak_extra_nbytes == before + nbytes


def sharded(rank: int) -> list[set[float]]:
    """Return what rank 0's receiver holds after each update of a model that two ranks share."""
    model, held = Layers(1.0), Layers(0.0)
    fully_shard(model)
    seen = []
    step = optimizer_of_shards(model)
    with (
        closing(ws.WeightReceiver(held)) as receiver,
        ws.connect(model, to=receiver.handle if rank == 0 else ()) as sender,
    ):
        for _ in range(4):
            future = sender.send_async()
            step()
            future.result(WAIT_S)
            seen.append(values(held))
        second = sender.send_async(replace=True)
        third = sender.send_async(replace=True)
        third.result(WAIT_S)
        assert second.done()
        seen.append(values(held))
    return seen


def optimizer_of_shards(model: nn.Module) -> Any:
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad = torch.full_like(parameter, -1)
    return torch.optim.SGD(model.parameters(), lr=1.0).step


def test_shards_of_two_ranks_are_gathered_and_then_they_may_step() -> None:
    with crew(2) as ranks:
        first, _ = ranks.run(sharded)
    assert first == [{1.0}, {2.0}, {3.0}, {4.0}, {5.0}]


def test_nothing_is_left_of_it() -> None:
    before = {thread.name for thread in threading.enumerate()}
    model = Layers(1.0)
    with (
        closing(ws.WeightReceiver(Layers(0.0))) as receiver,
        ws.connect(model, to=receiver) as sender,
    ):
        for _ in range(10):
            sender.send_async()
    deadline = time.monotonic() + WAIT_S
    while "weightsync-send" in {t.name for t in threading.enumerate()} - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
