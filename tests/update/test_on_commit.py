"""`on_commit`: what is derived from the weights changes with them, or neither does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.server.live import TOKEN, make_app, serving
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.copying import arena
from weightsync.weights.sinks.module_sink import ModuleSink, Swap

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 60.0


class Model(nn.Module):
    """A weight, a strided one, and a buffer that is derived from the weight and not sent."""

    derived: torch.Tensor

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), value))
        self.strided = nn.Parameter(torch.full((8, 4), value).t())
        self.register_buffer("derived", self.weight.detach() + 1, persistent=False)

    def derive(self) -> None:
        with torch.no_grad():
            self.derived.copy_(self.weight + 1)

    def is_whole(self, value: float) -> bool:
        parts = (self.weight, self.strided, self.derived - 1)
        return all(torch.equal(part, torch.full_like(part, value)) for part in parts)


def fill(model: Model, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)
        model.strided.fill_(value)


class Derives:
    """Derives the buffer; raises after it in each call of `fails`, counted from 1."""

    def __init__(self, served: Model, *fails: int) -> None:
        self.served = served
        self.fails = fails
        self.versions: list[int] = []

    def __call__(self, version: int) -> None:
        self.versions.append(version)
        self.served.derive()
        if len(self.versions) in self.fails:
            raise RuntimeError("cannot be derived")


def trained(value: float) -> Model:
    return Model(value)


@pytest.mark.parametrize("through", ["in process", "http"])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("delta", ["off", "always"])
def test_it_runs_in_each_commit(apply: ApplyChoice, delta: Any, through: str) -> None:
    served = Model()
    derives, source = Derives(served), trained(1.0)
    receiver = ws.WeightReceiver(served, apply=apply, on_commit=derives)
    with ExitStack() as stack:
        stack.callback(receiver.close)
        to: Any = receiver.handle
        token = None
        if through == "http":
            to, token = stack.enter_context(serving(make_app(receiver))), TOKEN
        sender = stack.enter_context(ws.connect(source, to=to, delta=delta, token=token))
        for step in (1, 2, 3):
            fill(source, float(step))
            sender.send_weights()
            assert served.is_whole(step)
        with sender.update(partial=True) as update:
            update.send([("weight", torch.full((8, 8), 9.0))])
        assert torch.equal(served.derived, served.weight + 1)
    assert derives.versions == [1, 2, 3, 4]


def test_the_order_swap_then_on_commit_then_the_cache_while_nobody_reads() -> None:
    served, source = Model(), trained(1.0)
    seen: list[object] = []

    def on_commit(version: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            kept_out = pool.submit(is_kept_out, receiver).result(WAIT_S)
        with pytest.raises(ws.NotReadyError):
            receiver.reading().__enter__()
        weight = float(served.weight.detach()[0, 0])
        seen.append(("commit", version, receiver.version, weight, kept_out))

    receiver = ws.WeightReceiver(
        served, on_commit=on_commit, on_clear_cache=lambda: seen.append("cache")
    )
    to: Any = receiver.handle
    with closing(receiver), ws.connect(source, to=to) as sender:
        sender.send_weights()
        assert seen == [("commit", 1, 0, 1.0, True), "cache"]
        seen.clear()
        receiver.handle({"call": "reset_prefix_cache", "body": {}})
        assert seen == ["cache"]
        seen.clear()

        def keeps_the_cache(message: dict[str, Any]) -> object:
            if message["call"] == "finish_weight_update":
                message["body"]["clear_cache"] = False
            return receiver.handle(message)

        with ws.connect(source, to=keeps_the_cache, takeover=True) as other:
            other.send_weights()
        assert seen == [("commit", 2, 1, 1.0, True)]


def is_kept_out(receiver: ws.WeightReceiver) -> bool:
    try:
        with receiver.reading(timeout_s=0.05):
            return False
    except ws.NotReadyError:
        return True


@pytest.mark.parametrize("swap", ["pointer", "copy"])
@pytest.mark.parametrize("delta", ["off", "always"])
@pytest.mark.parametrize("first", [True, False], ids=["the first update", "a later one"])
def test_a_staged_module_keeps_its_weights_where_it_raises(
    first: bool, delta: Any, swap: Swap
) -> None:
    served, source = Model(7.0), trained(1.0)
    derives = Derives(served, 1 if first else 3)
    receiver = ws.WeightReceiver(ModuleSink(served, swap=swap), apply="staged", on_commit=derives)
    to: Any = receiver.handle
    with closing(receiver), ws.connect(source, to=to, delta=delta) as sender:
        if not first:
            for step in (1, 2):
                fill(source, float(step))
                sender.send_weights()
        before = receiver.version
        fill(source, 5.0)
        with pytest.raises(ws.RemoteError, match="cannot be derived"):
            sender.send_weights()
        status = receiver.status()
        assert (status.state, status.version, status.may_generate) == ("READY", before, True)
        assert served.is_whole(7.0 if first else 2.0)
        assert derives.versions[-2:] == [before + 1, before]
        for step in (6, 7, 8):
            fill(source, float(step))
            sender.send_weights()
            assert served.is_whole(step)
        assert receiver.updates_total["aborted"] == 1


def test_tensors_that_other_code_replaced_get_their_own_memory_back() -> None:
    served, source = Model(), trained(1.0)
    derives = Derives(served, 2)
    receiver = ws.WeightReceiver(served, apply="staged", on_commit=derives)
    to: Any = receiver.handle
    with closing(receiver), ws.connect(source, to=to) as sender:
        sender.send_weights()
        served.weight = nn.Parameter(torch.full((8, 8), 4.0))
        fill(source, 2.0)
        with pytest.raises(ws.RemoteError, match="cannot be derived"):
            sender.send_weights()
        assert torch.equal(served.weight, torch.full((8, 8), 4.0))
        assert torch.equal(served.derived, served.weight + 1)
        sender.send_weights()
        assert served.is_whole(2.0)


def hooks_of(served: Model) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in pairs:
                served.get_parameter(name).copy_(tensor)

    return load


@pytest.mark.parametrize(
    "case", ["in place", "staged hook", "hook in place", "twice", "no room", "no room, copied"]
)
def test_it_is_torn_where_nothing_can_be_put_back(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, source = Model(), trained(1.0)
    derives = Derives(served, 2, 3) if case == "twice" else Derives(served, 2)
    sink: Any = hooks_of(served) if "hook" in case else served
    if "copied" in case:
        sink = ModuleSink(served, swap="copy")
    apply: ApplyChoice = "in_place" if "in place" in case else "staged"
    receiver = ws.WeightReceiver(sink, apply=apply, on_commit=derives)
    to: Any = receiver.handle
    with closing(receiver), ws.connect(source, to=to) as sender:
        sender.send_weights()
        if "no room" in case:
            monkeypatch.setattr(arena, "fits", lambda *_: False)
        fill(source, 2.0)
        with pytest.raises(ws.RemoteError, match="cannot be derived"):
            sender.send_weights()
        assert receiver.status().state == "TORN"
        assert not receiver.may_generate
        sender.send_weights()
        assert served.is_whole(2.0)
        assert receiver.status().state == "READY"


def test_of_two_receivers_one_may_refuse() -> None:
    served, source = [Model(), Model()], trained(1.0)
    derives = [Derives(served[0]), Derives(served[1], 2, 4)]
    receivers = [
        ws.WeightReceiver(module, on_commit=derive)
        for module, derive in zip(served, derives, strict=True)
    ]
    to: Any = [receiver.handle for receiver in receivers]
    with ws.connect(source, to=to) as sender:
        sender.send_weights()
        fill(source, 2.0)
        with pytest.raises(ws.RemoteError, match="cannot be derived"):
            sender.send_weights()
        assert served[0].is_whole(2.0)
        assert served[1].is_whole(1.0)
        assert [r.status().state for r in receivers] == ["READY", "READY"]
        sender.send_weights()
        assert all(module.is_whole(2.0) for module in served)
    for receiver in receivers:
        receiver.close()
