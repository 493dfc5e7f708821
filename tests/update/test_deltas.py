"""Deltas: only changed lines are sent, and every receiver still holds what the trainer has."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.backends.ipc import backend as ipc
from weightsync.errors import install_hint
from weightsync.tensors import as_bytes
from weightsync.update import deltas, incoming
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.deltas import change_log as delta
from weightsync.weights.deltas import coding as delta_coding
from weightsync.weights.deltas.change_log import ChangeLog, DeltaSource
from weightsync.weights.lines import memory as lines
from weightsync.weights.lines import spot_check

Call = Callable[[Mapping[str, object]], dict[str, object]]


class Model(nn.Module):
    p0: nn.Parameter
    p1: nn.Parameter
    p3: nn.Parameter
    p4: nn.Parameter
    steps: torch.Tensor

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for i, shape in enumerate([(300, 64), (64,), (7, 33), (513, 65), (1,), (64, 64, 3)]):
            weight = torch.randn(shape, generator=random).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(weight, requires_grad=False))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


def change(model: Model, step: int, share: float = 0.01) -> None:
    random = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            count = max(1, int(share * flat.numel()))
            flat[torch.randint(flat.numel(), (count,), generator=random)] += 0.5
        model.steps += 1


def equal(sent: nn.Module, held: nn.Module) -> bool:
    theirs = held.state_dict()
    return all(torch.equal(t.to(theirs[n].dtype), theirs[n]) for n, t in sent.state_dict().items())


@pytest.fixture
def compiled() -> None:
    """No thread of a test before compiles: numba would keep what it compiles without its module."""
    for thread in threading.enumerate():
        if thread.name in {"weightsync-compile", "weightsync-catch-up"}:
            thread.join(300)


@pytest.fixture
def no_numba(compiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has no numba."""
    monkeypatch.setitem(sys.modules, "numba", None)
    lines._compiled.cache_clear()
    yield
    monkeypatch.undo()
    lines._compiled.cache_clear()


