"""`dtype="receiver"`: each tensor arrives in the dtype in which its receiver keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.server.live import TOKEN, make_app, serving
from tests.server.test_workers import workers_app
from weightsync.server.workers import Workers
from weightsync.specs import Manifest
from weightsync.weights.sinks.base import HookSink
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.weights.sources.wrapping import WrappingSource

pytestmark = pytest.mark.usefixtures("shm_clean")


class Model(nn.Module):
    """A projection, a router that may have more digits, a tied head, and a buffer of integers."""

    def __init__(self, dtype: torch.dtype, router: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32, dtype=dtype)
        self.up = nn.Linear(32, 48, dtype=dtype)
        self.router = nn.Linear(32, 8, bias=False, dtype=router or dtype)
        self.head = nn.Linear(32, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(4))


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def assert_holds(served: nn.Module, trained: nn.Module) -> None:
    """The served tensors are the trained ones, rounded once to the dtypes of the served module."""
    sent = dict(trained.named_parameters(remove_duplicate=False))
    for name, parameter in served.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, sent[name].to(parameter.dtype)), name


class Wrapped(WrappingSource):
    """The tensors of a source, as another kind of source."""

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "module": lambda model: model,
    "state dict": lambda model: model.state_dict(),
    "callable": lambda model: model.state_dict,
    "wrapping source": Wrapped,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("delta", ["off", "always"])
def test_each_tensor_is_cast_to_what_the_receiver_keeps(kind: str, apply: Any, delta: Any) -> None:
    trained, served = Model(torch.float32), Model(torch.bfloat16, router=torch.float32)
    receiver = ws.WeightReceiver(served, apply=apply)
    source = KINDS[kind](trained)
    with ws.connect(source, to=receiver.handle, dtype="receiver", delta=delta) as sender:
        for _ in range(3):
            step(trained)
            report = sender.send_weights()
            assert_holds(served, trained)
    assert report.casts == {"float32 to bfloat16": 3}
    assert report.receivers[0].casts == {}
    assert report.verified == "held"
    receiver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_to_be_cast_it_is_sent_as_it_is(kind: str) -> None:
    trained, served = Model(torch.float32), Model(torch.float32)
    receiver = ws.WeightReceiver(served)
    with ws.connect(KINDS[kind](trained), to=receiver.handle, dtype="receiver") as sender:
        report = sender.send_weights()
    assert_holds(served, trained)
    assert report.casts == {}
    assert report.packed is (kind != "module")
    receiver.close()


@pytest.mark.parametrize("delta", ["off", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_receivers_of_unlike_dtypes(kind: str, delta: Any) -> None:
    trained = Model(torch.float32)
    served = [
        Model(torch.bfloat16, router=torch.float32),
        Model(torch.bfloat16),
        Model(torch.bfloat16, router=torch.float16),
    ]
    receivers = [
        ws.WeightReceiver(served[0]),
        ws.WeightReceiver(served[1], apply="in_place"),
        ws.WeightReceiver(ModuleSink(served[2], swap="copy"), apply="staged"),
    ]
    to = [receiver.handle for receiver in receivers]
    with ws.connect(KINDS[kind](trained), to=to, dtype="receiver", delta=delta) as sender:
        for _ in range(3):
            step(trained)
            report = sender.send_weights()
            for model in served:
                assert_holds(model, trained)
    assert report.casts == {"float32 to bfloat16": 3}
    assert [one.casts for one in report.receivers] == [
        {},
        {"float32 to bfloat16": 1},
        {"float32 to float16": 1},
    ]
    for receiver in receivers:
        receiver.close()


def test_a_receiver_that_may_cast_does_so_for_that_sender_alone() -> None:
    trained = Model(torch.float32)
    served = [Model(torch.float32), Model(torch.bfloat16)]
    receivers = [ws.WeightReceiver(model) for model in served]
    to = [receiver.handle for receiver in receivers]
    with ws.connect(trained, to=to, dtype="receiver") as sender:
        sender.send_weights()
        with sender.update(partial=True) as update:
            update.send([("router.weight", torch.full((8, 32), 1 / 3))])
        assert torch.equal(served[1].router.weight, torch.full((8, 32), 1 / 3).bfloat16())
    with pytest.raises(ws.ManifestMismatchError, match="offered float32"):
        ws.connect(trained, to=receivers[1].handle)
    with ws.connect(trained, to=receivers[1].handle, dtype="receiver") as sender:
        step(trained)
        sender.send_weights()
    assert_holds(served[1], trained)
    for receiver in receivers:
        receiver.close()


def test_receivers_that_are_added_later() -> None:
    """They may keep any dtype of a tensor that receivers cast themselves, else the one sent."""
    trained = Model(torch.float32)
    exact = [Model(torch.float32), Model(torch.float32)]
    rounded = [Model(torch.bfloat16), Model(torch.bfloat16), Model(torch.bfloat16)]
    receivers = [ws.WeightReceiver(model) for model in (*exact, *rounded)]
    a, b, c, d, e = (receiver.handle for receiver in receivers)
    with ws.connect(trained, to=[a, c], dtype="receiver") as sender:
        for added in (b, d):
            step(trained)
            sender.send_weights()
            sender.add(added)
            for model in (*exact[: 1 + (added is d)], *rounded[: 1 + (added is d)]):
                assert_holds(model, trained)
        step(trained)
        sender.send_weights()
    for model in (*exact, *rounded[:2]):
        assert_holds(model, trained)
    with ws.connect(trained, to=e, dtype="receiver") as sender:
        with pytest.raises(ws.ManifestMismatchError, match="offered bfloat16"):
            sender.add(a)
        sender.send_weights()
    assert_holds(rounded[2], trained)
    for receiver in receivers:
        receiver.close()


def test_over_http_the_workers_of_a_server_say_it_together() -> None:
    trained = Model(torch.float32)
    served = [Model(torch.bfloat16), Model(torch.bfloat16, router=torch.float32)]
    receivers = [ws.WeightReceiver(model) for model in served]
    alone = Model(torch.bfloat16)
    other = ws.WeightReceiver(alone)
    with ExitStack() as stack:
        for receiver in (*receivers, other):
            stack.callback(receiver.close)
        workers = Workers(dict(zip(("0", "1"), receivers, strict=True)))
        urls = [
            stack.enter_context(serving(app)) for app in (workers_app(workers), make_app(other))
        ]
        sender = stack.enter_context(ws.connect(trained, to=urls, token=TOKEN, dtype="receiver"))
        step(trained)
        report = sender.send_weights()
    for model in (*served, alone):
        assert_holds(model, trained)
    assert [dict(one.casts) for one in report.receivers].count({}) == 1


def hook_of(got: dict[str, torch.Tensor]) -> Callable[[Any], list[str]]:
    def load(pairs: Any) -> list[str]:
        now = {name: tensor.clone() for name, tensor in pairs}
        got.update(now)
        return list(now)

    return load


def manifest_of(model: nn.Module) -> Manifest:
    manifest = ModuleSink(model).manifest
    assert manifest is not None
    return manifest


def test_a_hook_that_declares_its_tensors_takes_part() -> None:
    trained, got = Model(torch.float32), dict[str, torch.Tensor]()
    wants = manifest_of(Model(torch.bfloat16, router=torch.float32))
    receiver = ws.WeightReceiver(HookSink(hook_of(got), manifest=wants))
    with ws.connect(trained, to=receiver.handle, dtype="receiver") as sender:
        sender.send_weights()
    assert got["router.weight"].dtype is torch.float32
    assert torch.equal(got["up.weight"], trained.up.weight.bfloat16())
    receiver.close()


def test_a_hook_that_says_nothing_gets_what_the_others_keep_and_alone_is_refused() -> None:
    trained, got = Model(torch.float32), dict[str, torch.Tensor]()
    hook = ws.WeightReceiver(hook_of(got))
    with pytest.raises(ws.ConfigError, match=r"does not say in which dtypes .* manifest="):
        ws.connect(trained, to=hook.handle, dtype="receiver")
    receiver = ws.WeightReceiver(Model(torch.bfloat16))
    with ws.connect(trained, to=[hook.handle, receiver.handle], dtype="receiver") as sender:
        sender.send_weights()
    assert got["router.weight"].dtype is torch.bfloat16
    hook.close()
    receiver.close()


def test_a_hook_beside_a_receiver_of_another_dtype_is_refused_by_name() -> None:
    """It is given tensors as they come, and cannot cast them."""
    trained, got = Model(torch.float32), dict[str, torch.Tensor]()
    wants = manifest_of(Model(torch.bfloat16))
    hook = ws.WeightReceiver(HookSink(hook_of(got), manifest=wants))
    receiver = ws.WeightReceiver(Model(torch.bfloat16, router=torch.float32))
    to = [receiver.handle, hook.handle]
    with pytest.raises(ws.ManifestMismatchError, match=r"router\.weight: offered float32\[8, 32\]"):
        ws.connect(trained, to=to, dtype="receiver")
    assert not got
    hook.close()
    receiver.close()


def test_an_older_receiver_does_not_say_its_dtypes() -> None:
    receiver = ws.WeightReceiver(Model(torch.bfloat16))

    def older(message: dict[str, Any]) -> dict[str, Any]:
        reply = dict(receiver.handle(message))
        reply.pop("kept", None)
        return reply

    with pytest.raises(ws.ConfigError, match="does not say in which dtypes"):
        ws.connect(Model(torch.float32), to=older, dtype="receiver")
    receiver.close()


@pytest.mark.parametrize("second", [torch.bfloat16, torch.float32], ids=str)
def test_declared_holdings_are_cast_to_one_dtype_alone(second: torch.dtype) -> None:
    tensor = torch.randn(4, 8)
    served = nn.ParameterDict(
        {"a": torch.zeros(4, 8, dtype=torch.bfloat16), "b": torch.zeros(4, 8, dtype=second)}
    )
    receiver = ws.WeightReceiver(served)
    parts = [ws.Holding(name, (4, 8), ((0, 4), (0, 8)), tensor) for name in ("a", "b")]
    if second is torch.bfloat16:
        with ws.connect(parts, to=receiver.handle, dtype="receiver") as sender:
            sender.send_weights()
        assert torch.equal(served["b"], tensor.to(second))
    else:
        with pytest.raises(ws.ConfigError, match="several dtypes"):
            ws.connect(parts, to=receiver.handle, dtype="receiver")
    receiver.close()


def test_a_receiver_says_its_dtypes_only_where_nothing_else_is_requested() -> None:
    receiver = ws.WeightReceiver(Model(torch.bfloat16, router=torch.float32))
    reply: Any = receiver.handle({"call": "init_weight_transfer_engine", "body": {}})
    assert reply["kept"]["float32"] == ["router.weight"]
    assert {"embed.weight", "head.weight"} <= set(reply["kept"]["bfloat16"])
    assert "kept" not in receiver.handle({"call": "weight_info", "body": {}})
    receiver.close()
