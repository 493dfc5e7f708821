"""What a receiver keeps for its next update: copy plans, and no memory that a module left."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.backends.ipc.transfer import Compiled, OpenedMemory
from weightsync.weights.copying.copy_plan import Memory

pytestmark = pytest.mark.usefixtures("shm_clean")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_plans_for_memory_that_a_module_left_are_dropped(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[OpenedMemory] = []
    plain = OpenedMemory.kept_plans

    def noted(self: OpenedMemory, *args: Any) -> Any:
        opened.append(self)
        return plain(self, *args)

    monkeypatch.setattr(OpenedMemory, "kept_plans", noted)
    source, target = nn.Linear(64, 64), nn.Linear(64, 64)
    receiver = ws.WeightReceiver(target, apply="in_place")
    with ws.connect(source, to=receiver.handle, packed=packed) as sender:
        for version in range(1, 6):
            with torch.no_grad():
                source.weight.fill_(version)
            for parameter in target.parameters():
                parameter.data = parameter.data.clone()
            sender.send_weights()
            assert torch.equal(target.weight, source.weight)
        gc.collect()
        assert len(opened[0].copy_plans) == 1
        sender.send_weights()
        assert len(opened[0].copy_plans) == 1  # used again
    assert len(opened) == 6
    assert len({id(memory) for memory in opened}) == 1


def test_plans_never_belong_to_other_memory_at_the_same_address() -> None:
    opened: Any = SimpleNamespace(copy_plans={})
    layout: Any = object()
    for _ in range(100):  # ids are reused at once
        memory = Memory([torch.zeros(4)])
        assert OpenedMemory.kept_plans(opened, layout, memory, 0) is None
        OpenedMemory.keep(opened, layout, memory, 0, Compiled([], [], 0))
        assert OpenedMemory.kept_plans(opened, layout, memory, 0) == Compiled([], [], 0)
        del memory
        assert opened.copy_plans == {}


def test_an_unpacked_update_of_other_tensors_is_refused() -> None:
    target = nn.Linear(4, 4)
    before = target.weight.clone()
    receiver = ws.WeightReceiver(target, apply="in_place")

    def change(message: dict[str, Any]) -> dict[str, object]:
        if message["call"] == "update_weights":
            weight = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[4, 4]]}
            message["body"]["update_info"]["manifest"] = weight
        return receiver.handle(message)

    with (
        ws.connect(nn.Linear(4, 4), to=change, packed=False) as sender,
        pytest.raises(ws.ProtocolError, match="sends the tensors of its init"),
    ):
        sender.send_weights()
    assert torch.equal(target.weight, before)
