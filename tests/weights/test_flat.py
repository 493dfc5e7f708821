"""Runs of elements as boxes, and the models of FSDP1 and ZeRO-3 that hold runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FullyShardedDataParallel

import weightsync as ws
from weightsync.weights.sources.base import ModuleSource, as_source
from weightsync.weights.sources.flat import FlatSource, Piece, Run, boxes_of_run


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    size = math.prod(shape)
    begin = draw(st.integers(0, size))
    return shape, begin, draw(st.integers(begin, size))


@given(runs())
def test_the_boxes_of_a_run_are_its_elements(run: tuple[list[int], int, int]) -> None:
    shape, begin, end = run
    full = torch.arange(math.prod(shape)).view(shape)
    held = full.flatten()[begin:end]
    seen = torch.zeros(shape, dtype=torch.int64)
    at = 0
    boxes = list(boxes_of_run(shape, begin, end))
    for box in boxes:
        assert box.at == at
        at += box.length
        where = tuple(slice(*span) for span in box.spans)
        sizes = [stop - start for start, stop in box.spans]
        assert torch.equal(full[where], held[box.at : box.at + box.length].view(sizes))
        seen[where] += 1
    assert at == end - begin
    assert int(seen.sum()) == end - begin
    assert seen.max() <= 1
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_tensor_without_elements_is_one_box() -> None:
    (box,) = boxes_of_run((3, 0, 2), 0, 0)
    assert box == (((0, 3), (0, 0), (0, 2)), 0, 0)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class TestSource:
    def held(self, **changed: Any) -> FlatSource:
        self.made: dict[str, Any] = {
            "tensor": torch.arange(10.0),
            "runs": [Run("w", (3, 4), 2, 9, 3)],
        } | changed
        return FlatSource(lambda: [Piece("flat", **self.made), Piece("b", torch.ones(2))])

    def test_what_is_held(self) -> None:
        held = self.held().holdings()
        assert list(held.names) == ["w", "w", "w", "b"]
        assert [box.spans for box in held.boxes][:3] == [
            (((0, 1),), ((2, 4),)),
            (((1, 2),), ((0, 4),)),
            (((2, 3),), ((0, 1),)),
        ]
        assert [t.tolist() for t in held.tensors()] == [
            [[3.0, 4.0]],
            [[5.0, 6.0, 7.0, 8.0]],
            [[9.0]],
            [1.0, 1.0],
        ]

    @pytest.mark.parametrize(
        "changed",
        [
            {"tensor": torch.zeros(12)},
            {"tensor": torch.zeros(10, dtype=torch.float64)},
            {"runs": [Run("w", (3, 4), 3, 9, 3)]},
            {"runs": [Run("w", (3, 4), 2, 9, 2)]},
        ],
    )
    def test_other_pieces_than_at_connect(self, changed: dict[str, Any]) -> None:
        held = self.held().holdings()
        before = dict(self.made)
        self.made |= changed
        with pytest.raises(ws.ManifestMismatchError, match="pieces of parameters that it held"):
            held.tensors()
        self.made |= before
        assert len(held.tensors()) == 4


def wrapped(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
class TestFsdp1:
    def test_a_step_while_it_is_sent_is_refused(self) -> None:
        """The optimizer writes to the flat parameter, of which the boxes are views."""
        model, server = wrapped(nn.Linear(3, 2)), nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        receiver = ws.WeightReceiver(server)
        steps: list[int] = []

        def during(message: Any) -> Any:
            if steps:
                steps.pop()
                model(torch.ones(3)).sum().backward()
                optimizer.step()
            return receiver.handle(message)

        with ws.connect(model, to=during) as sender:
            sender.send_weights()
            steps.append(1)
            with pytest.raises(ws.VerificationError):
                sender.send_weights()
            sender.send_weights()
        with FullyShardedDataParallel.summon_full_params(model):
            for name, parameter in model.module.named_parameters():
                assert torch.equal(server.get_parameter(name), parameter)

    def test_a_parameter_with_new_memory_is_refused_until_torch_has_copied_it(self) -> None:
        """As averages of weights are swapped in; the flat parameter has the former values then."""
        model, server = wrapped(nn.Linear(3, 2), use_orig_params=True), nn.Linear(3, 2)
        with (
            closing(ws.WeightReceiver(server)) as receiver,
            ws.connect(model, to=receiver) as sender,
        ):
            sender.send_weights()
            model.module.bias.data = torch.tensor([5.0, 6.0])
            with pytest.raises(ws.ManifestMismatchError, match=r"of 1 parameters .*: bias; write"):
                sender.send_weights()
            model(torch.ones(3))
            sender.send_weights()
            assert server.bias.tolist() == [5.0, 6.0]

    def test_a_part_of_a_wrapped_model_is_refused(self) -> None:
        model = wrapped(nn.Linear(3, 2), use_orig_params=True)
        with pytest.raises(ws.ConfigError, match=r"2 parameters are pieces .* weight, bias; give"):
            as_source(model.module)

    def test_a_module_source_is_told_what_to_give(self) -> None:
        with pytest.raises(ws.ConfigError, match=r"give it to connect\(\) itself"):
            ModuleSource(wrapped(nn.Linear(3, 2)))


class TestZero:
    """With stand-ins of parameters that DeepSpeed marks so; the real ones are in tests/e2e."""

    def marked(self, **marks: Any) -> Any:
        model: Any = nn.Linear(3, 2)
        part = torch.zeros(6)
        vars(part).update(marks.pop("part", {}))
        vars(model.weight).update(marks)
        if not marks.get("ds_is_replaced_module"):
            vars(model.weight).update(ds_tensor=part, ds_shape=(2, 3))
        return model

    @pytest.mark.parametrize(
        ("marks", "words"),
        [
            ({"ds_is_replaced_module": True}, "split by DeepSpeed's tensor parallelism: weight"),
            ({"allreduce": False}, "of experts, which every rank names from 0: weight"),
            ({"part": {"ds_quant_scale": 1}}, "quantized by ZeRO-3: weight"),
            ({"part": {"final_location": "nvme"}}, "offloaded to a disk by ZeRO-3: weight"),
        ],
    )
    def test_what_is_refused(self, marks: dict[str, Any], words: str) -> None:
        with pytest.raises(ws.ConfigError, match=f"1 parameters are {words}; give"):
            as_source(self.marked(**marks))

    def test_experts_that_other_ranks_have_others_of_are_refused_without_zero_3(self) -> None:
        """As DeepSpeed's MoE marks them: each rank names its own from 0."""
        model: Any = nn.Linear(3, 2)
        vars(model.weight).update(allreduce=False, group_name="ep_size_2")
        with pytest.raises(ws.ConfigError, match=r"1 parameters are of experts, .*: weight; give"):
            as_source(model)
        model.weight.group_name = "ep_size_1"  # every rank has all
        assert isinstance(as_source(model), ModuleSource)

    def test_a_module_source_is_told_what_to_give(self) -> None:
        model = self.marked()
        model.weight.data = torch.empty(0)
        with pytest.raises(ws.ConfigError, match="in pieces of DeepSpeed's ZeRO-3"):
            ModuleSource(model)

    @pytest.mark.usefixtures("alone")
    def test_a_split_among_other_ranks_than_the_group_is_refused(self) -> None:
        """MiCS: the place of a rank in the group does not tell which run it has."""
        model = self.marked(ds_numel=6, ds_process_group=None, part={"ds_numel": 3})
        with pytest.raises(ws.ConfigError, match="split among a part of the ranks"):
            as_source(model)
        model.weight.ds_tensor.ds_numel = 6
        assert isinstance(as_source(model), FlatSource)
