"""`sender.written`: fingerprints are taken before the update, and again where that was not so."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.backends import test_fused_updates as fused_updates
from tests.backends.test_fused_updates import CountingKernel, alike, fill, model
from weightsync.backends.ipc.early import EarlyFingerprints
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.runtime import optimizer_steps
from weightsync.specs import Manifest
from weightsync.tensors import as_bytes, spec_of
from weightsync.weights.copying.copy_plan import Memory, UnitCompiler
from weightsync.weights.copying.layout import StreamLayout

pytestmark = pytest.mark.usefixtures("shm_clean")
kernel = fused_updates.kernel

WAIT_S = 60.0
SIZES = (300, 0, 5000, 70_000, 64)


def tensors() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(size)) for size in SIZES]


def early_of(held: list[torch.Tensor]) -> tuple[EarlyFingerprints, list[Callable[[], int]]]:
    """Return early fingerprints of tensors, and what fingerprints each of their units now."""
    specs = tuple(spec_of(f"t{i}", tensor) for i, tensor in enumerate(held))
    layout = StreamLayout(Manifest(specs), unit_nbytes=64 << 10)
    memory = Memory([as_bytes(tensor.detach()) for tensor in held])
    compiler = UnitCompiler(layout, memory, memory)
    units = [compiler.compile(unit) for unit in layout.units]
    early = EarlyFingerprints(layout, units, [tensor.data_ptr() for tensor in held])
    return early, [unit.fingerprint for unit in units]


def taken(early: EarlyFingerprints, held: list[torch.Tensor]) -> dict[int, int]:
    return {unit: read() for unit, read in early.take(held).items()}


def test_units_are_read_when_their_last_tensor_is_written() -> None:
    held = tensors()
    early, units = early_of(held)
    assert len(units) > 4
    early.note({0: held[0], 1: held[1]}, {})
    assert taken(early, held) == {}, "the first unit has another tensor"
    for i, tensor in enumerate(held):
        early.note({i: tensor}, {})
    assert taken(early, held) == {i: unit() for i, unit in enumerate(units)}
    assert taken(early, held) == {}, "it is for one update"


def by_torch(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def by_a_fused_step(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD([tensor], lr=1.0, fused=True).step()


def elsewhere(tensor: torch.Tensor) -> None:
    tensor.data = tensor.detach().clone()


@pytest.mark.parametrize("write", [by_torch, by_a_fused_step, elsewhere])
def test_what_is_written_since_is_not_given(write: Callable[[torch.Tensor], None]) -> None:
    optimizer_steps.install()
    held = tensors()
    early, units = early_of(held)
    early.note(dict(enumerate(held)), {})
    write(held[3])
    found = early.take(held)
    assert 0 < len(found) < len(units)
    early.note(dict(enumerate(held[:-1])), {})
    early.note({4: held[4]}, {})
    if write is not elsewhere:
        assert taken(early, held) == {i: unit() for i, unit in enumerate(units)}


def test_another_tensor_in_the_place_of_one_is_not_given() -> None:
    held = tensors()
    early, _ = early_of(held)
    early.note(dict(enumerate(held)), {})
    others = [nn.Parameter(tensor.detach()) for tensor in held]
    assert early.take(others) == {}


def test_no_window_stays_open() -> None:
    held = tensors()
    early, _ = early_of(held)
    before = len(optimizer_steps._windows)
    for _ in range(3):
        for i, tensor in enumerate(held):
            early.note({i: tensor}, {})
        assert len(optimizer_steps._windows) == before + len(held)
    early.note(dict(enumerate(held)), {})
    assert len(optimizer_steps._windows) == before + 1
    early.note({0: torch.zeros(300)}, {})  # not in registered memory
    early.close()
    early.close()
    assert len(optimizer_steps._windows) == before


@contextlib.contextmanager
def connected(ours: nn.Module, theirs: nn.Module, **settings: Any) -> Iterator[ws.WeightSender]:
    receiver = ws.WeightReceiver(theirs)
    with ws.connect(ours, to=receiver.handle, delta="off", **settings) as sender:
        yield sender
    receiver.close()


def test_an_update_takes_what_was_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    begin = IpcTrainerEngine.begin

    def begun(self: IpcTrainerEngine, *args: Any, **known: Any) -> Any:
        made = begin(self, *args, **known)
        given.append(len(self._read_early))
        return made

    monkeypatch.setattr(IpcTrainerEngine, "begin", begun)
    ours, theirs = model(), model()
    names = [name for name, _ in ours.named_parameters()]
    with connected(ours, theirs) as sender:
        for seed, written in ((1, None), (2, names[:3]), (3, names), (4, [])):
            fill(ours, seed)
            sender.written(written)
            assert sender.send_weights().verified == "held"
            assert alike(ours, theirs)
        every, some, all_again, none = given
        assert every == all_again > some > none == 0
        sender.written()
        for parameter in ours.parameters():
            by_torch(parameter)
        sender.send_weights()
        assert given[-1] == 0
        assert alike(ours, theirs)
        with pytest.raises(ws.ConfigError, match="1 tensors are not among those that are sent: w"):
            sender.written(["w", names[0]])
        with sender.update() as update:
            sender.written()  # of no use any more
            update.send(ours.named_parameters())
        sender.verify = False
        sender.written()
        sender.send_weights()
        assert given[-1] == 0
    with pytest.raises(ws.ConfigError, match="closed"):
        sender.written()


def test_beside_asend_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update in flight has the source; one that is over stays listed, and delays nothing."""
    ours, theirs = nn.Linear(64, 64), nn.Linear(64, 64)
    commits, goes_on = threading.Event(), threading.Event()

    def on_commit(_: int) -> None:
        commits.set()
        assert goes_on.wait(WAIT_S)

    receiver = ws.WeightReceiver(theirs, on_commit=on_commit)
    noted: list[object] = []
    with ws.connect(ours, to=receiver.handle, delta="off") as sender:
        note = sender._group.worker.note_written

        def note_written(names: Any) -> None:
            noted.append(names)
            note(names)

        monkeypatch.setattr(sender._group.worker, "note_written", note_written)

        async def send() -> None:
            sent = asyncio.create_task(sender.asend_weights())
            assert await asyncio.to_thread(commits.wait, WAIT_S)
            sender.written()
            goes_on.set()
            await sent

        for count in range(3):
            commits.clear()
            goes_on.clear()
            with torch.no_grad():
                ours.weight.fill_(count)
            asyncio.run(send())
            assert len(noted) == count
            sender.written()
            assert len(noted) == count + 1
            assert all(map(torch.equal, theirs.parameters(), ours.parameters()))
    receiver.close()