@pytest.fixture
def broken_numba(compiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Numba is installed, and the loops do not compile, which their first use shows."""
    module = "weightsync.weights.lines.numba_kernels"
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr("weightsync.weights.lines.numba_kernels", raising=False)
    lines._compiled.cache_clear()
    yield
    monkeypatch.undo()
    lines._compiled.cache_clear()


@pytest.fixture
def first_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of each tensor that is read before a delta is its first one."""
    choose = spot_check.TensorPlaces.choose
    monkeypatch.setattr(spot_check.TensorPlaces, "choose", lambda *args: choose(*args) * 0)


def sent(report: ws.SyncReport) -> bool:
    assert report.delta is not None
    return report.delta.sent


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("swap", ["pointer", "copy"])
@pytest.mark.parametrize("packed", [None, True])
def test_a_chain_of_deltas_is_the_trainers_model(
    apply: str, swap: Any, packed: bool | None
) -> None:
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(ws.ModuleSink(server, swap=swap), apply=apply)  # type: ignore[arg-type]
    with ws.connect(trainer, to=receiver, delta="always", packed=packed) as sender:
        kinds = []
        for step in range(12):
            report = sender.send_weights()
            kinds.append(sent(report))
            assert equal(trainer, server), step
            assert report.verified == "held"
            assert receiver.version == report.version == step + 1
            change(trainer, step)
        assert kinds == [False, *[True] * 11]
        assert report.delta is not None
        assert report.delta.lines > 0
        assert report.delta.share < 1
        assert report.nbytes == sum(t.nbytes for t in trainer.state_dict().values())


@pytest.mark.usefixtures("no_numba")
def test_deltas_that_are_asked_for_without_numba_are_refused_at_once() -> None:
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(server)
    with pytest.raises(ws.MissingExtraError, match=re.escape(install_hint("delta"))):
        ws.connect(trainer, to=receiver, delta="always")
    assert receiver.version == 0
    with ws.connect(trainer, to=receiver) as sender:
        for step in range(3):
            change(trainer, step)
            report = sender.send_weights()
            assert equal(trainer, server)
            assert report.verified == "held"
            assert not sent(report)


class Always(ws.ModuleSink):
    """A sink whose load targets take deltas, as far as they know themselves."""

    def open_target(self, layout: Any, apply: Any) -> Any:
        target = super().open_target(layout, apply)
        target.takes_deltas = True
        return target


@pytest.mark.parametrize("sink", [ws.ModuleSink, Always])
def test_a_receiver_without_numba_gets_whole_models(
    sink: type[ws.ModuleSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "may_have_kernels", lambda: False)  # asked by receivers only
    trainer, server = Model(), Model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(sink(server)), delta="always") as sender:
        for step in range(3):
            change(trainer, step)
            report = sender.send_weights()
            assert equal(trainer, server)
            assert report.verified == "held"
            assert report.delta is not None
            assert "takes no deltas" in report.delta.reason


@pytest.mark.usefixtures("broken_numba")
def test_loops_that_do_not_compile_make_whole_models(caplog: pytest.LogCaptureFixture) -> None:
    trainer, server = Model(), Model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
        for step in range(3):
            change(trainer, step)
            report = sender.send_weights()
            assert equal(trainer, server)
            assert report.verified == "held"
            assert report.delta is not None
            assert not report.delta.sent
            if step:
                assert re.search("numba cannot be used|takes no deltas", report.delta.reason)
    assert caplog.text.count("numba cannot be used") == 1


def test_sizes_are_those_of_the_changes() -> None:
    trainer, server = Model(), Model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
        sender.send_weights()
        with torch.no_grad():
            trainer.p0[5, 3] += 1
        report = sender.send_weights()
        assert report.delta is not None
        assert (report.delta.sent, report.delta.lines) == (True, 1)
        assert "a delta of" in str(report)
        unchanged = sender.send_weights()
        assert unchanged.delta is not None
        assert (unchanged.delta.sent, unchanged.delta.lines) == (True, 0)
        assert equal(trainer, server)


def test_a_cast_source_finds_what_changed_after_the_cast() -> None:
    trainer, server = Model(dtype=torch.float32), Model(1)
    receiver = ws.WeightReceiver(server)
    with ws.connect(trainer, to=receiver, dtype=torch.bfloat16, delta="always") as sender:
        sender.send_weights()
        with torch.no_grad():
            trainer.p0.mul_(1 + 1e-6)
            trainer.p3[2] += 1
        report = sender.send_weights()
        assert report.delta is not None
        assert report.delta.sent
        assert report.delta.lines <= 16
        for step in range(4):
            change(trainer, step)
            assert sent(sender.send_weights())
            assert equal(trainer, server)


def test_a_callable_and_tied_names() -> None:
    trainer, server = Model(), Model(1)
    server.also = server.p0
    trainer.also = trainer.p0
    with ws.connect(
        lambda: iter(list(trainer.named_parameters()) + list(trainer.named_buffers())),
        to=ws.WeightReceiver(server),
        delta="always",
    ) as sender:
        for step in range(4):
            assert sent(sender.send_weights()) == (step > 0)
            assert equal(trainer, server)
            change(trainer, step)


class TestHooks:
    @pytest.mark.parametrize("changed_only", [False, True])
    def test_a_staged_hook_is_given_all_or_what_changed(self, *, changed_only: bool) -> None:
        trainer = Model()
        held: dict[str, torch.Tensor] = {}
        given: list[list[str]] = []

        def load(pairs: Any) -> None:
            given.append([name for name, _ in pairs])
            held.update({name: tensor.clone() for name, tensor in pairs})

        receiver = ws.WeightReceiver(ws.HookSink(load, changed_only=changed_only), apply="staged")
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            sender.send_weights()
            with torch.no_grad():
                trainer.p3[0, 0] += 1
                trainer.p4.add_(1)
            assert sent(sender.send_weights())
            assert given[1] == (["p3", "p4"] if changed_only else given[0])
            for step in range(3):
                change(trainer, step)
                assert sent(sender.send_weights())
            assert all(torch.equal(t, held[n]) for n, t in trainer.state_dict().items())

    def test_a_hook_that_fails_is_healed_by_a_whole_update(self) -> None:
        trainer = Model()
        held: dict[str, torch.Tensor] = {}
        fails = False

        def load(pairs: Any) -> None:
            if fails:
                raise RuntimeError("no")
            held.update({name: tensor.clone() for name, tensor in pairs})

        receiver = ws.WeightReceiver(load, apply="staged")
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            sender.send_weights()
            fails = True
            change(trainer, 1)
            with pytest.raises(ws.WeightSyncError):
                sender.send_weights()
            fails = False
            assert not sent(sender.send_weights())
            assert all(torch.equal(t, held[n]) for n, t in trainer.state_dict().items())

    def test_a_hook_that_keeps_views_is_given_clones(self) -> None:
        trainer = Model()
        held: dict[str, torch.Tensor] = {}
        receiver = ws.WeightReceiver(ws.HookSink(held.update, keeps_views=True), apply="staged")
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            for step in range(4):
                assert sent(sender.send_weights()) == (step > 0)
                assert all(torch.equal(t, held[n]) for n, t in trainer.state_dict().items())
                change(trainer, step)

    def test_a_hook_in_place_is_sent_whole_models(self) -> None:
        trainer = Model()
        held: dict[str, torch.Tensor] = {}
        sink = ws.HookSink(held.update, keeps_views=True)
        receiver = ws.WeightReceiver(sink, apply="in_place")
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            for _ in range(2):
                report = sender.send_weights()
                assert report.delta is not None
                assert "takes no deltas" in report.delta.reason

    def test_a_hook_that_changes_what_it_is_given_gets_no_delta_after_that(self) -> None:
        trainer = Model()
        held: dict[str, torch.Tensor] = {}

        def load(pairs: Any) -> None:
            for name, tensor in pairs:
                if name == "p0":
                    tensor.mul_(2)
                held[name] = tensor.clone()

        receiver = ws.WeightReceiver(load, apply="staged")
        with ws.connect(trainer, to=receiver, delta="always") as sender:
            for step in range(4):
                assert not sent(sender.send_weights())
                assert torch.equal(held["p0"], trainer.p0 * 2)
                change(trainer, step)


class TestWholeAgain:
    """What does not fit a delta gets the whole model by itself, and the report says why."""

    def test_the_receiver_is_restarted(self) -> None:
        trainer, servers = Model(), [Model(1), Model(2)]
        receivers = [ws.WeightReceiver(server) for server in servers]
        at = 0

        def call(message: Mapping[str, object]) -> dict[str, object]:
            return receivers[at].handle(message)

        with ws.connect(trainer, to=call, delta="always") as sender:
            sender.send_weights()
            assert sent(sender.send_weights())
            at = 1
            change(trainer, 1)
            assert not sent(sender.send_weights())
            assert equal(trainer, servers[1])
            change(trainer, 2)
            assert sent(sender.send_weights())
            assert equal(trainer, servers[1])

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_weights_that_other_code_changed(self, apply: str) -> None:
        trainer, server = Model(), Model(1)
        with ws.connect(
            trainer,
            to=ws.WeightReceiver(server, apply=apply),  # type: ignore[arg-type]
            delta="always",
        ) as sender:
            sender.send_weights()
            assert sent(sender.send_weights())
            with torch.no_grad():
                server.p0.zero_()
            change(trainer, 1)
            report = sender.send_weights()
            assert not sent(report)
            assert report.delta is not None
            assert "a delta failed" in report.delta.reason
            assert equal(trainer, server)
            change(trainer, 2)
            assert sent(sender.send_weights())
            assert equal(trainer, server)

    def test_parameters_that_were_replaced(self) -> None:
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            for step in range(6):
                sender.send_weights()
                assert equal(trainer, server)
                change(trainer, step)
                if step == 2:
                    server.p0 = nn.Parameter(torch.zeros_like(server.p0), requires_grad=False)
                if step == 3:
                    trainer.p0 = nn.Parameter(torch.zeros_like(trainer.p0), requires_grad=False)
            assert sent(sender.send_weights())
            assert equal(trainer, server)

    @pytest.mark.parametrize("shape", [(8,), (0,), (3, 300, 64)])
    def test_a_parameter_of_another_shape(self, shape: tuple[int, ...]) -> None:
        """Its lines are not read: they would end elsewhere than its memory."""
        trainer, server = Model(), Model(seed=1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(trainer, to=receiver, delta="always", packed=True) as sender:
            sender.send_weights()
            sender.send_weights()
            kept, trainer.p0.data = trainer.p0.data, torch.ones(shape, dtype=torch.bfloat16)
            with pytest.raises(ws.ManifestMismatchError, match=r"p0: bfloat16\[300, 64\], now"):
                sender.send_weights()
            trainer.p0.data = kept
            change(trainer, 2)
            assert sent(sender.send_weights())
            assert equal(trainer, server)

    @pytest.mark.parametrize("kind", ["cast", "iterable"])
    @pytest.mark.parametrize("shape", [(8,), (0,), (3, 300, 64)])
    def test_a_tensor_that_is_made_of_another_shape(
        self, kind: str, shape: tuple[int, ...]
    ) -> None:
        trainer, server = Model(dtype=torch.float32), Model(seed=1)
        pairs = dict(trainer.state_dict())
        source: Any = trainer if kind == "cast" else pairs.items
        receiver = ws.WeightReceiver(server)
        with ws.connect(source, to=receiver, dtype=torch.bfloat16, delta="always") as sender:
            for _ in range(2):
                sender.send_weights()
            before = {name: tensor.clone() for name, tensor in server.state_dict().items()}
            for name in ("p0", "p5"):  # the first, and the last one
                kept = getattr(trainer, name).data
                getattr(trainer, name).data = pairs[name] = torch.ones(shape)
                with pytest.raises(ws.ManifestMismatchError, match=name):
                    sender.send_weights()
                getattr(trainer, name).data = pairs[name] = kept
            assert all(torch.equal(t, before[name]) for name, t in server.state_dict().items())
            change(trainer, 2)
            sender.send_weights()
            assert equal(trainer, server)

    @pytest.mark.parametrize(
        "spoil", [list.reverse, list.pop, lambda pairs: pairs.append(pairs[-1])]
    )
    def test_other_tensors_than_those_of_the_manifest(self, spoil: Any) -> None:
        trainer, server = Model(), Model(seed=1)
        pairs = list(trainer.state_dict().items())
        with ws.connect(
            lambda: list(pairs), to=ws.WeightReceiver(server), delta="always"
        ) as sender:
            for _ in range(2):
                sender.send_weights()
            kept = list(pairs)
            spoil(pairs)
            with pytest.raises(ws.ManifestMismatchError):
                sender.send_weights()
            pairs[:] = kept
            change(trainer, 2)
            sender.send_weights()
            assert equal(trainer, server)

    def test_a_write_through_a_tied_parameter(self) -> None:
        trainer, server = Model(), Model(1)
        trainer.also = trainer.p0
        server.also = nn.Parameter(server.p0.data, requires_grad=False)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            sender.send_weights()
            assert sent(sender.send_weights())
            with torch.no_grad():
                server.also[7] = 0
            assert not sent(sender.send_weights())
            assert equal(trainer, server)

    def test_views_of_older_weights_that_are_shared(self) -> None:
        """torch moves the memory of the copy that the next delta would be written to."""
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            for step in range(8):
                sender.send_weights()
                assert equal(trainer, server)
                kept = server.p0.detach()
                change(trainer, step)
                sender.send_weights()
                assert equal(trainer, server)
                kept.share_memory_()  # type: ignore[no-untyped-call]  # torch's
                change(trainer, step + 100)

    def test_weights_in_use_that_are_shared(self) -> None:
        """torch moves the memory that the next delta is made from."""
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            for step in range(8):
                sender.send_weights()
                assert equal(trainer, server)
                if step in (3, 5):
                    server.p3.detach().share_memory_()  # type: ignore[no-untyped-call]  # torch's
                change(trainer, step)

    def test_views_of_older_weights_change_in_updates_only(self) -> None:
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            sender.send_weights()
            change(trainer, 0)
            sender.send_weights()
            kept = server.p0.detach()
            before = kept.clone()
            change(trainer, 1)
            sender.send_weights()
            time.sleep(0.1)  # the thread that prepares memory would overwrite it
            assert torch.equal(kept, before)

    def test_a_receiver_that_refuses_each_of_them(self) -> None:
        """It is sent whole models for a while, since each refusal costs an attempt."""
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            reasons = []
            for step in range(16):
                report = sender.send_weights()
                assert report.delta is not None
                reasons.append(report.delta.reason)
                assert equal(trainer, server)
                server.steps += 1
                change(trainer, step)
            assert 3 <= sum("a delta failed" in reason for reason in reasons) <= 6
            for step in range(20):
                report = sender.send_weights()
                change(trainer, step)
            assert sent(report)

    @pytest.mark.usefixtures("first_lines")
    def test_a_write_that_torch_does_not_count_is_found_by_the_scrub(self) -> None:
        """It lies where the delta changes nothing."""
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always", scrub=1.0) as sender:
            sender.send_weights()
            assert sent(sender.send_weights())
            server.p3.data.view(torch.int16).numpy()[100, 3] ^= 1
            with torch.no_grad():
                trainer.p0[0, 0] += 1
            assert sent(sender.send_weights())  # into the other copy, which is whole
            assert equal(trainer, server)
            report = sender.send_weights()
            assert not sent(report)
            assert report.delta is not None
            assert "changed in memory" in report.delta.reason
            assert equal(trainer, server)

    @pytest.mark.usefixtures("first_lines")
    def test_the_scrub_goes_round_the_model(self) -> None:
        trainer, server = Model(), Model(1)
        with ws.connect(
            trainer, to=ws.WeightReceiver(server), delta="always", scrub=0.25
        ) as sender:
            sender.send_weights()
            assert sent(sender.send_weights())
            server.p3.data.view(torch.int16).numpy()[100, 3] ^= 1
            kinds = []
            for _ in range(9):
                with torch.no_grad():
                    trainer.p0[0, 0] += 1
                kinds.append(sent(sender.send_weights()))
            assert kinds.count(False) == 1
            assert equal(trainer, server)

    def test_a_partial_update_between(self) -> None:
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            sender.send_weights()
            assert sent(sender.send_weights())
            with sender.update(partial=True) as update:
                update.send([("p1", torch.ones(64).bfloat16())])
            assert torch.equal(server.p1, torch.ones(64).bfloat16())
            assert not sent(sender.send_weights())
            assert equal(trainer, server)
            change(trainer, 1)
            assert sent(sender.send_weights())
            assert equal(trainer, server)

    def test_another_sender_between(self) -> None:
        trainer, other, server = Model(), Model(5), Model(1)
        receiver = ws.WeightReceiver(server)
        with ws.connect(trainer, to=receiver, delta="always", yields=True) as sender:
            sender.send_weights()
            with ws.connect(other, to=receiver, yields=True, delta="always") as second:
                second.send_weights()
            assert equal(other, server)
            change(trainer, 1)
            assert not sent(sender.send_weights())
            assert equal(trainer, server)

    def test_a_rewind_is_a_delta_too(self) -> None:
        trainer, server = Model(), Model(1)
        with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
            sender.send_weights()
            saved = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
            for step in range(3):
                change(trainer, step)
                sender.send_weights()
            trainer.load_state_dict(saved)
            report = sender.send_weights(1, rewind=True)
            assert (sent(report), report.version) == (True, 1)
            assert equal(trainer, server)


class TestFleets:
    def test_a_receiver_that_missed_some_gets_what_it_lacks(self) -> None:
        trainer, servers = Model(), [Model(1), Model(2)]
        receivers = [ws.WeightReceiver(server) for server in servers]
        fails = False

        def second(message: Mapping[str, object]) -> dict[str, object]:
            if fails and message["call"] in ("update_weights", "finish_weight_update"):
                raise ws.TransportError("lost")
            return receivers[1].handle(message)

        with ws.connect(trainer, to=[receivers[0], second], delta="always") as sender:
            sender.send_weights()
            change(trainer, 0)
            assert sent(sender.send_weights())
            fails = True
            for step in range(1, 3):
                change(trainer, step)
                with pytest.raises(ws.WeightSyncError):
                    sender.send_weights()
            fails = False
            change(trainer, 3)
            report = sender.send_weights()
            assert sent(report)
            assert all(equal(trainer, server) for server in servers)
            assert report.delta is not None
            apart = 3 * report.delta.lines // 4  # the changes of three steps, few of them alike
            with torch.no_grad():
                trainer.p0[0, 0] += 1
            one = sender.send_weights().delta
            assert one is not None
            assert one.lines == 1 < apart

    def test_one_that_joins_gets_no_weights_that_changed_since(self) -> None:
        trainer, servers = Model(), [Model(1), Model(2)]
        first = ws.WeightReceiver(lambda _: None, apply="in_place")  # it has nothing to lend
        joining = ws.WeightReceiver(servers[1])
        with ws.connect(trainer, to=first) as sender:
            sender.send_weights()
            sender.send_weights()
            change(trainer, 1)
            with pytest.raises(ws.TransferError, match="changed since version 2"):
                sender.add(joining)
            assert joining.version == 0

    def test_one_that_joins_is_brought_up_to_date(self) -> None:
        trainer, servers = Model(), [Model(1), Model(2)]
        receivers = [ws.WeightReceiver(server) for server in servers]
        with ws.connect(trainer, to=receivers[0], delta="always") as sender:
            sender.send_weights()
            change(trainer, 0)
            assert sent(sender.send_weights())
            sender.add(receivers[1])
            assert equal(trainer, servers[1])
            for step in range(1, 4):
                change(trainer, step)
                sender.send_weights()
                assert all(equal(trainer, server) for server in servers)
            assert sent(sender.send_weights())


def test_auto_sends_small_models_whole() -> None:
    trainer, server = Model(), Model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(server)) as sender:
        sender.send_weights()
        report = sender.send_weights()
        assert report.delta is not None
        assert "is sent whole" in report.delta.reason


def test_auto_sends_whole_models_over_paths_that_are_faster_than_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deltas, "MIN_NBYTES", 0)
    monkeypatch.setattr(ipc, "SHARED_MEMORY_COST", ipc.CUDA_IPC_COST)
    with ws.connect(Model(0), to=ws.WeightReceiver(Model(1))) as sender:
        sender.send_weights()
        report = sender.send_weights()
    assert report.delta is not None
    assert report.delta.reason == "a whole model takes less time over shared_memory"


