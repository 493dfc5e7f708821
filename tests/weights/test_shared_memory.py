"""Tensors of one module that share memory without being tied, on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.weights.tensor_kinds import find_sharing


class Holder(nn.Module):
    a: nn.Parameter
    b: nn.Parameter
    moves: nn.Parameter


def module_of(**tensors: torch.Tensor) -> Holder:
    module = Holder()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def view() -> Holder:
    flat = torch.zeros(6)
    return module_of(a=flat, b=flat.view(2, 3))


def transposed() -> Holder:
    square = torch.zeros(4, 4)
    return module_of(a=square, b=square.t())


def slices() -> Holder:
    flat = torch.zeros(9)
    return module_of(a=flat[0:6], b=flat[3:9])


def whole_and_columns() -> Holder:
    whole = torch.zeros(4, 6)
    return module_of(a=whole, b=whole[:, 1:3])


def tied_and_slice() -> Holder:
    flat = torch.zeros(6)
    return module_of(a=flat, tied=flat, b=flat[2:])


def two_storages() -> Holder:
    """NumPy's memory, through storages of which torch does not know that they share it."""
    flat = np.zeros(9, np.float32)
    return module_of(a=torch.from_numpy(flat[0:6]), b=torch.from_numpy(flat[3:9]))


def conjugate() -> Holder:
    flat = torch.zeros(4, dtype=torch.complex64)
    return module_of(a=flat, b=flat.conj())


SHARING = [view, transposed, slices, whole_and_columns, tied_and_slice, two_storages, conjugate]
Make = Callable[[], Holder]
SINKS: dict[str, Callable[[nn.Module], ws.ModuleSink]] = {
    "pointer": lambda module: ws.ModuleSink(module, swap="pointer"),
    "copy": lambda module: ws.ModuleSink(module, swap="copy"),
    "shards": lambda module: ws.ShardedModuleSink(module, swap="pointer"),
}
every_sharing = pytest.mark.parametrize("make", SHARING, ids=lambda make: make.__name__)
every_apply = pytest.mark.parametrize("apply", ["staged", "in_place"])
every_sink = pytest.mark.parametrize("sink", SINKS)


