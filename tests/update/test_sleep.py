"""Receivers that sleep: who may use their weights, who may not, and what wakes them.

What a sleep of level 2 gives back reads as before until the kernel takes it, so these tests destroy
it themselves, as an engine on a GPU does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.update.test_deltas import Model, equal, sent
from weightsync.server.workers import Workers
from weightsync.weights.sinks.asleep import GpuMemory
from weightsync.wire.messages import (
    CheckRequest,
    FinishRequest,
    InitRequest,
    Reply,
    Request,
    SleepRequest,
    Status,
    UpdateRequest,
    WakeRequest,
)


def small_change(trainer: Model) -> None:
    with torch.no_grad():
        trainer.p0[0, :3] += 1


def destroy(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        tensor.view(torch.uint8).numpy()[:] ^= 0xA5  # torch counts no such write


class Engine:
    """A receiver whose sleep of level 2 destroys the weights; `events` has what happened to it."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.model = Model(seed)
        self.events: list[str] = []
        self.receiver = ws.WeightReceiver(
            self.model,
            on_sleep=self._sleep,
            on_wake=lambda tags: self.events.append(f"wake {'+'.join(tags)}"),
            on_commit=lambda version: self.events.append(f"commit {version}"),
            **options,
        )

    def _sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")
        if level == 2:
            destroy(self.model)

    @property
    def status(self) -> Status:
        return self.receiver.status()

    def is_served(self) -> bool:
        try:
            with self.receiver.reading(timeout_s=5):
                return True
        except ws.NotReadyError:
            return False


Connected = tuple[Model, Engine, Any]


@pytest.fixture(params=["staged", "in_place"])
def connected(request: pytest.FixtureRequest) -> Iterator[Connected]:
    trainer, engine = Model(), Engine(apply=request.param)
    with ws.connect(trainer, to=engine.receiver, delta="always") as sender:
        sender.send_weights()
        engine.events.clear()
        yield trainer, engine, sender
    engine.receiver.close()


