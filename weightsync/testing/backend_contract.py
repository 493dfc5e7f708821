"""The contract of backends as pytest tests: subclass BackendContract, name a backend, run pytest.

Updates go through `weightsync.connect` to real receivers. Where a process is killed or stopped, it
is a child of this one.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from multiprocessing.context import BaseContext
from typing import Any, ClassVar

import pytest
import torch

from weightsync.backends.base import TrainerWeightTransferEngine, WeightTransferEngine
from weightsync.errors import (
    ProtocolError,
    VerificationError,
    WeightSyncError,
)
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender
from weightsync.testing.contract_processes import (
    BUCKET_NBYTES,
    SLACK_S,
    BackendOfTest,
    Buffers,
    Child,
    ContractModel,
    EndingSink,
    Pipe,
    PlantedError,
    ReceiverUnderTest,
    SocketTransport,
    Source,
    Task,
    await_ready,
    bits,
    connect_by,
    every_dtype,
    fail,
    known_backend,
    receiving,
    run_measurement,
    run_receiver,
    run_trainer,
    send_and_fail,
    serving,
    watch_engines,
    within,
)
from weightsync.update.lifecycle import ApplyChoice


class BackendContract:
    """The tests that every backend has to pass. A subclass, called Test…, names the `backend`.

    - `backend`: a registered name, a Backend class, or an instance that can be pickled. It has room
      for two readers, at least.
    - `options`: further arguments of every `connect`, for instance `{"packed": True}`.
    - `timeout_s`: the timeout of every sender; a failure is noticed within 1.2 times this.
    - `streams`: whether the trainer's engine reads a source that makes its tensors while receivers
      wait (in `transfer`), and not before the update message (in `begin`).
    - `context`: how child processes are started.
    - `corrupt(monkeypatch)` flips a bit of a tensor on its way, in every update.
    """

    backend: ClassVar[BackendOfTest]
    options: ClassVar[Mapping[str, Any]] = {}
    timeout_s: ClassVar[float] = 3.0
    streams: ClassVar[bool] = True
    context: ClassVar[BaseContext] = multiprocessing.get_context("spawn")

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flip a bit of a tensor on its way, after the trainer made its fingerprint.

        In every update until `monkeypatch` is undone; the source itself must not change.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement corrupt(), which flips a bit"
        )

    def connect(self, source: object, to: object, **more: Any) -> WeightSender:
        """Return a sender of `source` by this backend."""
        return connect_by(self.backend, source, to, self._options(more))

    # Whole models

    def test_every_dtype_arrives_bit_for_bit(self) -> None:
        sent = every_dtype(seed=1)
        held = Buffers(every_dtype(seed=2))
        with receiving(held) as receiver, self.connect(sent, receiver.handle) as sender:
            assert bits(held) != bits(sent)
            sender.send_weights()
            assert bits(held) == bits(sent)

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    @pytest.mark.parametrize("kind", ["module", "hook"])
    def test_updates_follow_each_other(self, kind: str, apply: ApplyChoice) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            target = stack.enter_context(ReceiverUnderTest.taken(kind, apply))
            sender = stack.enter_context(self.connect(model, target.receiver.handle))
            for version in (1, 2, 3):
                report = sender.send_weights()
                assert target.holds(model)
                assert target.receiver.version == version
                assert report.verified in ("arrived", "held")
                assert report.apply == apply
                assert report.nbytes == sum(p.nbytes for p in model.parameters())
                model.step()

    def test_tensors_are_cast_on_the_way(self) -> None:
        model = ContractModel(1)
        with ReceiverUnderTest.taken("hook", "staged") as target:
            with self.connect(model, target.receiver.handle, dtype=torch.bfloat16) as sender:
                sender.send_weights()
            assert target.bits == bits(model.to(torch.bfloat16))

    def test_several_receivers_hold_the_same(self) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            kinds: list[tuple[str, ApplyChoice]] = [
                ("module", "staged"),
                ("module", "in_place"),
                ("hook", "staged"),
            ]
            targets = [stack.enter_context(ReceiverUnderTest.taken(*kind)) for kind in kinds]
            handles = [target.receiver.handle for target in targets]
            sender = stack.enter_context(self.connect(model, handles[: self._most_readers()]))
            for _ in range(2):
                report = sender.send_weights()
                assert len(report.receivers) == min(self._most_readers(), len(targets))
                assert all(target.holds(model) for target in targets[: self._most_readers()])
                model.step()

    def test_receivers_join_and_leave(self) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            first, second = (stack.enter_context(ReceiverUnderTest.taken()) for _ in range(2))
            sender = stack.enter_context(self.connect(model, first.receiver.handle))
            sender.send_weights()
            sender.add(second.receiver.handle)
            assert second.holds(model)
            model.step()
            sender.send_weights()
            assert first.holds(model)
            assert second.holds(model)
            old = bits(model)
            sender.remove(sender.targets[0])
            model.step()
            sender.send_weights()
            assert first.bits == old
            assert second.holds(model)

    def test_memory_is_released_and_made_again(self) -> None:
        model = ContractModel(1)
        with (
            ReceiverUnderTest.taken() as target,
            self.connect(model, target.receiver.handle) as sender,
        ):
            sender.send_weights()
            sender.release()
            model.step()
            sender.send_weights()
            assert target.holds(model)

    def test_memory_that_a_hook_keeps_is_not_reused(self) -> None:
        """An engine may give a hook views instead, where keeping one is an error."""
        model, kept = ContractModel(1), dict[str, torch.Tensor]()

        def keep_the_first(pairs: Any) -> None:
            for name, tensor in pairs:
                kept.setdefault(name, tensor)

        with ExitStack() as stack:
            receiver = WeightReceiver(keep_the_first, apply="in_place")
            stack.enter_context(closing(receiver))
            sender = stack.enter_context(self.connect(model, receiver.handle))
            try:
                sender.send_weights()
            except WeightSyncError:
                return
            sent = bits(model)
            for _ in range(3):
                model.step()
                sender.send_weights()
            assert bits(kept) == sent, "memory that the hook keeps was reused"

    # Parts of models

    def test_a_subset_changes_nothing_else(self) -> None:
        model, change = ContractModel(1), torch.full((64, 64), 7.0)
        with (
            ReceiverUnderTest.taken() as target,
            self.connect(model, target.receiver.handle) as sender,
        ):
            sender.send_weights()
            with sender.update(partial=True) as update:
                update.send([("layers.3", change)])
            with torch.no_grad():
                model.layers[3].copy_(change)
            assert target.holds(model)
            assert target.receiver.version == 2
            model.step()
            sender.send_weights()
            assert target.holds(model)

    def test_a_model_in_several_messages(self) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            targets = [
                stack.enter_context(ReceiverUnderTest.taken(kind)) for kind in ("module", "hook")
            ]
            handles = [target.receiver.handle for target in targets]
            sender = stack.enter_context(self.connect(model, handles))
            sender.send_weights()
            model.step()
            pairs = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
            old = [target.bits for target in targets]
            with sender.update() as update:
                for start in range(0, len(pairs), 8):
                    update.send(pairs[start : start + 8])
                assert [target.bits for target in targets] == old
            assert all(target.holds(model) for target in targets)

    # Aborts

    def test_a_source_that_fails_in_the_middle(self) -> None:
        source = Source(ContractModel(1))
        with ExitStack() as stack:
            target = stack.enter_context(ReceiverUnderTest.taken())
            # Only the abort can end the wait of the receiver's engine in time.
            patient = self.connect(source, target.receiver.handle, timeout_s=10 * self.timeout_s)
            sender = stack.enter_context(patient)
            sender.send_weights()
            old = target.bits
            source.model.step()
            source.act = fail
            with within(self.timeout_s), pytest.raises(PlantedError):
                sender.send_weights()
            await_ready(target.receiver, self.timeout_s)
            assert target.bits == old
            sender.send_weights()
            assert target.holds(source.model)

    def test_a_block_that_fails_in_the_middle(self) -> None:
        model = ContractModel(1)
        with (
            ReceiverUnderTest.taken() as target,
            self.connect(model, target.receiver.handle) as sender,
        ):
            sender.send_weights()
            old = target.bits
            with within(self.timeout_s), pytest.raises(PlantedError):
                send_and_fail(sender)
            await_ready(target.receiver, self.timeout_s)
            assert target.bits == old
            model.step()
            sender.send_weights()
            assert target.holds(model)

    def test_a_receiver_that_aborts_does_not_wait_for_the_rest(self) -> None:
        """The source blocks in the middle of an update, and the receiver gets an abort."""
        source = Source(ContractModel(1))
        states: list[str] = []
        with ExitStack() as stack:
            target = stack.enter_context(ReceiverUnderTest.taken())
            # Only the abort can end the wait of the receiver's engine in time.
            patient = self.connect(source, target.receiver.handle, timeout_s=10 * self.timeout_s)
            sender = stack.enter_context(patient)
            sender.send_weights()
            old = target.bits

            def abort() -> None:
                deadline = time.monotonic() + 1.0
                while time.monotonic() < deadline and not target.receiver.status().busy:
                    time.sleep(0.01)
                status = target.receiver.status()
                states.append(status.state)
                message = {"call": "abort_weight_update", "body": {"update_id": status.update_id}}
                reply = target.receiver.handle(message) if status.update_id else {"state": "READY"}
                states.append(str(reply["state"]))

            source.act = abort
            source.model.step()
            if self.streams:
                with within(self.timeout_s), pytest.raises(WeightSyncError):
                    sender.send_weights()
                assert states == ["UPDATING", "READY"]
                assert target.bits == old
            else:
                sender.send_weights()
                assert states == ["READY", "READY"], "no update was open; set streams = True"
            sender.send_weights()
            assert target.holds(source.model)

    # Verification

    @pytest.mark.parametrize("kind", ["module", "hook"])
    def test_a_flipped_bit_is_found(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = ContractModel(1)
        with (
            ReceiverUnderTest.taken(kind) as target,
            self.connect(model, target.receiver.handle) as sender,
        ):
            sender.send_weights()
            old = target.bits
            model.step()
            with monkeypatch.context() as patch:
                self.corrupt(patch)
                with pytest.raises(VerificationError) as caught:
                    sender.send_weights()
                assert set(caught.value.names) <= set(old)
                assert caught.value.names
                assert target.bits == old
                # The fault is real: unverified it reaches the weights in use.
                sender.verify = False
                assert sender.send_weights().verified == "none"
                assert target.bits.keys() == old.keys()
                assert not target.holds(model), "corrupt() flips no bit"
            sender.verify = True
            sender.send_weights()
            assert target.holds(model)

    def test_a_hook_is_given_no_flipped_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hook that loads in place cannot restore the former weights."""
        model = ContractModel(1)
        with ExitStack() as stack:
            target = stack.enter_context(ReceiverUnderTest.taken("hook", "in_place"))
            sender = stack.enter_context(self.connect(model, target.receiver.handle))
            with monkeypatch.context() as patch:
                self.corrupt(patch)
                with pytest.raises(VerificationError):
                    sender.send_weights()
            sent = bits(model)
            assert {name: sent[name] for name in target.bits} == target.bits
            sender.send_weights()
            assert target.holds(model)

    # Processes that die or stop

    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_receiver_is_lost_in_the_middle(self, end: signal.Signals) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            victim = stack.enter_context(self._child(run_receiver, end=end))
            living = stack.enter_context(ReceiverUnderTest.taken())
            to = [SocketTransport(victim.address, "victim"), living.receiver.handle]
            sender = stack.enter_context(self.connect(model, to))
            sender.send_weights()
            old = living.bits
            model.step()
            with within(1.2 * self.timeout_s), pytest.raises(WeightSyncError):
                sender.send_weights()
            assert victim.has_met(end)
            assert living.bits == old
            with within(2.4 * self.timeout_s):
                sender.remove("victim")
                sender.send_weights()
            assert living.holds(model)

    @pytest.mark.parametrize(
        ("end", "while_"),
        [
            (signal.SIGKILL, "it sends"),
            (signal.SIGKILL, "the receiver loads"),
            (signal.SIGSTOP, "it sends"),
        ],
    )
    def test_a_trainer_is_lost_in_the_middle(self, end: signal.Signals, while_: str) -> None:
        model = ContractModel(3)
        with ExitStack() as stack:
            sink = EndingSink(ContractModel(2))
            receiver = stack.enter_context(receiving(sink))
            address = stack.enter_context(serving(receiver))
            own = end if while_ == "it sends" else None
            trainer = stack.enter_context(self._child(run_trainer, end=own, to=address))
            if own is None:
                sink.end = lambda: trainer.send(end)
            trainer.await_end(end)
            # A stopped process lives: only the deadline ends the wait for it.
            if end == signal.SIGSTOP:
                await_ready(receiver, 1.2 * self.timeout_s + SLACK_S)
            assert receiver.version == 1
            assert bits(sink.module) == bits(ContractModel(1))
            takes_over = end == signal.SIGSTOP
            with (
                within(1.2 * self.timeout_s),
                self.connect(model, receiver.handle, takeover=takes_over) as sender,
            ):
                sender.send_weights()
            assert bits(sink.module) == bits(model)
            assert receiver.status().state == "READY"

    # Leaks

    def test_nothing_is_left_after_200_updates(self) -> None:
        with self._child(run_measurement) as child:
            grown = child.result()
        assert grown == {"shm": [], "fds": 0, "threads": 0, "rss_mib": 0}

    def test_ends_may_come_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, made = ContractModel(1), watch_engines(monkeypatch, known_backend(self.backend))
        with ReceiverUnderTest.taken() as target:
            sender = self.connect(model, target.receiver.handle)
            sender.send_weights()
            sender.close()
            sender.close()
            target.receiver.close()
            target.receiver.close()
            trainers = [e for e in made if isinstance(e, TrainerWeightTransferEngine)]
            receivers = [e for e in made if isinstance(e, WeightTransferEngine)]
            assert trainers
            assert receivers
            for engine in trainers:
                engine.close()
            for opened in receivers:
                opened.shutdown()
                assert not opened.sender_alive()
            fresh = known_backend(self.backend).receiver_engine(
                target.receiver.status().device_keys
            )
            fresh.shutdown()
            fresh.shutdown()
            assert not fresh.sender_alive()
            assert target.holds(model)

    def test_a_payload_from_elsewhere_is_refused(self) -> None:
        """A damaged message is a ProtocolError, and opens no connection."""
        offers: list[Any] = []
        with ReceiverUnderTest.taken() as target:

            def listen(message: Mapping[str, Any]) -> object:
                if (message["body"].get("init_info") or {}).get("backend"):
                    offers.append(message)
                return target.receiver.handle(message)

            sender = self.connect(ContractModel(1), listen)
            sender.close()
            offered = offers[-1]["body"]["init_info"]
            fields = offered["payload"] if isinstance(offered["payload"], dict) else {}
            # A value of another type than the field has; None tells no type.
            damaged = [
                {**fields, name: 1 if isinstance(value, str) else "damaged"}
                for name, value in fields.items()
                if value is not None
            ]
            for payload in [7, *damaged] if offered["payload"] is not None else []:
                info = {**offered, "payload": payload, "sender": "other"}
                with pytest.raises(ProtocolError):
                    target.receiver.handle({**offers[-1], "body": {"init_info": info}})
            assert "other" not in target.receiver.status().senders

    def _most_readers(self) -> int:
        most = known_backend(self.backend).max_readers
        return 3 if most is None else min(most, 3)

    def _options(self, more: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "timeout_s": self.timeout_s,
            "bucket_nbytes": BUCKET_NBYTES,
            "num_buckets": 2,
        }
        return {**defaults, **self.options, **more}

    def _child(
        self, work: Callable[[Pipe, Task], None], *, end: int | None = None, to: str = ""
    ) -> Child:
        known_backend(self.backend)  # for receivers of this process, too
        return Child(self.context, work, Task(self.backend, self._options({}), end, to))