def test_a_write_that_torch_does_not_count_fails_the_update_and_not_the_next() -> None:
    ours, theirs = model(), model()
    with connected(ours, theirs) as sender:
        fill(ours, 1)
        sender.send_weights()
        held = [parameter.detach().clone() for parameter in theirs.parameters()]
        fill(ours, 2)
        sender.written()
        first = next(ours.parameters())
        first.data.view(torch.int16).numpy()[0] ^= 1
        with pytest.raises(ws.VerificationError, match="weights"):
            sender.send_weights()
        for parameter, before in zip(theirs.parameters(), held, strict=True):
            assert torch.equal(parameter.view(torch.int16), before.view(torch.int16))
        sender.send_weights()
        assert alike(ours, theirs)


@pytest.mark.parametrize("settings", [{"packed": True}, {"packed": False, "adopt": False}])
def test_other_updates_are_as_ever(settings: dict[str, Any]) -> None:
    ours, theirs = model(), model()
    with connected(ours, theirs, **settings) as sender:
        for seed in (1, 2):
            fill(ours, seed)
            sender.written()
            sender.send_weights()
            assert alike(ours, theirs)
        sender.send_async().result()
        fill(ours, 3)
        sender.written()
        sender.send_async().result()
        assert alike(ours, theirs)


def test_layers_are_read_by_a_launch_each_and_the_rest_by_one(kernel: CountingKernel) -> None:
    """As on a GPU: the update launches for what is left alone."""
    ours, theirs = model(), model()
    names = [name for name, _ in ours.named_parameters()]
    with connected(ours, theirs, packed=False) as sender:
        for seed in (1, 2, 3):
            fill(ours, seed)
            before = kernel.launches
            sender.written(names[:4])
            sender.written(names[4:])
            early = kernel.launches - before
            sender.send_weights()
            assert kernel.launches - before == early + 1, "the receiver's"
            assert alike(ours, theirs)
        assert early == 2
        fill(ours, 4)
        sender.written(names[4:])
        before = kernel.launches
        sender.send_weights()
        assert kernel.launches - before == 2
        assert alike(ours, theirs)
