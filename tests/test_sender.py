"""The sender and the receiver together, in one process: what may go wrong between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.update.test_leases import LEASE_S, let_a_lease_pass
from weightsync.weights.copying import arena
from weightsync.weights.sources.base import ModuleSource
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    PrepareRequest,
    ShutdownRequest,
    StartRequest,
    UpdateRequest,
)

BUCKET: dict[str, Any] = {"packed": True, "bucket_nbytes": 4096, "num_buckets": 2}
TIMEOUT_S = 20.0


def make(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(64, 64)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: nn.Module) -> set[float]:
    return seen(model.parameters())


def seen(tensors: Iterable[torch.Tensor]) -> set[float]:
    return {v for t in tensors for v in t.detach().flatten().tolist()}


class Slow:
    """A staged hook that works until `go` is set; `loaded` has the values that it was given."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.fails = False
        self.loaded: list[set[float]] = []

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.append(seen(tensor for _, tensor in pairs))
        self.entered.set()
        assert self.go.wait(TIMEOUT_S)
        if self.fails:
            raise RuntimeError("planted")


async def cancelled(sender: ws.WeightSender, when: threading.Event) -> None:
    """Cancel an `asend_weights` at an event; return when it has ended."""
    task = asyncio.ensure_future(sender.asend_weights())
    assert await asyncio.to_thread(when.wait, TIMEOUT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), TIMEOUT_S / 2)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


class TestTurns:
    def test_two_senders_take_turns(self) -> None:
        server, ours, theirs = make(), make(1), make(2)
        receiver = ws.WeightReceiver(server)
        with (
            ws.connect(ours, to=receiver.handle, yields=True) as a,
            ws.connect(theirs, receiver.handle, yields=True) as b,
        ):
            for version in range(1, 7, 2):
                assert a.send_weights().version == version
                assert values(server) == {1}
                assert b.send_weights().version == version + 1
                assert values(server) == {2}

    def test_a_sender_that_was_shut_down_connects_again(self) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle) as sender:
            sender.send_weights()
            receiver.dispatch(ShutdownRequest())
            fill(model, 2)
            sender.send_weights()
        assert values(server) == {2}

    def test_one_update_at_a_time(self) -> None:
        receiver = ws.WeightReceiver(make())
        model = make(1)
        with (
            ws.connect(model, to=receiver.handle) as sender,
            sender.update() as update,
        ):
            with pytest.raises(ws.ConfigError, match="in use already"):
                sender.send_weights()
            update.send(model.named_parameters())
        assert receiver.version == 1

    def test_messages_without_an_id_do_not_join_a_named_update(self) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle) as sender, sender.update() as update:
            for message in (PrepareRequest(), FinishRequest(), AbortRequest()):
                with pytest.raises(ws.UpdateConflictError, match="without update_id"):
                    receiver.dispatch(message)
            update.send(model.named_parameters())
        assert values(server) == {1}
        assert receiver.version == 1