def contents(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, tied ones once."""
    held = {name: tensor for name, tensor in module.state_dict().items() if name != "tied"}
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in held.items()
    }


def agreeing(make: Make, start: int) -> dict[str, torch.Tensor]:
    """Return values that such a module can hold: those of one that was filled by `a` and `b`."""
    module = make()
    with torch.no_grad():
        for first, tensor in zip((start, start + 50), (module.b, module.a), strict=True):
            tensor.copy_(torch.arange(first, first + tensor.numel()).reshape(tensor.shape))
    return contents(module)


def holds(module: nn.Module, sent: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, sent[name]) for name, tensor in contents(module).items())


def fill(held: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, tensor in values.items():
        held[name].copy_(tensor)


@every_sharing
@every_sink
@every_apply
@pytest.mark.parametrize("delta", ["off", "always"])
def test_values_that_agree_are_held_and_others_refused(
    delta: Any, apply: Any, sink: str, make: Make
) -> None:
    module = make()
    receiver = ws.WeightReceiver(SINKS[sink](module), apply=apply)
    sent = agreeing(make, 1)
    with ws.connect(sent, to=receiver.handle, delta=delta) as sender:
        for start in (1, 101):
            fill(sent, agreeing(make, start))
            assert sender.send_weights().verified == "held"
            assert holds(module, sent)
        before = contents(module)
        sent["b"].view(-1)[1:3].add_(1)
        with pytest.raises(ws.VerificationError, match="contradict each other") as caught:
            sender.send_weights()
        assert set(caught.value.names) == {"a", "b"}
        if apply == "staged":
            assert holds(module, before)
        fill(sent, agreeing(make, 201))
        assert sender.send_weights().verified == "held"
        assert holds(module, sent)


@every_sharing
@every_sink
@every_apply
def test_they_still_share_memory_afterwards(apply: Any, sink: str, make: Make) -> None:
    module = make()
    receiver = ws.WeightReceiver(SINKS[sink](module), apply=apply)
    with ws.connect(agreeing(make, 1), to=receiver.handle) as sender:
        sender.send_weights()
        sender.send_weights()
    with torch.no_grad():
        module.a.fill_(500)
        assert module.b.eq(500).any()


@every_sink
@every_apply
def test_values_of_two_messages_are_compared(apply: Any, sink: str) -> None:
    module = slices()
    receiver = ws.WeightReceiver(SINKS[sink](module), apply=apply)
    sent = agreeing(slices, 1)
    with ws.connect(sent, to=receiver.handle) as sender:
        with sender.update() as update:
            for name, tensor in sent.items():
                update.send([(name, tensor)])
        assert holds(module, sent)
        contradict = pytest.raises(ws.VerificationError, match="contradict each other")
        with contradict, sender.update() as update:
            update.send([("a", sent["a"])])
            update.send([("b", sent["b"] + 1)])


@every_apply
@pytest.mark.parametrize("delta", ["off", "always"])
@pytest.mark.parametrize("make", [slices, two_storages])
def test_a_part_of_them_may_be_sent(make: Make, delta: Any, apply: Any) -> None:
    module = make()
    receiver = ws.WeightReceiver(module, apply=apply)
    sent = agreeing(make, 1)
    with ws.connect(sent, to=receiver.handle, delta=delta) as sender:
        sender.send_weights()
        with sender.update(partial=True) as update:
            update.send([("a", torch.full((6,), 7.0))])
        assert module.a.tolist() == [7] * 6
        assert module.b.tolist() == [7] * 3 + sent["b"].tolist()[3:]
        sender.send_weights()
        assert holds(module, sent)


@every_apply
def test_tensors_that_share_memory_later(apply: Any) -> None:
    module = module_of(a=torch.zeros(6), b=torch.zeros(6))
    receiver = ws.WeightReceiver(module, apply=apply)
    sent = {"a": torch.ones(6), "b": torch.full((6,), 2.0)}
    with ws.connect(sent, to=receiver.handle) as sender:
        assert sender.send_weights().verified == "held"
        flat = torch.zeros(9)
        module.a.data, module.b.data = flat[0:6], flat[3:9]
        with pytest.raises(ws.VerificationError, match="contradict each other"):
            sender.send_weights()


@every_apply
def test_views_of_one_memory_that_do_not_overlap(apply: Any) -> None:
    """As fused kernels and flattened parameters make them, also where their elements alternate."""
    whole = torch.zeros(4, 6)
    module = module_of(a=whole[:, 0:3], b=whole[:, 3:6], c=torch.zeros(8)[2:])
    sent = {"a": torch.ones(4, 3), "b": torch.full((4, 3), 2.0), "c": torch.ones(6)}
    receiver = ws.WeightReceiver(module, apply=apply)
    with ws.connect(sent, to=receiver.handle) as sender:
        assert sender.send_weights().verified == "held"
    assert holds(module, sent)


def test_which_tensors_share_memory() -> None:
    flat, other = torch.zeros(20), torch.zeros(4)
    assert find_sharing([flat[0:5], flat[5:10], other, flat[12:12], torch.zeros(4)]) == []
    assert find_sharing([flat[8:20], flat[10:12], other, flat[0:9]]) == [[3, 0, 1]]
    assert find_sharing([flat[0:4], other, flat[2:6], other.view(torch.uint8)[3:5]]) in (
        [[0, 2], [1, 3]],
        [[1, 3], [0, 2]],
    )


def two_ties() -> Holder:
    flat = np.zeros(6, np.float32)
    return module_of(a=torch.from_numpy(flat), b=torch.from_numpy(flat))


@pytest.mark.parametrize("make", [*SHARING, two_ties], ids=lambda make: make.__name__)
def test_a_trainer_s_tensors_are_not_moved_apart(make: Make) -> None:
    trained, served = make(), make()
    trained.register_parameter("moves", nn.Parameter(torch.zeros(4)))
    served.register_parameter("moves", nn.Parameter(torch.zeros(4)))
    before = {name: tensor.data_ptr() for name, tensor in trained.named_parameters()}
    with ws.connect(trained, to=ws.WeightReceiver(served).handle, adopt=True) as sender:
        for step in range(1, 3):
            with torch.no_grad():
                trained.a.fill_(step)
                assert trained.b.eq(step).any()
            sender.send_weights()
            assert holds(served, contents(trained))
        assert trained.moves.data_ptr() != before["moves"]
        assert trained.a.data_ptr() == before["a"]
        assert trained.b.data_ptr() == before["b"]
