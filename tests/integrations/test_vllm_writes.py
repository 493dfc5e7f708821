"""What a model's load_weights writes to its layers, as a dry run of a vLLM worker counts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightsync.integrations.vllm.writes import Place, WriteCounter, places_of


class Layer(nn.Module):
    """A weight as vLLM's reload leaves it, without memory, and a bias that keeps its own."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.arange(6.0), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))


class Counted:
    """A model of one layer, and the counter of what is written to it."""

    def __init__(self) -> None:
        self.layer = Layer()
        self.model = nn.ModuleDict({"layer": self.layer})
        self.refused: list[str] = []
        self.counter = WriteCounter(places_of(self.model), self._refuse)

    def _refuse(self, place: Place, reason: str) -> None:
        self.refused.append(f"{place}: {reason}")

    def __getitem__(self, name: str) -> int:
        return self.counter.counts["layer", name]


def given(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


WRITES: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "copy_": (lambda w: w.copy_(given(4, 6)), 24),
    "data.copy_": (lambda w: w.data.copy_(given(4, 6)), 24),
    "a slice": (lambda w: w.data[1].copy_(given(6)), 6),
    "a slice of a view in another type": (
        lambda w: w.data.view(torch.int32).narrow(1, 0, 2).copy_(given(4, 2)),
        8,
    ),
    "an index": (lambda w: w.data.__setitem__([0, 2], given(2, 6)), 12),
    "out=": (lambda w: torch.add(given(4, 6), 1, out=w.data), 24),
    "cleared, and a part": (lambda w: (w.data.zero_(), w.data[:2].copy_(given(2, 6))), 12),
    "a part, and its padding": (
        lambda w: (w.data[:3].copy_(given(3, 6)), w.data[3:].fill_(0)),
        24,
    ),
    "twice": (lambda w: (w.copy_(given(4, 6)), w.copy_(given(4, 6))), 24),
}


@pytest.mark.parametrize("write", WRITES)
def test_elements_are_counted_however_they_are_written(write: str) -> None:
    counted = Counted()
    call, numel = WRITES[write]
    with torch.no_grad(), counted.counter:
        call(counted.layer.weight)
    assert counted["weight"] == numel
    assert counted.counter.touched == {("layer", "weight")}
    assert counted.refused == []


def test_tensors_with_memory_are_counted_and_not_changed() -> None:
    counted = Counted()
    layer = counted.layer
    with torch.no_grad(), counted.counter:
        layer.bias.data.copy_(given(6))
        layer.bias.data.mul_(2)
        layer.scale.fill_(3)
        torch.zeros(6).copy_(torch.ones(6))
    assert torch.equal(layer.bias, torch.arange(6.0))
    assert torch.equal(layer.scale, torch.ones(1))
    assert counted["bias"] == 6
    assert counted.counter.touched == {("layer", "bias"), ("layer", "scale")}


@pytest.mark.parametrize("written", [False, True])
def test_a_change_of_what_was_not_written_does_not_fit(*, written: bool) -> None:
    counted = Counted()
    with torch.no_grad(), counted.counter:
        if written:
            counted.layer.weight.data.copy_(given(4, 6))
        counted.layer.weight.data.mul_(2)
        counted.layer.weight.data[0] += 1
    former = "layer.weight: it is computed from its former weights"
    assert [told.partition(",")[0] for told in counted.refused] == [former] * (not written)


def test_tensors_of_no_layer_are_written_as_ever() -> None:
    counted, own = Counted(), torch.zeros(6)
    with torch.no_grad(), counted.counter:
        own.copy_(torch.arange(6.0))
        own.add_(counted.layer.bias)
    assert torch.equal(own, torch.arange(6.0) * 2)
    assert counted.counter.touched == set()


def test_a_shape_that_does_not_fit_is_told_and_the_next_is_counted() -> None:
    counted = Counted()
    with torch.no_grad(), counted.counter:
        counted.layer.weight.data[0].copy_(given(5))
        counted.layer.weight.data[1].copy_(given(6))
    assert len(counted.refused) == 1
    assert counted.refused[0].startswith("layer.weight: ")
    assert counted["weight"] > 0


def test_a_loader_raises_what_does_not_fit() -> None:
    counted = Counted()
    counted.counter.in_loader = True
    with torch.no_grad(), counted.counter, pytest.raises(RuntimeError):
        counted.layer.weight.data.copy_(given(5, 5))
    assert counted.counter.touched == set()


def test_what_stands_in_for_a_tensor_counts_as_it() -> None:
    counted = Counted()
    stand_in = counted.layer.bias.data.to("meta")
    place = Place("layer", counted.layer, "bias", counted.layer.bias)
    counted.counter.stand_in(place, stand_in)
    with torch.no_grad(), counted.counter:
        stand_in[:4].copy_(given(4))
    assert counted["bias"] == 4


def test_padding_that_the_tensor_declares_is_not_counted() -> None:
    counted = Counted()
    setattr(counted.layer.weight, "weight_loader_numel", 18)  # noqa: B010  # vLLM's attribute
    with torch.no_grad(), counted.counter:
        counted.layer.weight.copy_(given(4, 6))
    assert counted["weight"] == 18