def test_off_says_nothing() -> None:
    trainer, server = Model(), Model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(server), delta="off") as sender:
        assert sender.send_weights().delta is None


@pytest.mark.parametrize("kind", ["sent as they are", "cast", "made"])
def test_auto_stops_where_too_much_changes(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("weightsync.update.deltas.MIN_NBYTES", 0)
    trainer, server = Model(dtype=torch.float32 if kind == "cast" else torch.bfloat16), Model(1)
    source: Any = (lambda: trainer.state_dict().items()) if kind == "made" else trainer
    dtype = torch.bfloat16 if kind == "cast" else None
    with ws.connect(source, to=ws.WeightReceiver(server), dtype=dtype, delta="auto") as sender:
        reasons = []
        for step in range(10):
            report = sender.send_weights()
            assert report.delta is not None
            reasons.append(report.delta.reason)
            assert equal(trainer, server)
            change(trainer, step, share=1.0)
        assert "" not in reasons
        if kind == "made":  # only an attempt shows it
            assert 1 < sum("deltas failed" in reason for reason in reasons) < 9
        else:
            assert all("of the lines changed" in reason for reason in reasons[1:])
        kinds = []
        for step in range(20):
            kinds.append(sent(sender.send_weights()))
            assert equal(trainer, server)
            change(trainer, step, share=0.0001)
        assert kinds[-1]


@pytest.mark.parametrize("moves", [False, True])
def test_what_changed_before_an_attempt_that_sent_nothing_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """The estimate is about the weights that were sent last, not those that were looked at last."""
    monkeypatch.setattr(deltas, "MIN_NBYTES", 0)
    trainer, server = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    one, other = trainer.get_parameter("0.weight"), trainer.get_parameter("1.weight")
    options: Any = {"delta": "auto", "packed": False, "check_finite": "raise"}
    with torch.no_grad(), ws.connect(trainer, to=ws.WeightReceiver(server), **options) as sender:
        assert [sent(sender.send_weights()) for _ in range(2)] == [False, True]
        for weight in (one, other):
            weight.add_(1)
        if moves:
            one.data, other.data = other.data, one.data
        else:
            one[0, 0] = torch.nan
            with pytest.raises(ws.VerificationError, match="NaN"):
                sender.send_weights()
            one[0, 0] = 1
        report = sender.send_weights()
        assert bool(report.connect_seconds) is moves
        assert report.delta is not None
        assert "of the lines changed" in report.delta.reason
        assert equal(trainer, server)


class Merged(ws.ModuleSource):
    """A source that makes all tensors but the first layer's of others than the module's."""

    def __init__(self, module: Model, added: torch.Tensor) -> None:
        self._added = added
        super().__init__(module, dtype=torch.bfloat16)

    def stable_tensors(self) -> None:
        return None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors():
            yield name, tensor + self._added if name == "p3" else tensor


def test_what_a_subclass_makes_is_not_estimated_from_the_modules_tensors() -> None:
    trainer, server, added = Model(dtype=torch.float32), Model(1), torch.zeros(513, 65)
    source = Merged(trainer, added)
    with ws.connect(source, to=ws.WeightReceiver(server), delta="always") as sender:
        for step in range(5):
            assert sent(sender.send_weights()) is (step > 0)
            assert torch.equal(server.p3, (trainer.p3 + added).bfloat16())
            added += 1


def test_after_an_estimate_that_was_too_low_there_is_room_for_all(
    sender_and_receiver: tuple[ws.WeightSender, Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, trainer, server = sender_and_receiver
    monkeypatch.setattr(
        "weightsync.weights.deltas.change_log.ChangeLog.changed_share", lambda *_: 0.0
    )
    came = []
    for step in range(3):
        change(trainer, step, share=1.0)
        came.append(sent(sender.send_weights()))
        assert equal(trainer, server)
    assert came == [False, True, False]


def test_a_change_while_a_delta_is_sent_is_an_error() -> None:
    """It is not sent again as a whole model, which would hide it."""
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(server)

    def call(message: Mapping[str, object]) -> dict[str, object]:
        if message["call"] == "update_weights" and receiver.version == 2:
            change(trainer, 9)
        return receiver.handle(message)

    with ws.connect(trainer, to=call, delta="always") as sender:
        sender.send_weights()
        before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        assert sent(sender.send_weights())
        with pytest.raises(ws.VerificationError, match="changed while it was sent"):
            sender.send_weights()
        assert receiver.version == 2
        assert all(torch.equal(tensor, server.state_dict()[n]) for n, tensor in before.items())


@pytest.fixture
def sender_and_receiver() -> Iterator[tuple[ws.WeightSender, Model, Model]]:
    trainer, server = Model(), Model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
        sender.send_weights()
        yield sender, trainer, server


def test_too_many_changes_for_the_estimate_are_sent_whole(
    sender_and_receiver: tuple[ws.WeightSender, Model, Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, trainer, server = sender_and_receiver
    assert StreamLayout(sender._group.manifest).nbytes // 64 > 1500
    change(trainer, 0, share=1.0)
    monkeypatch.setattr(
        "weightsync.weights.deltas.change_log.ChangeLog.changed_share", lambda *_: 0.0
    )
    report = sender.send_weights()
    assert not sent(report)
    assert report.delta is not None
    assert "lines have changed" in report.delta.reason
    assert equal(trainer, server)


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_resyncs_that_fail_give_no_id_to_other_weights(failures: int) -> None:
    trainer, server = Model(), Model(1)
    receiver = ws.WeightReceiver(server)
    with ws.connect(trainer, to=receiver, delta="always", scrub=0) as sender:
        for step in range(3):
            sender.send_weights()
            change(trainer, step)
        sender.send_weights()
        for step in range(failures):
            change(trainer, 10 + step, 0.05)
            with pytest.raises(ws.TransferError, match="have changed since version 4"):
                sender.resync(sender.targets[0])
        for step in range(12):
            assert sent(sender.send_weights())
            assert equal(trainer, server), step
            change(trainer, 100 + step)


class TestIdsOfWeights:
    """A weights id stands for one content of the source, or for none."""

    def log(self) -> tuple[Model, ChangeLog]:
        model = Model()
        return model, ChangeLog(StreamLayout(ws.ModuleSource(model).manifest))

    def record(self, log: ChangeLog, model: Model, weights_id: str) -> None:
        log.record(weights_id, ws.ModuleSource(model).tensors())

    def test_the_same_content_again_keeps_its_id(self) -> None:
        model, log = self.log()
        for _ in range(3):
            self.record(log, model, "one")
        self.record(log, model, "")
        assert log.knows("one")
        assert log.marks_since(["one"]) is None

    def test_another_content_takes_the_id_away_for_good(self) -> None:
        model, log = self.log()
        self.record(log, model, "base")
        self.record(log, model, "one")
        for step in range(4):
            change(model, step)
            self.record(log, model, "one")
            assert not log.knows("one")
            assert log.knows("base")
        self.record(log, model, "two")
        assert set(log.totals()) == {"base", "two"}
        for weights_id in ("two", "three", "one"):
            change(model, 7)
            self.record(log, model, weights_id)
        assert set(log.totals()) == {"base", "three"}
        log.forget()
        self.record(log, model, "one")
        assert not log.knows("one")

    def test_what_has_no_id_is_carried_by_the_next(self) -> None:
        model, log = self.log()
        self.record(log, model, "base")
        changed = lines.new_marks(lines.count_lines(log.layout))
        for step in range(3):
            with torch.no_grad():
                model.p0[step * 8, 0] += 1
            self.record(log, model, "")
        self.record(log, model, "next")
        marks = log.marks_since(["base"])
        assert marks is not None
        lines.mark(changed, np.array([0, 16, 32], np.uint32))
        assert (marks == changed).all()


def test_bad_choices_are_refused() -> None:
    receiver = ws.WeightReceiver(Model())
    for given in ({"delta": "yes"}, {"scrub": 2}, {"scrub": "all"}, {"delta": True}):
        with pytest.raises(ws.ConfigError):
            ws.connect(Model(), to=receiver, **given)


class TestCoded:
    """Deltas coded by value, as for slow paths."""

    def log(self, model: nn.Module) -> ChangeLog:
        source = ws.ModuleSource(model)
        log = ChangeLog(StreamLayout(source.manifest), keeps=True)
        log.record("base", source.tensors())
        return log

    def delta(self, log: ChangeLog, model: nn.Module, weights_id: str, base: str) -> DeltaSource:
        count = lines.count_lines(log.layout)
        return DeltaSource(log, ws.ModuleSource(model), weights_id, [base], count, by_value=True)

    def test_one_that_is_cut_off_leaves_no_stale_copy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(delta, "_BLOCK_LINES", 16)
        monkeypatch.setattr(delta, "SECTION_VALUES", 16)
        monkeypatch.setattr(delta, "_EARLY_NBYTES", 16)
        model = Model(0)
        log = self.log(model)
        change(model, 1)
        packets = self.delta(log, model, "cut off", "base").tensors()
        next(packets)
        packets.close()  # type: ignore[attr-defined]  # a generator
        log.record("whole", ws.ModuleSource(model).tensors())
        assert not log.knows("base")
        change(model, 2)
        made = list(self.delta(log, model, "next", "whole").tensors())
        assert made
        assert log._kept is not None
        held = log._kept.memory.tensors
        for tensor, flat in zip(model.state_dict().values(), held, strict=True):
            assert torch.equal(as_bytes(tensor), flat)

    def test_sparse_changes_before_dense_ones(self) -> None:
        """A section takes whole blocks of lines, whatever the number of their values."""
        model = nn.Module()
        model.first = nn.Parameter(torch.zeros(61_440 * 32, dtype=torch.bfloat16))
        model.then = nn.Parameter(torch.zeros(20_000 * 32, dtype=torch.bfloat16))
        log = self.log(model)
        with torch.no_grad():
            model.first[::32] = 1
            model.then.fill_(1)
        packets = [t.clone() for _, t in self.delta(log, model, "next", "base").tensors()]
        coded = b"".join(
            bytes(p[64 : 64 + int(p[8:16].view(torch.int64))].numpy()) for p in packets[:-1]
        )
        values = 0
        while coded:
            size = delta_coding.section_nbytes(coded)
            assert size is not None
            values += len(delta_coding.decode(coded[:size], 32 * 90_000).positions)
            coded = coded[size:]
        assert values == 61_440 + 20_000 * 32

    @pytest.mark.parametrize("changed", [1.0, 0.05])
    def test_changes_that_do_not_fit_are_not_coded_to_the_end(self, changed: float) -> None:
        """Of random values, most are coded in more bytes than they have."""
        sizes = torch.Generator().manual_seed(3)
        model = nn.Module()
        for i in range(16):
            random = torch.randn(1 << 18, generator=sizes).bfloat16()
            model.register_parameter(f"p{i}", nn.Parameter(random, requires_grad=False))
        log = self.log(model)
        for parameter in model.parameters():
            count = int(changed * parameter.numel())
            parameter[:count] = torch.randn(count, generator=sizes).bfloat16()
        read: list[str] = []

        class Counted(ws.ModuleSource):
            def stable_tensors(self) -> None:
                return None

            def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in super().tensors():
                    read.append(name)
                    yield name, tensor

        count = lines.count_lines(log.layout)
        made = DeltaSource(
            log, Counted(model), "next", ["base"], count, by_value=True, gives_up=True
        )
        if changed == 1.0:
            with pytest.raises(ws.DeltaError, match="more bytes coded"):
                list(made.tensors())
            assert 1 <= len(read) <= 4
        else:
            assert list(made.tensors())
            assert len(read) == 16
