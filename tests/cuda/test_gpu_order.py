"""The order between decode steps and updates on GPUs, on streams that stand in for a driver's.

What is tested is whom the code waits for, and when; tests/gpu/test_order.py has real streams.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.backends import base
from weightsync.cuda.wait import wait_for_all_streams
from weightsync.errors import TransferTimeout
from weightsync.update.gate import ReadWriteGate
from weightsync.weights.copying.copy_plan import DeviceCopyUnit
from weightsync.weights.copying.fused import settle
from weightsync.weights.sinks.module_sink import ModuleSink

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
TIMEOUT_S = 20.0


class Driver:
    """Two GPUs of which each thread sees its own current streams; work on them ends when told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.running: set[tuple[torch.device, int]] = set()
        self.capturing = False
        self._own = threading.local()

    def use(self, device: torch.device, number: int) -> None:
        """Make stream `number` of `device` this thread's current one."""
        self._own.__dict__[str(device)] = number

    def current_stream(self, device: torch.device) -> Any:
        number = self._own.__dict__.get(str(device), 0)
        return SimpleNamespace(
            cuda_stream=number,
            key=(device, number),
            synchronize=lambda: self.log.append(f"waited for {device}, stream {number}"),
        )

    def event(self) -> Any:
        made = SimpleNamespace(key=None)
        made.record = lambda stream: setattr(made, "key", stream.key)
        made.query = lambda: made.key not in self.running
        return made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()

    def whole_device(device: object = None) -> None:
        raise AssertionError(f"waited for all of {device}, generation included")

    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", whole_device)
    return made


def on(device: torch.device) -> Any:
    return SimpleNamespace(device=device)


class TestCopies:
    """A copy is waited for on the streams that it was given to, and nothing else is."""

    def test_handles_of_weights_on_another_gpu_than_the_threads(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan: Any = SimpleNamespace(units=[])
        target: Any = SimpleNamespace(tensors=[on(SECOND)], on_host=lambda: False)
        source: Any = SimpleNamespace(tensors=[on(SECOND)], on_host=lambda: False)
        monkeypatch.setattr(base, "UnitCompiler", lambda *_: None)
        assert base.copy_tensors(plan, target, source, lambda: None) == []
        assert driver.log == ["waited for cuda:1, stream 0"]

    def test_a_chunk_waits_for_its_own_streams(self, driver: Driver) -> None:
        driver.use(FIRST, 7)
        unit = DeviceCopyUnit(targets=(on(FIRST), on(SECOND)), sources=(on(FIRST),), gaps=())
        program: Any = SimpleNamespace(units=[unit])
        settle([program])
        assert sorted(driver.log) == [
            "waited for cuda:0, stream 7",
            "waited for cuda:1, stream 0",
        ]

    def test_copies_of_a_hook_may_be_on_any_stream_of_their_gpus(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", driver.log.append)
        wait_for_all_streams([FIRST, torch.device("cpu"), SECOND, FIRST])
        assert sorted(map(str, driver.log)) == ["cuda:0", "cuda:1"]


class TestGate:
    """A reader is inside until the kernels of its step are done."""

    def gate(self, driver: Driver) -> ReadWriteGate:
        return ReadWriteGate(lambda: None, gpus=lambda: {FIRST, SECOND})

    def test_a_hold_waits_for_the_streams_of_each_step(self, driver: Driver) -> None:
        gate = self.gate(driver)
        with gate.reading(TIMEOUT_S):
            driver.use(FIRST, 3)
            driver.running.add((FIRST, 3))
        with gate.reading(TIMEOUT_S):
            driver.use(FIRST, 4)  # a later step on another stream hides the first from nobody
        held = threading.Event()

        def hold() -> None:
            gate.hold(TIMEOUT_S)
            held.set()

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            while not gate.held:
                assert thread.is_alive()
            assert not held.wait(0.05)
            driver.running.clear()
            assert held.wait(TIMEOUT_S)
        finally:
            driver.running.clear()
            thread.join(TIMEOUT_S)
        gate.release()

    def test_kernels_that_do_not_end_fail_the_hold_and_readers_go_on(self, driver: Driver) -> None:
        gate = self.gate(driver)
        driver.running.add((SECOND, 0))
        with gate.reading(TIMEOUT_S):
            pass
        with pytest.raises(TransferTimeout, match="kernels of the last decode step did not end"):
            gate.hold(0.05)
        with gate.reading(0.0):
            assert not gate.held
        driver.running.clear()
        gate.hold(TIMEOUT_S)
        gate.release()

    def test_a_step_that_is_being_captured_leaves_no_mark(self, driver: Driver) -> None:
        gate = self.gate(driver)
        driver.capturing = True
        driver.running.add((FIRST, 0))
        with gate.reading(TIMEOUT_S):
            pass
        gate.hold(TIMEOUT_S)
        gate.release()


@pytest.fixture
def as_if_on_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleSink, "gpus", frozenset({SECOND}))


@pytest.mark.usefixtures("as_if_on_second")
def test_a_commit_is_complete_before_generation_goes_on(driver: Driver) -> None:
    model, server = nn.Linear(4, 4), nn.Linear(4, 4)
    receiver = ws.WeightReceiver(server, apply="staged")
    with ws.connect(model, to=receiver.handle) as sender:
        sender.send_weights()
    assert "waited for cuda:1, stream 0" in driver.log
    assert torch.equal(server.weight, model.weight)


class TestSwap:
    """Captured graphs keep addresses: on a GPU a commit leaves them as they are."""

    @pytest.mark.usefixtures("as_if_on_second", "driver")
    def test_copy_is_the_default_on_a_gpu(self) -> None:
        model, server = nn.Linear(4, 4), nn.Linear(4, 4)
        captured = [p.data_ptr() for p in server.parameters()]
        receiver = ws.WeightReceiver(server, apply="staged")
        with ws.connect(model, to=receiver.handle) as sender:
            sender.send_weights()
        assert [p.data_ptr() for p in server.parameters()] == captured
        assert torch.equal(server.weight, model.weight)

    def test_a_module_that_is_compiled_later_is_copied_over(self) -> None:
        model, server = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        receiver = ws.WeightReceiver(server, apply="staged")
        pairs = {f"0.{name}": tensor for name, tensor in model.named_parameters()}
        with ws.connect(pairs, to=receiver.handle) as sender:
            sender.send_weights()
            server[0].compile(backend="eager")
            addresses = [p.data_ptr() for p in server.parameters()]
            for value in (2.0, 3.0):
                with torch.no_grad():
                    model.weight.fill_(value)
                sender.send_weights()
                assert [p.data_ptr() for p in server.parameters()] == addresses
                assert torch.equal(server.get_parameter("0.weight"), model.weight)

    def test_a_pointer_swap_that_was_asked_for_stays_one(self) -> None:
        sink = ModuleSink(nn.Sequential(nn.Linear(2, 2)), swap="pointer")
        sink.module.compile(backend="eager")
        sink.refresh()
        assert sink.swap == "pointer"
