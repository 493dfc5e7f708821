"""Hooks that take index and value: each element that changed, and no other, from real updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import weightsync as ws
from tests.weights.test_every_dtype import SENT
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines import patches

Weights = dict[str, torch.Tensor]
SHAPES = [(300, 65), (0, 4), (1,), (5, 3, 7)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, `uint8[n, itemsize]`; they may be changed."""
    return tensor.view(-1).view(torch.uint8).view(-1, tensor.itemsize)


def model() -> Weights:
    """Return tensors of every dtype and of random bits: empty ones, and ends within a line."""
    random = torch.Generator().manual_seed(0)
    made = {}
    for dtype in SENT:
        for i, shape in enumerate(SHAPES):
            most = 2 if dtype is torch.bool else 256
            size = (torch.Size(shape).numel(), dtype.itemsize)
            flat = torch.randint(most, size, generator=random).to(torch.uint8)
            made[f"{dtype}.{i}"] = flat.view(-1).view(dtype).view(shape)
    return made


def change(weights: Weights, seed: int, share: float = 0.02) -> None:
    """Change one bit of some elements of most tensors, the last element among them."""
    random = torch.Generator().manual_seed(seed)
    for tensor in list(weights.values())[seed % 3 :]:
        flat = bits(tensor)
        if not len(flat):
            continue
        rows = torch.randperm(len(flat), generator=random)[: max(1, int(share * len(flat)))]
        rows = torch.cat([rows[rows < len(flat) - 1], torch.tensor([len(flat) - 1])])
        columns = torch.randint(flat.shape[1], rows.shape, generator=random)
        flat[rows, columns] ^= 1


def changed(before: Weights, now: Weights) -> dict[str, list[int]]:
    """Return the positions of the elements that differ, of the tensors that have some."""
    found = {n: (bits(before[n]) != bits(t)).any(1).nonzero().view(-1) for n, t in now.items()}
    return {name: places.tolist() for name, places in found.items() if len(places)}


class Server:
    """A user's model with both hooks, and what they were given."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.wholes = 0
        self.given: list[dict[str, list[int]]] = []
        self.kept: list[ws.SparseWeightPatch] = []
        self.fails = False
        sink = ws.HookSink(self.load_weights, load_patches=self.load_patches)
        self.receiver = ws.WeightReceiver(sink, apply="staged")

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.wholes += 1
        self.weights.update({name: tensor.clone() for name, tensor in pairs})

    def load_patches(self, given: Iterable[ws.SparseWeightPatch]) -> None:
        found = {}
        for patch in given:
            held = self.weights[patch.name]
            assert (patch.indices.dtype, patch.values.dtype) == (torch.int64, held.dtype)
            assert patch.indices.shape == patch.values.shape
            bits(held)[patch.indices] = bits(patch.values)
            found[patch.name] = patch.indices.tolist()
            if self.fails:
                raise RuntimeError("no")
            self.kept.append(patch)
        self.given.append(found)

    def holds(self, weights: Weights) -> bool:
        return not changed(self.weights, weights)


def copied(weights: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in weights.items()}


def sent(report: ws.SyncReport) -> bool:
    assert report.delta is not None
    return report.delta.sent


@pytest.mark.parametrize("coding", ["lines", "values"])
@pytest.mark.parametrize("packed", [None, True])
def test_a_hook_is_given_the_elements_that_changed(
    coding: str, packed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if coding == "values":
        monkeypatch.setattr("weightsync.update.deltas._MEMORY_COST", 0.0)
    trainer, server = model(), Server()
    with ws.connect(trainer, to=server.receiver, delta="always", packed=packed) as sender:
        sender.send_weights()
        for step in range(6):
            before = copied(trainer)
            change(trainer, step, share=0.6 if step == 4 else 0.02)
            report = sender.send_weights()
            assert sent(report)
            assert server.given[-1] == changed(before, trainer)
            assert server.holds(trainer)
    assert (server.wholes, len(server.given)) == (1, 6)


def test_nothing_changed_and_no_hook_is_called() -> None:
    trainer, server = model(), Server()
    with ws.connect(trainer, to=server.receiver, delta="always") as sender:
        for step in range(3):
            assert sent(sender.send_weights()) == (step > 0)
    assert (server.wholes, server.given) == (1, [])


def test_tied_tensors_have_one_patch() -> None:
    trainer, server = torch.nn.Linear(40, 40), Server()
    trainer.tied = trainer.weight
    with ws.connect(trainer, to=server.receiver, delta="always") as sender:
        sender.send_weights()
        with torch.no_grad():
            trainer.weight[1, 2] += 1
        assert sent(sender.send_weights())
    (name,) = server.given[0].keys() & {"weight", "tied"}
    assert server.given == [{name: [42]}]
    assert torch.equal(server.weights[name], trainer.weight)


def test_whole_updates_between() -> None:
    """After a partial update, which no delta builds on, and after one of another sender."""
    trainer, other, server = model(), model(), Server()
    change(other, 50)
    with ws.connect(trainer, to=server.receiver, delta="always", yields=True) as sender:
        sender.send_weights()
        change(trainer, 0)
        assert sent(sender.send_weights())
        with sender.update(partial=True) as update:
            name = "torch.float32.0"
            update.send([(name, torch.ones(300, 65))])
        assert torch.equal(server.weights[name], torch.ones(300, 65))
        for step in range(1, 3):
            change(trainer, step)
            assert sent(sender.send_weights()) == (step > 1)
            assert server.holds(trainer)
        with ws.connect(other, to=server.receiver, delta="always", yields=True) as second:
            second.send_weights()
        assert server.holds(other)
        for step in range(3, 5):
            change(trainer, step)
            assert sent(sender.send_weights()) == (step > 3)
            assert server.holds(trainer)


class Cut:
    """A transport that loses one kind of call, before or after the receiver gets it."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._receiver = receiver
        self.lost: str | None = None
        self.arrives = False

    def __call__(self, message: Mapping[str, object]) -> dict[str, object]:
        if message["call"] == self.lost and not self.arrives:
            raise ws.TransportError("lost")
        reply = self._receiver.handle(message)
        if message["call"] == self.lost:
            raise ws.TransportError("lost")
        return reply


