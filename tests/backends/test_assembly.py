"""Groups of tensors for a hook, which streams fill in any order."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from weightsync.backends import assembly as assembly_module
from weightsync.backends.assembly import Assembly, GroupPlan
from weightsync.backends.base import Check, LoadContext, Received
from weightsync.errors import NotReadyError, TransferError, TransferTimeout
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
        self.places: list[int] = []

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        for name, tensor in pairs:
            self.names.append(name)
            self.values.append(tensor.tolist())
            self.places.append(tensor.data_ptr())

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


def model_of(layers: int = 2) -> tuple[Manifest, list[RankStream]]:
    model = Manifest(tuple(TensorSpec(f"layers.{i}.w", "float32", (2,)) for i in range(layers)))
    return model, [_halves(rank, range(layers), model) for rank in range(2)]


def send(stream: RankStream, part: LoadTarget) -> Received:
    for spec in stream.manifest.specs:
        part.load([(spec.name, torch.ones(1))])
    return Received(stream.manifest, [], "none")


def context_of(target: LoadTarget, *, lends_views: bool = True) -> LoadContext:
    return LoadContext(
        open_target=lambda _: target,
        mark_dirty=lambda: None,
        check=lambda: None,
        verification="arrived",
        lends_views=lends_views,
    )


def test_a_sink_that_keeps_views_gets_the_buffer_itself() -> None:
    """It makes its own clones: nothing is copied twice."""
    model, streams = model_of()
    target = Taking()
    spare: list[torch.Tensor] = []
    assembly = Assembly(
        GroupPlan(model, streams, None), target, context_of(target, lends_views=False), spare
    )
    assembly.run(lambda stream, part, _: send(streams[stream], part))
    assert set(target.places) <= {buffer.data_ptr() for buffer in spare}


class Refusing(Taking):
    """Raises an error that is, from code of a user, wrapped."""

    def __init__(self, *, users_own: bool) -> None:
        super().__init__()
        self.users_own = users_own

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        raise NotReadyError("from the target")


@pytest.mark.parametrize("lends_views", [True, False])
@pytest.mark.parametrize(("users_own", "kind"), [(True, TransferError), (False, NotReadyError)])
def test_errors_of_a_users_hook_are_wrapped(
    users_own: bool, kind: type[Exception], lends_views: bool
) -> None:
    """One that a sender would take for its own is not raised by code of the user."""
    model, streams = model_of()
    target = Refusing(users_own=users_own)
    context = context_of(target, lends_views=lends_views)
    assembly = Assembly(GroupPlan(model, streams, None), target, context, [])
    with pytest.raises(kind) as caught:
        assembly.run(lambda stream, part, _: send(streams[stream], part))
    assert type(caught.value) is kind


def test_a_thread_that_cannot_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, streams = model_of()
    started: list[threading.Thread] = []
    genuine = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        genuine(thread)

    def receive(stream: int, part: LoadTarget, check: Check) -> Received:
        while True:  # as a reader that waits for its sender
            check()
            time.sleep(0.001)

    target = Taking()
    assembly = Assembly(GroupPlan(model, streams, None), target, context_of(target), [])
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        assembly.run(receive)
    assert not started[0].is_alive()


def test_a_gpu_is_waited_for_before_and_after_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and the hook may enqueue their copies on CUDA streams that none of the others see."""
    model, streams = model_of(layers=1)
    order: list[str] = []

    class Ordered(Taking):
        def load(self, pairs: Sequence[NamedTensor]) -> None:
            order.append("hook")

    monkeypatch.setattr(assembly_module, "wait_for_all_streams", lambda _: order.append("wait"))
    target = Ordered()
    assembly = Assembly(GroupPlan(model, streams, None), target, context_of(target), [])
    assembly.run(lambda stream, part, _: send(streams[stream], part))
    assert order == ["wait", "hook", "wait"]
