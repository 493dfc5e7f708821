"""A staged update inspects the receiving module once, after its bytes have arrived."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.update.uniform import fill, make, values
from weightsync.weights.module_sink import ModuleTensors, _StagedTarget
from weightsync.wire import codec
from weightsync.wire.messages import UpdateRequest

pytestmark = pytest.mark.usefixtures("shm_clean")

Way = Literal["pointer", "copy", "in_place"]


@dataclass
class Pair:
    """A model, a receiver of it, and a sender; `seen` counts its messages by type."""

    way: Way
    model: nn.Linear = field(default_factory=lambda: make(0))
    served: nn.Linear = field(default_factory=lambda: make(0))
    seen: Counter[type] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        staged = self.way != "in_place"
        sink = ws.ModuleSink(self.served, swap=self.way if staged else "auto")  # type: ignore[arg-type]
        self.receiver = ws.WeightReceiver(sink, apply="staged" if staged else "in_place")
        self.sender = ws.connect(self.model, to=self.carry)

    def carry(self, message: Mapping[str, object]) -> dict[str, object]:
        self.seen[type(codec.from_plain(message))] += 1
        return self.receiver.handle(message)

    def send(self, value: int) -> None:
        fill(self.model, value)
        self.sender.send_weights()
        assert values(self.served) == {value}

    def messages(self) -> int:
        return self.seen.pop(UpdateRequest, 0)


@pytest.fixture(params=["pointer", "copy", "in_place"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    for value in (1, 2):
        made.send(value)
    made.messages()
    yield made
    made.sender.close()
    made.receiver.close()


def test_each_side_looks_once_and_twice_where_weights_in_use_are_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    look = ModuleTensors.refresh

    def counted(found: ModuleTensors) -> bool:
        looks.append(found.module)
        return look(found)

    monkeypatch.setattr(ModuleTensors, "refresh", counted)
    for value in (3, 4, 5):
        looks.clear()
        pair.send(value)
        assert looks.count(pair.model) == 1
        assert looks.count(pair.served) == (2 if pair.way == "in_place" else 1)


def replace(module: nn.Module) -> None:
    module.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True)


def move(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [replace, move])
def test_a_model_changed_between_updates_gets_the_next_one(
    pair: Pair, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another message; the update after that finds a target of the changed model."""
    followed: list[object] = []
    follow = _StagedTarget.follow

    def counted(target: _StagedTarget) -> None:
        followed.append(target)
        follow(target)

    monkeypatch.setattr(_StagedTarget, "follow", counted)
    for value in (3, 4):
        change(pair.served)
        pair.send(value)
        pair.send(value + 10)
        assert pair.messages() == 2
    changes = 0 if pair.way == "in_place" else 2
    assert len(followed) <= changes
    followed.clear()
    pair.send(5)
    assert not followed


@pytest.mark.parametrize("pair", ["copy"], indirect=True)
def test_tensors_that_were_replaced_are_freed(pair: Pair) -> None:
    before = [weakref.ref(p) for p in pair.served.parameters()]
    replace(pair.served)
    pair.send(3)
    gc.collect()
    assert [find() for find in before] == [None, None]


def test_a_part_is_not_taken_for_the_whole(pair: Pair) -> None:
    fill(pair.model, 3)
    with pair.sender.update(partial=True) as update:
        update.send([("bias", pair.model.bias)])
    assert set(pair.served.bias.tolist()) == {3}
    assert set(pair.served.weight.flatten().tolist()) == {2}
    pair.send(4)


def test_a_model_that_is_changed_during_an_update(pair: Pair) -> None:
    """It gets the staged weights; those written to the tensors that it had do not arrive."""

    def send_and_replace() -> None:
        with pair.sender.update() as update:
            update.send(pair.model.state_dict().items())
            replace(pair.served)

    fill(pair.model, 3)
    if pair.way == "in_place":
        with pytest.raises(ws.TransferError, match="moved or replaced during the update"):
            send_and_replace()
    else:
        send_and_replace()
        assert values(pair.served) == {3}
    pair.send(4)


def test_a_model_that_is_compiled_keeps_its_addresses_from_then_on() -> None:
    model, served = make(1), make(0)
    receiver = ws.WeightReceiver(served)
    with ws.connect(model, to=receiver.handle) as sender:
        sender.send_weights()
        replace(served)
        served.compile(backend="eager")
        before = [p.data_ptr() for p in served.parameters()]
        for value in (2, 3, 4):
            fill(model, value)
            sender.send_weights()
            assert values(served) == {value}
            assert [p.data_ptr() for p in served.parameters()] == before
    receiver.close()


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_memory_that_a_user_gave_back_to_the_model_is_not_written(pair: Pair) -> None:
    """Old weights, kept as views and put in place again, lie where the next update was staged."""
    kept = {name: tensor.detach() for name, tensor in pair.served.state_dict().items()}
    pair.send(3)
    pair.served.load_state_dict(kept, assign=True)
    del kept
    before = values(pair.served)
    fill(pair.model, 4)
    with pair.sender.update() as update:
        update.send(pair.model.state_dict().items())
        assert values(pair.served) == before
    assert values(pair.served) == {4}
    assert torch.equal(next(pair.served.parameters()), next(pair.model.parameters()))