class TestEnds:
    def test_an_abort_during_finish_comes_too_late(self) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ThreadPoolExecutor(2) as pool, ws.connect(model, to=receiver.handle) as sender:
            sender.send_weights()
            fill(model, 2)
            with receiver.reading():
                sending = pool.submit(sender.send_weights)
                until(lambda: receiver._session.gate.held)  # finish waits for the reader
                update_id = receiver.status().update_id
                abort = pool.submit(receiver.dispatch, AbortRequest(update_id=update_id))
                time.sleep(0.05)
            assert sending.result(TIMEOUT_S).version == 2
            abort.result(TIMEOUT_S)
        assert receiver.status().state == "READY"
        assert receiver.version == 2
        assert values(server) == {2}

    def test_a_prepared_session_without_a_sender_expires(self) -> None:
        server = make()
        with closing(ws.WeightReceiver(server, lease_s=LEASE_S)) as receiver:
            receiver.dispatch(StartRequest(partial=True))
            receiver.dispatch(PrepareRequest())
            assert receiver.status().state == "PREPARED"
            let_a_lease_pass(receiver)
            until(lambda: receiver.status().state == "READY")
            with ws.connect(make(1), to=receiver.handle) as sender:
                sender.send_weights()
        assert values(server) == {1}

    def test_a_cancelled_send_has_stopped_reading_when_it_returns(self) -> None:
        entered = threading.Event()

        def slow(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            list(pairs)
            entered.set()
            time.sleep(0.2)

        receiver = ws.WeightReceiver(slow, apply="in_place")
        model = make(1)

        async def cancelled(sender: ws.WeightSender) -> None:
            task = asyncio.ensure_future(sender.asend_weights())
            await asyncio.to_thread(entered.wait, TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with ws.connect(model, to=receiver.handle, **BUCKET) as sender:
            asyncio.run(cancelled(sender))
            assert receiver.version == 0
            assert not receiver.status().busy
            sender.send_weights()
        assert receiver.version == 1

    def test_a_second_cancellation_ends_no_send_that_still_reads(self) -> None:
        def cancel(task: asyncio.Task[object]) -> None:
            task.cancel()

        self.check_cancelled(cancel)

    def test_a_loop_that_cancels_every_task_ends_no_send_that_still_reads(self) -> None:
        def cancel(_: asyncio.Task[object]) -> None:
            current = asyncio.current_task()
            for task in asyncio.all_tasks() - {current}:
                task.cancel()

        self.check_cancelled(cancel)

    def check_cancelled(self, cancel: Callable[[asyncio.Task[object]], None]) -> None:
        """Cancel a send again and again while a hook still reads what it was lent."""
        entered, go_on = threading.Event(), threading.Event()

        def slow(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            list(pairs)
            entered.set()
            assert go_on.wait(TIMEOUT_S)

        receiver = ws.WeightReceiver(slow, apply="in_place")

        async def cancelled(sender: ws.WeightSender) -> None:
            task: asyncio.Task[object] = asyncio.ensure_future(sender.asend_weights())
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, entered.wait, TIMEOUT_S)
            for _ in range(5):
                cancel(task)
                await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not receiver.status().busy

        with ws.connect(make(1), to=receiver.handle, **BUCKET) as sender:
            asyncio.run(cancelled(sender))
            sender.send_weights()
            assert receiver.version == sender.version

    def test_a_send_that_is_cancelled_while_receivers_commit_returns_at_once(self) -> None:
        """Its source may change then, its report comes later, and the next send waits for it."""
        hook, model = Slow(), make(1)

        async def run(sender: ws.WeightSender) -> tuple[ws.SyncReport, ws.SyncReport]:
            await cancelled(sender, hook.entered)
            first = sender.last_send
            assert first is not None
            assert not first.done()
            assert receiver.version == 0
            fill(model, 2)
            following = asyncio.ensure_future(sender.asend_weights())
            await asyncio.sleep(0.2)
            assert not following.done()
            hook.go.set()
            return await asyncio.wrap_future(first), await following

        with closing(ws.WeightReceiver(hook, apply="staged")) as receiver:
            with ws.connect(model, to=receiver.handle, **BUCKET) as sender:
                reports = asyncio.run(run(sender))
                assert sender.last_send is not None
                assert sender.last_send.result() is reports[1]
            assert [report.version for report in reports] == [1, 2]
        assert hook.loaded == [{1.0}, {2.0}]

    def test_other_calls_wait_for_what_receivers_commit_after_a_cancellation(self) -> None:
        hook = Slow()

        async def run(sender: ws.WeightSender) -> None:
            await cancelled(sender, hook.entered)

        with closing(ws.WeightReceiver(hook, apply="staged")) as receiver:
            with ws.connect(make(1), to=receiver.handle, **BUCKET) as sender:
                asyncio.run(run(sender))
                threading.Timer(0.2, hook.go.set).start()
            assert receiver.version == 1  # close() has waited
            assert receiver.status().state == "READY"

    def test_a_close_beside_an_awaited_send_cancels_it_before_it_frees_anything(self) -> None:
        hook = Slow()

        async def run() -> None:
            task = asyncio.ensure_future(sender.asend_weights())
            assert await asyncio.to_thread(hook.entered.wait, TIMEOUT_S)
            threading.Timer(0.3, hook.go.set).start()
            await asyncio.to_thread(sender.close)
            assert hook.go.is_set()  # what the hook was lent was there until then
            with pytest.raises(ws.WeightSyncError):
                await task

        with closing(ws.WeightReceiver(hook, apply="in_place")) as receiver:
            sender = ws.connect(make(1), to=receiver.handle, **BUCKET)
            asyncio.run(run())
            assert hook.loaded == [{1.0}]
            assert not receiver.status().senders

    def test_what_fails_after_a_cancellation_is_told_and_sent_by_no_second_attempt(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        hook, model = Slow(), make(1)
        passes: list[float] = []

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            passes.append(next(iter(values(model))))
            yield from model.named_parameters()

        async def run(sender: ws.WeightSender) -> None:
            await cancelled(sender, hook.entered)
            first, read = sender.last_send, len(passes)
            assert first is not None
            fill(model, 2)
            hook.fails = True
            hook.go.set()
            with pytest.raises(ws.WeightSyncError, match="planted"):
                await asyncio.wrap_future(first)
            assert len(passes) == read

        with (
            closing(ws.WeightReceiver(hook, apply="staged")) as receiver,
            ws.connect(source, to=receiver.handle, **BUCKET) as sender,
        ):
            asyncio.run(run(sender))
            assert any("asend_weights: " in record.message for record in caplog.records)
            hook.fails = False
            sender.send_weights()
            assert hook.loaded[-1] == {2.0}
            assert receiver.status().state == "READY"

    def test_a_send_that_is_cancelled_before_it_reads_never_reads(self) -> None:
        """Its thread waits for a receiver that does not answer; then it ends, and sends nothing."""
        asked, go, held = threading.Event(), threading.Event(), threading.Event()
        server, model = make(), make(1)

        async def run(sender: ws.WeightSender) -> None:
            held.set()
            await cancelled(sender, asked)
            assert not go.is_set()
            fill(model, 2)
            go.set()
            last = sender.last_send
            assert last is not None
            with pytest.raises(ws.errors.TransferCancelled):
                await asyncio.wrap_future(last)

        with closing(ws.WeightReceiver(server)) as receiver:

            def carry(message: dict[str, object]) -> object:
                if held.is_set():
                    asked.set()
                    assert go.wait(TIMEOUT_S)
                return receiver.handle(message)

            with ws.connect(model, to=carry, packed=False) as sender:
                sender.send_weights()
                sender.release()
                asyncio.run(run(sender))
                assert values(server) == {1.0}
                assert sender.send_weights().version == 2
        assert values(server) == {2.0}

    def test_closing_waits_for_the_loader(self) -> None:
        entered, gone = threading.Event(), threading.Event()

        def slow(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            entered.set()
            deadline = time.monotonic() + TIMEOUT_S
            while receiver.status().state != "ABORTING":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.2)
            sum(float(t.float().sum()) for _, t in pairs)
            gone.set()

        receiver = ws.WeightReceiver(slow, apply="in_place")
        failed: list[Exception] = []

        def send() -> None:
            try:
                sender.send_weights()
            except ws.WeightSyncError as exc:
                failed.append(exc)

        with ws.connect(make(1), to=receiver.handle, **BUCKET) as sender:
            sending = in_thread(send)
            assert entered.wait(TIMEOUT_S)
            receiver.close()
            assert gone.is_set()
            sending.join(TIMEOUT_S)
        assert len(failed) == 1
        assert "closed" in str(failed[0])

    def test_one_that_is_not_closed_for_good_is_met_again(self) -> None:
        receiver = ws.WeightReceiver(make())
        with ws.connect(make(1), to=receiver.handle, **BUCKET) as sender:
            sender.send_weights()
            receiver.close(for_good=False)
            assert not receiver.shared_memory_usage()
            assert sender.send_weights().version == 2
            receiver.close()
            with pytest.raises(ws.ProtocolError, match="closed"):
                sender.send_weights()
        assert receiver.version == 2

    def test_a_failed_greeting_leaves_no_segment(self) -> None:
        receiver = ws.WeightReceiver(make())

        def handle(message: dict[str, object]) -> dict[str, object]:
            reply = receiver.handle(message)
            if message["call"] == "weight_info":
                reply["orphaned"] = True
                reply["update_id"] = "of-a-dead-sender"
            if message["call"] == "abort_weight_update":
                raise ws.ConnectError("lost")
            return reply

        before = set(ws_segments())
        with pytest.raises(ws.ConnectError):
            ws.connect(make(1), to=handle)
        assert set(ws_segments()) == before


class TestSinks:
    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    @pytest.mark.parametrize(
        "keep",
        [
            lambda kept, t: kept.append(t),
            lambda kept, t: kept.append(t.detach()),
            lambda kept, t: kept.append(nn.Parameter(t)),
            lambda kept, t: kept.append(t[:1]),
        ],
    )
    def test_kept_views_are_found(
        self, apply: str, keep: Callable[[list[torch.Tensor], torch.Tensor], None]
    ) -> None:
        kept: list[torch.Tensor] = []

        def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in pairs:
                keep(kept, tensor)

        receiver = ws.WeightReceiver(hook, apply=apply)  # type: ignore[arg-type]
        with (
            ws.connect(make(3), to=receiver.handle, packed=True) as sender,
            pytest.raises(ws.TransferError, match="kept views of 2 tensors"),
        ):
            sender.send_weights()
        receiver.close()
        assert seen(kept) == {3}  # stale perhaps, never dangling

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_a_replaced_parameter_receives(self, apply: str) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server, apply=apply)  # type: ignore[arg-type]
        with ws.connect(model, to=receiver.handle) as sender:
            sender.send_weights()
            server.weight = nn.Parameter(torch.zeros(64, 64))
            server.bias.data = torch.zeros(64)
            fill(model, 2)
            for _ in range(2):
                sender.send_weights()
                assert values(server) == {2}

    def test_a_receiver_of_another_dtype_now_is_refused_every_time(self) -> None:
        server = make()
        receiver = ws.WeightReceiver(server)
        with ws.connect(make(1), to=receiver.handle) as sender:
            sender.send_weights()
            server.to(torch.bfloat16)
            for _ in range(2):
                with pytest.raises(ws.ManifestMismatchError, match="no longer the one") as raised:
                    sender.send_weights()
            assert server.weight.dtype is torch.bfloat16

            bias, weight = sorted(told for told in raised.value.mismatched)
            assert bias == "bias: float32[64] before, bfloat16[64] now"
            assert weight == "weight: float32[64, 64] before, bfloat16[64, 64] now"

    @pytest.mark.parametrize("packed", [True, False])
    def test_a_model_that_moves_or_is_cast_between_sends_is_followed(self, packed: bool) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle, packed=packed) as sender:
            sender.send_weights()
            for value, move in ((2, torch.nn.Module.bfloat16), (3, torch.nn.Module.float)):
                move(model)
                fill(model, value)
                sender.send_weights()
                assert values(server) == {value}
            model.weight.data = model.weight.data.clone()
            model.bias = nn.Parameter(model.bias.detach().clone())
            fill(model, 4)
            sender.send_weights()
            assert values(server) == {4}

    @pytest.mark.parametrize("packed", [True, False])
    def test_a_model_that_is_offloaded_or_another_is_told_once_by_name(self, packed: bool) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle, packed=packed) as sender:
            sender.send_weights()
            model.to("meta")
            for _ in range(2):
                with pytest.raises(
                    ws.ManifestMismatchError,
                    match=r"meta device \(offloaded\): weight, bias; bring",
                ):
                    sender.send_weights()
            model.to_empty(device="cpu")
            fill(model, 2)
            sender.send_weights()
            assert values(server) == {2}
            model.bias = nn.Parameter(torch.zeros(63))
            with pytest.raises(ws.ManifestMismatchError) as raised:
                sender.send_weights()
            assert raised.value.mismatched == ("bias: float32[64] before, float32[63] now",)
            assert str(raised.value).count("bias") == 1

    def test_a_view_that_the_module_keeps_is_updated_too(self) -> None:
        server = make()
        server.register_buffer("transposed", server.weight.detach().t(), persistent=False)
        receiver = ws.WeightReceiver(server, apply="staged")
        with ws.connect(make(1), to=receiver.handle) as sender:
            sender.send_weights()
        assert seen([server.get_buffer("transposed")]) == {1}