class TestLevels:
    def test_level_1_keeps_the_weights(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        held = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        engine.receiver.sleep(1)
        status = engine.status
        assert (status.state, status.may_generate, status.discarded) == ("READY", False, False)
        assert (status.asleep, status.sleep_level) == (["weights", "kv_cache"], 1)
        assert "its weights are kept" in status.detail
        assert [status.fetchable, status.lends, engine.is_served()] == [False] * 3
        engine.receiver.wake_up(["weights"])
        assert engine.status.asleep == ["kv_cache"]
        assert not engine.is_served()
        engine.receiver.wake_up()
        assert engine.is_served()
        for name, tensor in engine.model.state_dict().items():
            assert torch.equal(tensor, held[name])
        small_change(trainer)
        assert sent(sender.send_weights())  # a delta: they are the weights that were sent
        assert equal(trainer, engine.model)

    @pytest.mark.parametrize("wakes", ["with the update", "before"])
    def test_level_2_discards_them(self, connected: Connected, wakes: str) -> None:
        trainer, engine, sender = connected
        engine.receiver.sleep(2)
        status = engine.status
        assert (status.state, status.may_generate, status.discarded) == ("TORN", False, True)
        assert "the weights are gone" in status.detail
        assert not status.weights_id
        if wakes == "before":
            engine.receiver.wake_up()
            assert engine.status.asleep == []
        assert not engine.is_served()
        assert not engine.status.fetchable
        assert not engine.status.lends
        small_change(trainer)
        report = sender.send_weights(wake=wakes != "before")
        assert not sent(report)
        assert report.verified == "held"
        assert engine.is_served()
        assert equal(trainer, engine.model)
        small_change(trainer)
        assert sent(sender.send_weights())
        assert equal(trainer, engine.model)

    def test_a_second_sleep_changes_nothing(self, connected: Connected) -> None:
        _, engine, _ = connected
        engine.receiver.sleep(1)
        engine.receiver.sleep(2)  # as vLLM, which sleeps already
        assert engine.events == ["sleep 1"]
        assert not engine.status.discarded
        engine.receiver.wake_up()
        engine.receiver.wake_up()
        assert engine.events == ["sleep 1", "wake weights+kv_cache"]
        assert engine.is_served()

    def test_levels_in_turn(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        for step in range(12):
            engine.receiver.sleep(1 + step % 2)
            assert not engine.is_served()
            small_change(trainer)
            sender.send_weights(wake=True)
            assert equal(trainer, engine.model)
            assert engine.is_served()


class TestOrder:
    def test_wake_update_wake_serve(self, connected: Connected) -> None:
        _, engine, sender = connected
        engine.receiver.sleep(2)
        sender.send_weights(wake=True)
        assert engine.events == ["sleep 2", "wake weights", "commit 2", "wake kv_cache"]

    def test_of_a_block(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        engine.receiver.sleep(2)
        with sender.update(wake=True) as update:
            update.send(list(trainer.state_dict().items()))
            assert engine.events == ["sleep 2", "wake weights"]
        assert engine.events[2:] == ["commit 2", "wake kv_cache"]
        assert equal(trainer, engine.model)

    def test_one_that_is_awake_is_updated(self, connected: Connected) -> None:
        _, engine, sender = connected
        assert sender.send_weights(wake=True).version == 2
        assert engine.events == ["commit 2"]

    def test_an_update_that_fails_leaves_the_cache_asleep(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        engine.receiver.sleep(2)

        def fails(version: int) -> None:
            raise RuntimeError("no room for graphs")

        engine.receiver._session._on_commit = fails
        with pytest.raises(ws.RemoteError, match="no room for graphs"):
            sender.send_weights(wake=True)
        assert engine.status.asleep == ["kv_cache"]
        assert engine.status.state == "TORN"
        assert not engine.is_served()
        engine.receiver._session._on_commit = None
        sender.send_weights(wake=True)
        assert engine.is_served()
        assert equal(trainer, engine.model)

    @pytest.mark.parametrize("call", ["send_async", "asend_weights"])
    def test_other_calls(self, connected: Connected, call: str) -> None:
        trainer, engine, sender = connected
        engine.receiver.sleep(2)
        if call == "send_async":
            sender.send_async(wake=True).result(60)
        else:
            asyncio.run(sender.asend_weights(wake=True))
        assert engine.is_served()
        assert equal(trainer, engine.model)

    def test_after_release(self, connected: Connected) -> None:
        """The trainer gave its memory back, too: it connects after the weights are awake."""
        trainer, engine, sender = connected
        sender.release()
        engine.receiver.sleep(2)
        sender.send_weights(wake=True)
        assert engine.is_served()
        assert equal(trainer, engine.model)

    def test_it_is_a_flag(self, connected: Connected) -> None:
        _, _, sender = connected
        with pytest.raises(ws.ConfigError, match="wake is True or False"):
            sender.send_weights(wake="weights")


class TestRefused:
    def test_an_update(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        engine.receiver.sleep(1)
        with pytest.raises(
            ws.UpdateConflictError, match=r"sleeps .*send_weights\(wake=True\)"
        ) as e:
            sender.send_weights()
        assert "\n" not in str(e.value)
        with pytest.raises(ws.UpdateConflictError), sender.update() as update:
            update.send(list(trainer.state_dict().items()))
        assert engine.status.asleep == ["weights", "kv_cache"]
        engine.receiver.wake_up()
        assert engine.receiver.version == 1
        assert equal(trainer, engine.model)

    def test_of_a_fleet_nobody_changes(self) -> None:
        trainer, engines = Model(), [Engine(1), Engine(2)]
        with ws.connect(trainer, to=[engine.receiver for engine in engines]) as sender:
            sender.send_weights()
            engines[1].receiver.sleep(1)
            small_change(trainer)
            with pytest.raises(ws.UpdateConflictError, match="sleeps"):
                sender.send_weights()
            assert [engine.receiver.version for engine in engines] == [1, 1]
            assert not equal(trainer, engines[0].model)
            report = sender.send_weights(wake=True)
            assert [engine.receiver.version for engine in engines] == [report.version] * 2
            assert all(engine.is_served() for engine in engines)

    def test_the_cache_before_the_weights(self, connected: Connected) -> None:
        _, engine, _ = connected
        engine.receiver.sleep(2)
        with pytest.raises(ws.UpdateConflictError, match="wake the weights first") as raised:
            engine.receiver.wake_up(["kv_cache"])
        assert "\n" not in str(raised.value)
        assert engine.status.asleep == ["weights", "kv_cache"]
        assert engine.events == ["sleep 2"]

    def test_a_connection(self) -> None:
        engine = Engine()
        engine.receiver.sleep(1)
        with pytest.raises(ws.UpdateConflictError, match="wake it, then connect"):
            ws.connect(Model(), to=engine.receiver)
        engine.receiver.wake_up()
        ws.connect(Model(), to=engine.receiver).close()

    def test_a_hook_without_on_sleep(self) -> None:
        receiver = ws.WeightReceiver(list)
        with pytest.raises(ws.ConfigError, match="on_sleep="):
            receiver.sleep()
        with pytest.raises(ws.ConfigError, match="level 1 or 2"):
            receiver.sleep(3)
        assert receiver.status().asleep == []

    def test_requests_in_flight_cannot_be_kept(self, connected: Connected) -> None:
        _, engine, _ = connected
        with pytest.raises(ws.ConfigError, match="mode=wait"):
            engine.receiver.dispatch(SleepRequest(level=1, mode="keep"))
        assert engine.status.asleep == []
        assert not engine.receiver.paused

    def test_an_open_update_is_aborted(self, connected: Connected) -> None:
        trainer, engine, sender = connected

        def sleeps_meanwhile() -> None:
            with sender.update() as update:
                update.send(list(trainer.state_dict().items()))
                engine.receiver.sleep(2)

        with pytest.raises(ws.WeightSyncError):
            sleeps_meanwhile()
        assert engine.status.discarded
        assert engine.receiver.version == 1
        sender.send_weights(wake=True)
        assert equal(trainer, engine.model)

    def test_the_receivers_beside_one_that_sleeps(self) -> None:
        base, draft = Engine(), Model(3)
        beside = ws.WeightReceiver(draft, beside=base.receiver)
        with ws.connect(Model(), to=beside) as sender:
            sender.send_weights()
            base.receiver.sleep(1)
            with pytest.raises(ws.UpdateConflictError, match="sleeps"):
                sender.send_weights()
            base.receiver.wake_up()
            sender.send_weights()


class TestHooks:
    @pytest.mark.parametrize("level", [1, 2])
    def test_on_sleep_that_raises(self, connected: Connected, level: int) -> None:
        trainer, engine, sender = connected

        def fails(level: int) -> None:
            raise MemoryError("no host memory")

        engine.receiver._on_sleep = fails
        with pytest.raises((MemoryError, ws.TransferError), match="no host memory"):
            engine.receiver.sleep(level)
        assert engine.is_served() == (level == 1)
        assert engine.status.discarded == (level == 2)
        sender.send_weights(wake=True)
        assert engine.is_served()
        assert equal(trainer, engine.model)

    def test_on_wake_that_raises(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        engine.receiver.sleep(2)
        hook = engine.receiver._on_wake

        def fails(tags: object) -> None:
            raise MemoryError("the trainer has it")

        engine.receiver._on_wake = fails
        with pytest.raises(ws.WeightSyncError, match="the trainer has it"):
            sender.send_weights(wake=True)
        assert engine.status.asleep == ["weights", "kv_cache"]
        engine.receiver._on_wake = hook
        sender.send_weights(wake=True)
        assert engine.is_served()
        assert equal(trainer, engine.model)

    def test_an_engine_that_sleeps_by_itself(self, connected: Connected) -> None:
        trainer, engine, sender = connected
        engine.receiver.show_asleep(2)
        destroy(engine.model)
        assert engine.events == []
        with pytest.raises(ws.UpdateConflictError, match="sleeps"):
            sender.send_weights()
        engine.receiver.show_awake(["weights"])
        sender.send_weights()
        assert equal(trainer, engine.model)
        assert not engine.is_served()
        engine.receiver.show_awake()
        assert engine.is_served()

    def test_readers_are_waited_for(self, connected: Connected) -> None:
        _, engine, _ = connected
        inside, leave = threading.Event(), threading.Event()

        def reads() -> None:
            with engine.receiver.reading():
                inside.set()
                assert leave.wait(30)
                assert engine.events == []

        threads = [
            threading.Thread(target=reads),
            threading.Thread(target=engine.receiver.sleep, args=(2,)),
        ]
        threads[0].start()
        assert inside.wait(30)
        threads[1].start()
        leave.set()
        for thread in threads:
            thread.join(30)
        assert engine.events == ["sleep 2"]

    def test_pause_and_resume_of_a_request(self) -> None:
        seen: list[str] = []
        receiver = ws.WeightReceiver(
            Model(),
            on_pause=lambda mode: seen.append(f"pause {mode}"),
            on_resume=lambda: seen.append("resume"),
            on_sleep=lambda level: seen.append(f"sleep {level}"),
        )
        receiver.dispatch(SleepRequest(level=1, mode="wait"))
        assert seen == ["pause wait", "sleep 1", "resume"]
        receiver.dispatch(WakeRequest())
        receiver.dispatch(SleepRequest(level=0))
        assert receiver.paused
        assert not receiver.asleep
        receiver.dispatch(WakeRequest(tags=["scheduling"]))
        assert seen[3:] == ["pause abort", "resume"]
        assert not receiver.paused


class TestNobodyGetsWhatIsGone:
    """Neither a receiver that joins or fetches, nor a checksum, nor the next delta."""

    @pytest.mark.parametrize("gone", ["asleep", "awake", "discarded"])
    def test_a_fetch(self, connected: Connected, gone: str) -> None:
        _, engine, _ = connected
        self._lose(engine, gone)
        late = Model(7)
        before = {name: tensor.clone() for name, tensor in late.state_dict().items()}
        with pytest.raises(ws.NotReadyError):
            ws.fetch(late, [engine.receiver])
        for name, tensor in late.state_dict().items():
            assert torch.equal(tensor, before[name])

    @staticmethod
    def _lose(engine: Engine, gone: str) -> None:
        if gone == "discarded":
            destroy(engine.model)
            engine.receiver.discarded()
            return
        engine.receiver.sleep(2)
        if gone == "awake":
            engine.receiver.wake_up()

    @pytest.mark.parametrize("gone", ["asleep", "awake", "discarded"])
    def test_checksums(self, connected: Connected, gone: str) -> None:
        _, engine, _ = connected
        self._lose(engine, gone)
        with pytest.raises(ws.NotReadyError):
            engine.receiver.dispatch(CheckRequest())

    @pytest.mark.parametrize("gone", ["awake", "discarded"])
    def test_one_that_joins_a_fleet_of_which_one_lost_them(self, gone: str) -> None:
        trainer, engines, late = Model(), [Engine(1), Engine(2)], Model(7)
        with ws.connect(trainer, to=[engine.receiver for engine in engines]) as sender:
            sender.send_weights()
            own = {name: tensor.clone() for name, tensor in late.state_dict().items()}
            for engine in engines:
                self._lose(engine, gone)
            small_change(trainer)  # the source cannot send that version any more
            receiver = ws.WeightReceiver(late)
            with pytest.raises(ws.WeightSyncError):
                sender.add(receiver)
            assert receiver.version == 0
            assert all(torch.equal(t, own[n]) for n, t in late.state_dict().items())
            sender.send_weights()
            for engine in engines:
                assert equal(trainer, engine.model)

    def test_one_that_joins_gets_them_from_the_other(self) -> None:
        trainer, engines, late = Model(), [Engine(1), Engine(2)], Model(7)
        with ws.connect(trainer, to=[engine.receiver for engine in engines]) as sender:
            sender.send_weights()
            engines[0].receiver.sleep(2)
            engines[0].receiver.wake_up()
            receiver = ws.WeightReceiver(late)
            report = sender.add(receiver)
            assert report is not None
            assert equal(trainer, late)
            with receiver.reading() as version:
                assert version == 1

    @pytest.mark.parametrize("how", ["sleep", "discarded"])
    @pytest.mark.parametrize("at", [InitRequest, UpdateRequest, FinishRequest])
    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_weights_that_go_in_the_middle_of_a_fetch(
        self, how: str, at: type[Request], moment: str
    ) -> None:
        """It has the whole version afterwards, or what it had, or refuses. Never something else."""
        trainer, engine, late = Model(), Engine(), Model(7)
        before = {name: tensor.clone() for name, tensor in late.state_dict().items()}
        receiver = ws.WeightReceiver(late)
        dispatch = receiver.dispatch
        threads: list[threading.Thread] = []

        def lose() -> None:
            if how == "sleep":
                engine.receiver.sleep(2)
            else:
                destroy(engine.model)
                engine.receiver.discarded()

        def watched(request: Request) -> Reply:
            if not isinstance(request, at) or threads:
                return dispatch(request)
            threads.append(threading.Thread(target=lose))
            if moment == "before":
                threads[0].start()
                threads[0].join(3)  # a sleep waits until this fetch has ended
                return dispatch(request)
            try:
                return dispatch(request)
            finally:
                threads[0].start()
                threads[0].join(3)

        receiver.dispatch = watched  # type: ignore[method-assign]
        with ws.connect(trainer, to=engine.receiver) as sender:
            sender.send_weights()
            try:
                ws.fetch(receiver, [engine.receiver], timeout_s=20)
                assert equal(trainer, late)
            except ws.WeightSyncError:
                same = all(torch.equal(t, before[n]) for n, t in late.state_dict().items())
                assert same or equal(trainer, late)
                assert same == (receiver.version == 0)
            threads[0].join(30)
            assert not threads[0].is_alive()
            assert engine.status.discarded
            assert not engine.is_served()

    def test_a_finish_that_is_repeated(self, connected: Connected) -> None:
        """The reply is that of the commit, which was; nothing else says that they are there."""
        _, engine, _ = connected
        update_id = engine.status.last_finished
        engine.receiver.sleep(2)
        engine.receiver.wake_up()
        engine.receiver.dispatch(FinishRequest(update_id=update_id))
        assert engine.status.discarded
        assert not engine.is_served()

    @pytest.mark.parametrize("delta", ["auto", "always"])
    def test_the_next_update_is_whole_though_nothing_changed(self, delta: Any) -> None:
        trainer, engine = Model(), Engine()
        with ws.connect(trainer, to=engine.receiver, delta=delta) as sender:
            sender.send_weights()
            sender.send_weights()
            engine.receiver.sleep(2)
            report = sender.send_weights(wake=True)
            assert report.delta is None or not report.delta.sent
            assert equal(trainer, engine.model)

    def test_a_server_of_which_one_worker_sleeps(self) -> None:
        engines = [Engine(1), Engine(2)]
        workers = Workers({f"workers/{k}": engine.receiver for k, engine in enumerate(engines)})
        engines[1].receiver.sleep(2)
        status = workers.status()
        assert status.asleep == ["weights", "kv_cache"]
        assert (status.state, status.may_generate, status.discarded) == ("TORN", False, True)
        reply = workers.dispatch(WakeRequest())
        assert isinstance(reply, Status)
        assert reply.asleep == []
        assert not reply.may_generate
        workers.dispatch(SleepRequest(level=1))
        assert [engine.status.sleep_level for engine in engines] == [1, 1]
        workers.close()


class TestGpuMemory:
    """On tensors of the host: what it does is the same, but for the addresses."""

    @pytest.mark.parametrize("keep", [True, False])
    def test_tensors_and_views_stay(self, keep: bool) -> None:
        base = torch.arange(4096, dtype=torch.float32)
        view, other = base[1024:].view(3, 1024), torch.ones(7)
        memory = GpuMemory()
        memory.fall_asleep([base, view], keep=keep)
        assert base.untyped_storage().nbytes() == 0
        assert torch.equal(other, torch.ones(7))
        memory.wake_up()
        memory.wake_up()
        assert base.untyped_storage().nbytes() == 4096 * 4
        assert view.data_ptr() == base[1024:].data_ptr()
        if keep:
            assert torch.equal(base, torch.arange(4096, dtype=torch.float32))
        base.fill_(2)
        assert bool((view == 2).all())

    def test_a_module_of_which_the_memory_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer, server = Model(), Model(1)
        receiver = ws.WeightReceiver(server, apply="in_place")
        sink = receiver.sink
        assert isinstance(sink, ws.ModuleSink)
        tensors = list(server.state_dict().values())
        with ws.connect(trainer, to=receiver) as sender:
            sender.send_weights()
            for keep in (True, False):
                monkeypatch.setattr(sink, "fall_asleep", _moves(sink, tensors, keep=keep))
                receiver.sleep(1 if keep else 2)
                assert tensors[0].untyped_storage().nbytes() == 0
                small_change(trainer)
                sender.send_weights(wake=True)
                assert equal(trainer, server)


def _moves(sink: Any, tensors: list[torch.Tensor], *, keep: bool) -> Callable[[int], None]:
    def fall_asleep(level: int) -> None:
        sink._gpu_memory.fall_asleep(tensors, keep=keep)

    return fall_asleep


def test_a_peer_that_does_not_know_the_calls(connected: Connected) -> None:
    """One that never says that it sleeps is never sent them."""
    trainer, engine, sender = connected
    handle, calls = engine.receiver.handle, list[object]()

    def noted(message: Mapping[str, object]) -> dict[str, object]:
        calls.append(message["call"])
        return handle(message)

    with ws.connect(trainer, to=noted, takeover=True) as other:
        other.send_weights(rewind=True, wake=True)
    assert "wake_up" not in calls
    assert sender.version == 1
