"""Recordings of what a `load_weights` reads, proved, and tensors of which one box is held."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.integrations.vllm.slices import (
    Reads,
    Sliced,
    SlicedTensor,
    UnreadError,
    boxes_of,
    cut,
    nothing_of,
    prove,
    record,
)
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.shards import Slice

Pairs = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["Worker", torch.Tensor], object]

ROWS, COLUMNS, EXPERTS, HALF = 8, 6, 4, 4


class Worker(nn.Module):
    """One of two workers, which load halves of tensors; `loaders` may load some in another way."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, **loaders: Loader) -> None:
        super().__init__()
        self.rank = rank
        self.loaders = loaders
        self.qkv = nn.Parameter(torch.full((3 * HALF, COLUMNS), -1.0).to(dtype))
        self.out = nn.Parameter(torch.full((COLUMNS, HALF), -1.0).to(dtype))
        self.norm = nn.Parameter(torch.full((COLUMNS,), -1.0).to(dtype))
        self.experts = nn.Parameter(torch.full((EXPERTS // 2, COLUMNS, ROWS), -1.0).to(dtype))
        self.vocab = nn.Parameter(torch.full((HALF, COLUMNS), -1.0).to(dtype))
        self.more = nn.Parameter(torch.full((COLUMNS,), -1.0).to(dtype))

    def load_weights(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            getattr(self, f"_load_{name}")(weight)

    def _fused(self, at: int, weight: torch.Tensor) -> None:
        place = self.qkv.data.narrow(0, at * HALF, HALF)
        place.copy_(weight.narrow(0, self.rank * HALF, HALF))

    def _load_q(self, weight: torch.Tensor) -> None:
        self._fused(0, weight)

    def _load_k(self, weight: torch.Tensor) -> None:
        self._fused(1, weight)

    def _load_v(self, weight: torch.Tensor) -> None:
        self._fused(2, weight)

    def _load_out(self, weight: torch.Tensor) -> None:
        self.out.data.copy_(weight[:, self.rank * HALF : (self.rank + 1) * HALF])

    def _load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data.copy_(weight)

    def _load_experts(self, weight: torch.Tensor) -> None:
        own = weight[self.rank * 2 : self.rank * 2 + 2]
        self.experts.data.copy_(own.permute(0, 2, 1).contiguous())

    def _load_vocab(self, weight: torch.Tensor) -> None:
        """The vocabulary is padded: the last worker has fewer rows."""
        own = weight[self.rank * HALF :][:HALF]
        self.vocab.data[: own.shape[0]].copy_(own)
        self.vocab.data[own.shape[0] :].fill_(0)

    def _load_more(self, weight: torch.Tensor) -> None:
        self.loaders["more"](self, weight)

    def _load_unused(self, weight: torch.Tensor) -> None:
        pass


SHAPES = {
    "q": (ROWS, COLUMNS),
    "k": (ROWS, COLUMNS),
    "v": (ROWS, COLUMNS),
    "out": (COLUMNS, ROWS),
    "norm": (COLUMNS,),
    "experts": (EXPERTS, ROWS, COLUMNS),
    "vocab": (ROWS - 2, COLUMNS),
    "unused": (ROWS, COLUMNS),
}


def recorded(
    worker: Worker, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: str = "float32"
) -> dict[str, Reads]:
    """Record and prove; the worker keeps what it has."""
    before = {name: value.clone() for name, value in worker.state_dict().items()}
    without = Worker(worker.rank, torch.float32, **worker.loaders).to("meta")
    given = [(name, TensorSpec(name, dtype, shape)) for name, shape in shapes.items()]
    reads = record(without, without.load_weights, given)
    prove(worker, worker.load_weights, [(name, reads[name]) for name in shapes])
    assert all(torch.equal(value, before[name]) for name, value in worker.state_dict().items())
    return reads


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_each_tensor_has_the_box_that_the_worker_loads(rank: int, dtype: str) -> None:
    worker = Worker(rank, getattr(torch, dtype))
    reads = recorded(worker, dtype=dtype)
    half, whole = (rank * HALF, rank * HALF + HALF), (0, COLUMNS)
    assert [each.reason for each in reads.values()] == [""] * len(SHAPES)
    assert {name: each.box.spans if each.box else None for name, each in reads.items()} == {
        "q": ((half,), (whole,)),
        "k": ((half,), (whole,)),
        "v": ((half,), (whole,)),
        "out": ((whole,), (half,)),
        "norm": ((whole,),),
        "experts": (((rank * 2, rank * 2 + 2),), ((0, ROWS),), (whole,)),
        "vocab": (((rank * HALF, min(ROWS - 2, rank * HALF + HALF)),), (whole,)),
        "unused": None,
    }
    assert reads["k"].places == {"qkv"}
    assert reads["experts"].places == {"experts"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_gets_boxes_loads_what_it_loads_of_whole_tensors(rank: int) -> None:
    reads = recorded(Worker(rank))
    pairs = [(name, torch.randn(shape)) for name, shape in SHAPES.items()]
    wanted, found = Worker(rank), Worker(rank)
    wanted.load_weights(pairs)
    found.load_weights((name, cut(name, tensor, reads[name].box)) for name, tensor in pairs)
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_boxes_of_a_manifest_lie_in_an_arena() -> None:
    reads = recorded(Worker(1))
    manifest = Manifest(tuple(TensorSpec(n, "float32", s) for n, s in SHAPES.items()))
    sliced = boxes_of(manifest, reads)
    assert sliced.saves(manifest)
    assert [i for i, _ in sliced.boxes] == list(range(len(SHAPES) - 1))  # nothing of `unused`
    assert sliced.places[2] == 2
    memory = sliced.in_arena(manifest, torch.empty(sliced.nbytes(manifest), dtype=torch.uint8))
    assert [flat.numel() for flat in memory.tensors] == [96, 96, 96, 96, 24, 384, 48]
    assert memory.shares is not None
    assert sum(block.width * block.height for block in memory.shares[3].blocks) == 96


COMPUTING: dict[str, tuple[Loader, str]] = {
    "a factor": (lambda w, t: w.more.data.copy_(t[:COLUMNS] * 2), r"computes with it \(aten.mul"),
    "a factor of a copy": (
        lambda w, t: w.more.data.copy_(t[:COLUMNS].clone().mul_(2)),
        r"computes with it \(aten.mul_",
    ),
    "a factor of the parameter": (
        lambda w, t: w.more.data.copy_(t[:COLUMNS]).mul_(2),
        r"computes with it \(aten.mul_",
    ),
    "a parameter that is read again": (
        lambda w, t: w.more.data.copy_(w.more.data.copy_(t[:COLUMNS]).exp()),
        r"computes with it \(aten.exp",
    ),
    "a copy in a buffer, scaled": (
        lambda w, t: w.more.data.copy_(torch.zeros_like(w.more.data).copy_(t[:COLUMNS]) / 3),
        r"computes with it \(aten.div",
    ),
    "a write to the tensor": (
        lambda w, t: w.more.data.copy_(t.zero_()[:COLUMNS]),
        r"writes to it \(aten.zero_",
    ),
    "no box": (
        lambda w, t: w.more.data.copy_(t.view(3, 4)[:2, :3].reshape(-1)),
        "a view of .* is no box of it",
    ),
}


@pytest.mark.parametrize("case", COMPUTING)
def test_a_tensor_that_is_not_only_moved_stays_whole(case: str) -> None:
    loader, reason = COMPUTING[case]
    shape = (2, COLUMNS) if case == "no box" else (2 * COLUMNS,)
    reads = recorded(Worker(0, more=loader), {"more": shape, "q": SHAPES["q"]})
    assert re.search(reason, reads["more"].reason), reads["more"].reason
    assert reads["more"].box == Slice.whole_of(shape)
    assert reads["q"].box is not None
    assert not reads["q"].box.is_whole


def _reads_elsewhere_with_memory(worker: Worker, weight: torch.Tensor) -> None:
    """Read another half where the tensor has elements: the recording does not see it."""
    at = 0 if weight.is_meta else COLUMNS
    worker.more.data.copy_(weight[at : at + COLUMNS])


def _turns_sliced(worker: Worker, weight: torch.Tensor) -> None:
    """Load the right elements in another order where the tensor is sliced."""
    own = weight[:COLUMNS].clone()
    worker.more.data.copy_(own.flip(0) if isinstance(weight, SlicedTensor) else own)


def _skips_sliced(worker: Worker, weight: torch.Tensor) -> None:
    if not isinstance(weight, SlicedTensor):
        worker.more.data.copy_(weight[:COLUMNS])


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (_reads_elsewhere_with_memory, "UnreadError: more: load_weights reads elements"),
        (_turns_sliced, "more gets other elements than of the whole tensor"),
        (_skips_sliced, "more gets other elements than of the whole tensor"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_box_that_is_not_proved_stays_whole(loader: Loader, reason: str, dtype: str) -> None:
    worker = Worker(0, getattr(torch, dtype), more=loader)
    reads = recorded(worker, {"q": SHAPES["q"], "more": (2 * COLUMNS,)}, dtype)
    assert reads["more"].reason.startswith("its box was not proved: ")
    assert reason in reads["more"].reason
    assert reads["q"].reason == ""


def test_positions_that_a_dtype_cannot_hold_are_told_apart_by_their_digits() -> None:
    """Elements 0 and 65536 have equal last digits, of 16 bits: bfloat16 would not tell them."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.bfloat16))

        def load_weights(self, pairs: Pairs) -> None:
            for _, weight in pairs:
                at = 0 if isinstance(weight, SlicedTensor) else 1 << 16
                self.weight.data.copy_(weight[at : at + 8])

    model = Long()
    reads = Reads(TensorSpec("w", "bfloat16", (1 << 17, 1)), [[(0, 1 << 16)], [(0, 1)]])
    prove(model, model.load_weights, [("w", reads)])
    assert "other elements" in reads.reason


def test_a_cast_keeps_the_digits() -> None:
    """A trainer's bfloat16 in a float32 parameter: positions are numbers that both hold."""

    def load(worker: Worker, weight: torch.Tensor) -> None:
        worker.more.data.copy_(weight[:COLUMNS])

    def other(worker: Worker, weight: torch.Tensor) -> None:
        own = weight[:COLUMNS].to(torch.float32)
        worker.more.data.copy_(own.flip(0) if isinstance(weight, SlicedTensor) else own)

    shapes: dict[str, tuple[int, ...]] = {"more": (2 * COLUMNS,)}
    assert recorded(Worker(0, more=load), shapes, "bfloat16")["more"].reason == ""
    assert "other elements" in recorded(Worker(0, more=other), shapes, "bfloat16")["more"].reason


class Layers(nn.Module):
    """Layers whose loaders are alike; `turned` is one that reads in another order."""

    def __init__(self, count: int, turned: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(4, 3) for _ in range(count))
        self.turned = turned
        self.loads = 0

    def load_weights(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            self.loads += 1
            own = weight[4:].contiguous().clone()
            at = int(name)
            self.layers[at].data.copy_(own.as_strided((4, 3), (1, 4)) if at == self.turned else own)


def test_one_of_tensors_that_are_loaded_alike_is_proved() -> None:
    without = Layers(6, turned=4).to("meta")
    given = [(str(i), TensorSpec(str(i), "float32", (8, 3))) for i in range(6)]
    reads = record(without, without.load_weights, given)
    model = Layers(6, turned=4)
    prove(model, model.load_weights, [(name, reads[name]) for name, _ in given])
    assert model.loads == 2 * 2  # each whole and as a box: one of five, and the turned one
    assert [each.reason for each in reads.values()] == [""] * 6

    def refusing(pairs: Pairs) -> None:
        if any(isinstance(tensor, SlicedTensor) for _, tensor in pairs):
            raise ValueError("planted")

    prove(model, refusing, [(name, reads[name]) for name, _ in given])
    assert all("ValueError: planted" in each.reason for each in reads.values())


def test_a_dtype_without_numbers_of_positions_stays_whole() -> None:
    def load(worker: Worker, weight: torch.Tensor) -> None:
        worker.more.data.copy_(weight[:COLUMNS])

    reads = recorded(Worker(0, more=load), {"more": (2 * COLUMNS,)}, "bool")
    assert reads["more"].reason.endswith("no numbers of positions in torch.bool")


def sliced(box: tuple[Any, ...], whole: torch.Tensor) -> SlicedTensor:
    return cut("w", whole, Slice(tuple(whole.shape), box))


def test_a_sliced_tensor_reads_its_box_through_any_view() -> None:
    whole = torch.randn(4, 6, 8)
    tensor = sliced((((1, 3),), ((0, 2), (4, 6)), ((2, 8),)), whole)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[1:3, 4:6, 2:8],
        lambda t: t[1:3, 0:2, 2:8].permute(2, 0, 1),
        lambda t: t[2].narrow(0, 4, 2)[:, 3:7].t(),
        lambda t: t.transpose(0, 2)[2:8:2, 5, 1:3],
        lambda t: t[1, 0, 2:8].unsqueeze(0).expand(3, 6),
        lambda t: t.view(4, 6, 2, 4)[1:3, 4:6, 1, :],
        lambda t: t.chunk(2, dim=2)[1][1:3, 0:1],
        lambda t: t[1:1, 0:1],
        lambda t: t.data[1:3, 4, 2:4].detach(),
    ]
    for i, view in enumerate(views):
        assert torch.equal(view(tensor).clone(), view(whole)), i
    assert tensor[1, 0, 2].item() == whole[1, 0, 2].item()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[0:2, 0:2, 2:8],
        lambda t: t[1:3, 1:5, 2:8],  # over the gap
        lambda t: t[1:3, 0:2, 1:8],
        lambda t: t[1:3].view(-1),
        lambda t: t.view(torch.int32)[1:3, 0:2, 2:8],
    ],
)
def test_a_sliced_tensor_refuses_to_read_what_it_does_not_hold(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = sliced((((1, 3),), ((0, 2), (4, 6)), ((2, 8),)), torch.randn(4, 6, 8))
    with pytest.raises(UnreadError, match="w: load_weights reads elements that it did not read"):
        view(tensor).clone()
    with pytest.raises(UnreadError):
        nothing_of("w", (4, 6, 8), torch.float32)[0].clone()


def test_a_sliced_tensor_is_not_written_to() -> None:
    tensor = sliced((((1, 3),),), torch.randn(4))
    with pytest.raises(Exception, match="load_weights writes to a tensor that it is given"):
        tensor[1:3].zero_()


def test_little_to_save_is_nothing_saved() -> None:
    manifest = Manifest((TensorSpec("w", "uint8", (6400,)),))
    assert not Sliced([(0, Slice((6400,), (((0, 6000),),)))], {}).saves(manifest)
    assert Sliced([(0, Slice((6400,), (((0, 5760),),)))], {}).saves(manifest)
