"""Groups of tensors for a hook, which streams fill in any order."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from weightsync.backends.assembly import Assembly, GroupPlan
from weightsync.backends.base import Check, LoadContext, Received
from weightsync.errors import TransferTimeout
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.rank_streams import RankStream
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sinks.base import LoadTarget, NamedTensor

LAYERS = 6
WAIT_S = 20.0


class Taking(LoadTarget):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[list[float]] = []

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        for name, tensor in pairs:
            self.names.append(name)
            self.values.append(tensor.tolist())

    def commit(self) -> None:
        raise NotImplementedError


def _halves(rank: int, order: Sequence[int], model: Manifest) -> RankStream:
    box = Slice((2,), (((rank, rank + 1),),))
    return RankStream(rank, model, order, [box] * len(order))


@pytest.mark.parametrize(
    "orders",
    [
        [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],
        [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0]],
        [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]],
        [[3, 4, 5, 0, 1, 2], [4, 5, 3, 2, 0, 1]],
    ],
)
def test_groups_arrive_in_order_whatever_the_order_of_the_streams(orders: list[list[int]]) -> None:
    """Boxes that are cut for other receivers are sent in the order of these."""
    model = Manifest(tuple(TensorSpec(f"layers.{i}.w", "float32", (2,)) for i in range(LAYERS)))
    streams = [_halves(rank, order, model) for rank, order in enumerate(orders)]
    target = Taking()
    deadline = time.monotonic() + WAIT_S

    def check() -> None:
        if time.monotonic() > deadline:
            raise TransferTimeout("the streams and the hook wait for each other")

    def receive(stream: int, part: LoadTarget, _: Check) -> Received:
        specs = streams[stream].manifest.specs
        for spec, index in zip(specs, streams[stream].indices, strict=True):
            part.load([(spec.name, torch.tensor([10.0 * index + stream]))])
        return Received(model, [], "none")

    context = LoadContext(
        open_target=lambda _: target, mark_dirty=lambda: None, check=check, verification="arrived"
    )
    Assembly(GroupPlan(model, streams, None), target, context, []).run(receive)
    assert target.names == [spec.name for spec in model.specs]
    assert target.values == [[10.0 * i, 10.0 * i + 1] for i in range(LAYERS)]