class TestSources:
    @pytest.mark.parametrize("packed", [True, False])
    def test_offloaded_parameters_are_an_error(self, packed: bool) -> None:
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle, packed=packed) as sender:
            sender.send_weights()
            whole = model.weight.data
            model.weight.data = torch.empty(0)
            with pytest.raises(ws.ManifestMismatchError):
                sender.send_weights()
            assert values(server) == {1}
            model.weight.data = whole
            assert sender.send_weights().verified == "held"

    @pytest.mark.parametrize("packed", [True, False])
    def test_another_shape_of_the_same_memory_is_refused(self, packed: bool) -> None:
        server, model = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle, packed=packed) as sender:
            for _ in range(3):
                sender.send_weights()
            model.weight.data = model.weight.data.view(2, 8)
            with pytest.raises(ws.ManifestMismatchError, match="new shape"):
                sender.send_weights()

    @pytest.mark.parametrize("replaced", [True, False])
    @pytest.mark.parametrize("turn", ["transposed", "expanded", "negated", "other dtype"])
    @pytest.mark.parametrize("packed", [True, False])
    def test_a_parameter_that_is_turned_round_in_its_memory(
        self, packed: bool, turn: str, replaced: bool
    ) -> None:
        """What is sent are its values, and the trainer's own are as they were."""
        server, model = (nn.Linear(64, 64, bias=False, dtype=torch.float16) for _ in range(2))
        turned: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "transposed": lambda t: t.t(),
            "expanded": lambda t: t[:1].expand(64, 64),
            "negated": torch._neg_view,
            "other dtype": lambda t: t.view(torch.bfloat16),
        }
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle, packed=packed) as sender:
            for _ in range(2):
                sender.send_weights()
            now = turned[turn](model.weight.data)
            if replaced:
                model.weight = nn.Parameter(now)
            else:
                model.weight.data = now
            wanted = now.clone()
            if replaced and turn == "other dtype":
                with pytest.raises(ws.ManifestMismatchError):
                    sender.send_weights()
                return
            for _ in range(3):
                assert sender.send_weights().verified == "held"
                assert torch.equal(model.weight, wanted)
                assert torch.equal(server.weight, wanted.half())
            model.weight.data = torch.randn(64, 64, dtype=torch.float16)
            assert sender.send_weights().verified == "held"
            assert torch.equal(server.weight, model.weight)

    @pytest.mark.parametrize("packed", [False, True])
    def test_an_update_looks_at_the_source_once(
        self, packed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[ModuleSource] = []
        look = ModuleSource.stable_tensors

        def seen(source: ModuleSource) -> list[torch.Tensor] | None:
            looks.append(source)
            return look(source)

        monkeypatch.setattr(ModuleSource, "stable_tensors", seen)
        server = make()
        with ws.connect(make(1), to=ws.WeightReceiver(server).handle, packed=packed) as sender:
            sender.send_weights()
            looks.clear()
            sender.send_weights()
        assert len(looks) == 1
        assert values(server) == {1}

    def test_what_is_replaced_after_a_block_that_failed_is_sent(self) -> None:
        """The block's end has looked at the module; what it saw is not the next update's."""
        server, model = make(), make(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle, packed=False) as sender:
            with pytest.raises(ws.WeightSyncError), sender.update() as update:
                update.send([("weight", torch.ones(64, 64))])  # and no bias
            kept = model.weight
            model.weight = nn.Parameter(torch.full((64, 64), 2.0))
            fill(model, 2)
            sender.send_weights()
            assert set(kept.flatten().tolist()) == {1.0}
        assert values(server) == {2}

    def test_a_tied_state_dict(self) -> None:
        def tied() -> nn.Module:
            module = nn.Module()
            module.embed = nn.Embedding(8, 4)
            module.head = nn.Linear(4, 8, bias=False)
            module.head.weight = module.embed.weight
            return module

        server, model = tied(), tied()
        receiver = ws.WeightReceiver(server)
        try:
            ws.send_weights(model.state_dict(), to=receiver.handle)
            assert torch.equal(
                server.get_parameter("head.weight"), model.get_parameter("embed.weight")
            )
        finally:
            ws.close()
        with ws.connect(model.state_dict(), to=receiver.handle) as sender:
            fill(model, 3)
            sender.send_weights()
        assert values(server) == {3}


def test_what_large_tensors_are_put_together_in_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    allocate = arena.allocate

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return allocate(nbytes, device)

    monkeypatch.setattr(arena, "allocate", counted)
    held: dict[str, torch.Tensor] = {}
    receiver = ws.WeightReceiver(
        ws.HookSink(lambda pairs: held.update({n: t.clone() for n, t in pairs})), apply="in_place"
    )
    model = make()
    with ws.connect(model, to=receiver.handle, **BUCKET) as sender:
        for value in (1, 2, 3):
            fill(model, value)
            sender.send_weights()
            assert seen(held.values()) == {value}
        assert made == [64 * 64 * 4]  # the weight; the bias fits a bucket
        for _ in range(2):
            with sender.update() as update:
                update.send([("weight", torch.ones(128, 64)), ("bias", torch.ones(64))])
        # What a block needs beyond the model is not kept, and does not take the model's place.
        assert made[1:] == [128 * 64 * 4] * 2
        sender.send_weights()
        assert len(made) == 3


def test_no_room_for_a_large_tensor_is_said_before_a_hook_is_given_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []
    receiver = ws.WeightReceiver(
        ws.HookSink(lambda pairs: given.extend(name for name, _ in pairs)), apply="in_place"
    )
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": make()})
    with ws.connect(model, to=receiver.handle, **BUCKET) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(arena, "available", lambda _: -(1 << 60))
            with pytest.raises(ws.TransferError, match="no room"):
                sender.send_weights()
        assert receiver.status().state == "READY"
        assert given == []
        sender.send_weights()
        assert set(given) == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_a_wrong_table_digest_is_refused() -> None:
    server = make()
    receiver = ws.WeightReceiver(server)

    def handle(message: dict[str, Any]) -> dict[str, object]:
        if message["call"] == "finish_weight_update":
            message["body"]["table_digest"] = "0" * 32
        return receiver.handle(message)

    with (
        ws.connect(make(1), to=handle) as sender,
        pytest.raises(ws.VerificationError, match="table of fingerprints has digest"),
    ):
        sender.send_weights()
    assert values(server) == {0}
    assert receiver.status().state == "READY"


def test_a_bare_update_with_a_whole_model() -> None:
    server, model = make(), make(5)
    receiver = ws.WeightReceiver(server)

    def post(info: ws.IPCWeightTransferUpdateInfo) -> None:
        receiver.dispatch(UpdateRequest(update_info=info))

    args = ws.IPCTrainerSendWeightsArgs(send_mode=post)
    ws.IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), args)
    assert values(server) == {5}
    assert receiver.version == 1
    assert receiver.last_reply is not None
    assert receiver.last_reply.verified == "held"


def ws_segments() -> Iterator[str]:
    from weightsync.shm.segment import live_segments  # beside its only use

    yield from (segment.name for segment in live_segments())


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan"), 1e300])
def test_a_time_that_no_process_can_wait_is_refused(timeout_s: float) -> None:
    with pytest.raises(ws.ConfigError, match="timeout_s is a number of seconds, above 0 and at "):
        ws.connect(make(), to="http://127.0.0.1:1", timeout_s=timeout_s)


@pytest.mark.parametrize("bucket_nbytes", [1, 1000, 5000])
def test_any_size_of_bucket_will_do(bucket_nbytes: int) -> None:
    server = make()
    options: dict[str, Any] = {**BUCKET, "bucket_nbytes": bucket_nbytes}
    with ws.connect(make(3), to=ws.WeightReceiver(server).handle, **options) as sender:
        sender.send_weights()
    assert values(server) == {3}