@pytest.mark.parametrize("arrives", [False, True])
def test_aborted_updates_between(arrives: bool) -> None:
    """The next patches have all that changed since the weights that the hook was given last.

    A delta that arrived has overwritten the staged copy, so the whole model follows.
    """
    trainer, server = model(), Server()
    cut = Cut(server.receiver)
    with ws.connect(trainer, to=cut, delta="always") as sender:
        sender.send_weights()
        change(trainer, 0)
        assert sent(sender.send_weights())
        given, before = len(server.given), copied(trainer)
        cut.lost, cut.arrives = "update_weights", arrives
        for step in range(1, 2 if arrives else 3):
            change(trainer, step)
            with pytest.raises(ws.WeightSyncError):
                sender.send_weights()
            assert server.holds(before)
        cut.lost = None
        change(trainer, 3)
        assert sent(sender.send_weights()) is not arrives
        assert server.given[given:] == ([] if arrives else [changed(before, trainer)])
        assert server.holds(trainer)
        change(trainer, 4)
        assert sent(sender.send_weights())
        assert server.holds(trainer)


def test_a_hook_that_fails_leaves_the_receiver_torn_and_is_healed() -> None:
    trainer, server = model(), Server()
    with ws.connect(trainer, to=server.receiver, delta="always") as sender:
        sender.send_weights()
        server.fails = True
        change(trainer, 0)
        with pytest.raises(ws.WeightSyncError, match="no"):
            sender.send_weights()
        assert server.receiver.status().state == "TORN"
        server.fails = False
        for step in range(1, 3):
            assert sent(sender.send_weights()) == (step > 1)
            assert server.holds(trainer)
            change(trainer, step)


def test_a_hook_may_keep_and_change_its_patches() -> None:
    trainer, server = model(), Server()
    with ws.connect(trainer, to=server.receiver, delta="always") as sender:
        sender.send_weights()
        change(trainer, 0)
        sender.send_weights()
        kept = server.kept[:]
        values = [bits(patch.values).clone() for patch in kept]
        for step in range(1, 4):
            change(trainer, step)
            assert sent(sender.send_weights())
        assert all(torch.equal(bits(p.values), v) for p, v in zip(kept, values, strict=True))
        for patch in server.kept:
            patch.values.zero_()
            patch.indices.zero_()
        change(trainer, 4)
        assert sent(sender.send_weights())
        assert server.holds(trainer)


def hooked(hook: Callable[[Any], object]) -> ws.WeightReceiver:
    return ws.WeightReceiver(ws.HookSink(lambda _: None, load_patches=hook), apply="staged")


def test_a_hook_iterates_as_often_as_it_wants_until_it_returns() -> None:
    trainer, kept = model(), []

    def hook(given: Iterable[ws.SparseWeightPatch]) -> None:
        names = [[patch.name for patch in given] for _ in range(2)]
        assert names[0] == names[1] != []
        kept.append(given)

    with ws.connect(trainer, to=hooked(hook), delta="always") as sender:
        sender.send_weights()
        change(trainer, 0)
        assert sent(sender.send_weights())
    with pytest.raises(ws.TransferError, match="until load_patches returns"):
        next(iter(kept[0]))


def test_names_that_a_hook_returns_are_checked() -> None:
    trainer = {"a": torch.zeros(40), "b": torch.zeros(40), "c": torch.zeros(40)}
    loads = {"a", "b"}
    with ws.connect(trainer, to=hooked(lambda _: loads), delta="always") as sender:
        sender.send_weights()
        trainer["a"][3] = trainer["b"][4] = 1
        assert sent(sender.send_weights())
        loads.remove("b")
        trainer["a"][3] = trainer["b"][4] = 2
        with pytest.raises(ws.ManifestMismatchError, match="did not load 1 of 2 tensors: b"):
            sender.send_weights()


def test_lines_of_a_delta_that_do_not_grow_are_refused() -> None:
    manifest = ws.Manifest((ws.TensorSpec("a", "uint8", (640,)),))
    layout = StreamLayout(manifest)
    memory = Memory.of_stream(layout, torch.zeros(640, dtype=torch.uint8))
    recording = patches.RecordingLines(layout, memory)
    for number in (3, 5):
        recording.write(np.array([number], np.uint32), np.ones(8, np.uint64))
    for number in (4, 5):
        with pytest.raises(ValueError, match=f"line {number} comes twice, or after later ones"):
            recording.write(np.array([number], np.uint32), np.ones(8, np.uint64))
    (patch,) = patches.Patches(layout, recording)
    assert patch.indices.tolist() == [*range(192, 256, 8), *range(320, 384, 8)]


def test_choices_that_make_no_sense_are_refused() -> None:
    def hook(_: object) -> None:
        """Take whatever there is."""

    with pytest.raises(ws.ConfigError, match="give one of the two"):
        ws.HookSink(hook, changed_only=True, load_patches=hook)
    sink = ws.HookSink(hook, load_patches=hook)
    with pytest.raises(ws.ConfigError, match='apply="staged"'):
        ws.WeightReceiver(sink, apply="in_place")
