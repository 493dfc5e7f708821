"""A delta changes only weights whose fingerprint the receiver has found itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import weightsync as ws
from tests.update.test_deltas import Model, change, equal, sent
from tests.update.test_deltas import broken_numba as broken_numba  # noqa: PLC0414  # a fixture
from tests.update.test_deltas import compiled as compiled  # noqa: PLC0414  # a fixture
from tests.weights.meshes import member, shard
from weightsync.weights.deltas.change_log import ChangeLog
from weightsync.weights.sources.base import ModuleSource

Held = Callable[[], Mapping[str, torch.Tensor]]


@contextmanager
def module(model: Model, apply: Any, **settings: Any) -> Iterator[tuple[ws.WeightReceiver, Held]]:
    server = model.to(torch.bfloat16)
    sink = ws.ModuleSink(server, **settings)
    yield ws.WeightReceiver(sink, apply=apply), server.state_dict


@contextmanager
def cast(model: Model, apply: Any) -> Iterator[tuple[ws.WeightReceiver, Held]]:
    server = model.to(torch.float32)
    yield ws.WeightReceiver(ws.ModuleSink(server, cast=True), apply=apply), server.state_dict


@contextmanager
def hook(_: Model, apply: Any, **settings: Any) -> Iterator[tuple[ws.WeightReceiver, Held]]:
    held: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> None:
        held.update({name: tensor.clone() for name, tensor in pairs})

    yield ws.WeightReceiver(ws.HookSink(load, **settings), apply=apply), lambda: held


@contextmanager
def shards(model: Model, apply: Any) -> Iterator[tuple[ws.WeightReceiver, Held]]:
    with member(0, (1,)) as mesh:
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(shard(parameter.detach(), mesh, Shard(0))))
        receiver = ws.WeightReceiver(model, apply=apply)

        def held() -> dict[str, torch.Tensor]:
            state = model.state_dict().items()
            return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state}

        yield receiver, held


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pointer": (module, {"apply": "staged", "swap": "pointer"}),
    "copy": (module, {"apply": "staged", "swap": "copy"}),
    "in place": (module, {"apply": "in_place"}),
    "cast": (cast, {"apply": "staged"}),
    "cast in place": (cast, {"apply": "in_place"}),
    "hook": (hook, {"apply": "staged"}),
    "hook for changes": (hook, {"apply": "staged", "changed_only": True}),
    "shards": (shards, {"apply": "staged"}),
    "shards in place": (shards, {"apply": "in_place"}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
packed_or_not = pytest.mark.parametrize("packed", [None, True])


def log_of(sender: ws.WeightSender) -> ChangeLog:
    log = sender._group.worker._changes
    assert log is not None
    return log


def give_id_to_present_weights(sender: ws.WeightSender, trainer: nn.Module) -> None:
    """Have the sender take what the trainer has now for the weights of the last update."""
    log = log_of(sender)
    weights_id = log._versions[-1].weights_id
    log.record("", ModuleSource(trainer).tensors())
    for i, version in enumerate(log._versions):
        log._versions[i] = replace(version, weights_id="")
    log._versions[-1] = replace(log._versions[-1], weights_id=weights_id)


def same(trainer: nn.Module, held: Held) -> bool:
    have = held()
    return all(torch.equal(t.to(have[n].dtype), have[n]) for n, t in trainer.state_dict().items())


@packed_or_not
@every_kind
def test_deltas_of_a_known_base_go_on(kind: str, packed: bool | None) -> None:
    make, settings = KINDS[kind]
    trainer = Model()
    with (
        make(Model(1), **settings) as (receiver, held),
        ws.connect(trainer, to=receiver, delta="always", packed=packed) as sender,
    ):
        for step in range(5):
            assert sent(sender.send_weights()) == (step > 0)
            assert same(trainer, held)
            change(trainer, step)


@pytest.mark.parametrize("deltas", [0, 1, 2], ids=["after a whole model", "after one", "after two"])
@packed_or_not
@every_kind
def test_another_base_under_the_same_id_is_refused(
    kind: str, packed: bool | None, deltas: int
) -> None:
    """And the whole model follows in the same call; `scrub` is off, which would find some."""
    make, settings = KINDS[kind]
    trainer = Model()
    with (
        make(Model(1), **settings) as (receiver, held),
        ws.connect(trainer, to=receiver, delta="always", packed=packed, scrub=0) as sender,
    ):
        for step in range(deltas + 1):
            assert sent(sender.send_weights()) == (step > 0)
            change(trainer, step)
        give_id_to_present_weights(sender, trainer)
        with torch.no_grad():
            trainer.p4.add_(1)
        report = sender.send_weights()
        assert report.delta is not None
        assert "they are not the same" in report.delta.reason
        assert same(trainer, held)
        for step in range(3):
            change(trainer, 10 + step)
            assert sent(sender.send_weights())
            assert same(trainer, held)


@every_kind
def test_without_fingerprints_of_updates_too(kind: str) -> None:
    make, settings = KINDS[kind]
    trainer = Model()
    with (
        make(Model(1), **settings) as (receiver, held),
        ws.connect(trainer, to=receiver, delta="always", verify=False) as sender,
    ):
        sender.send_weights()
        change(trainer, 1)
        give_id_to_present_weights(sender, trainer)
        assert not sent(sender.send_weights())
        assert same(trainer, held)
        change(trainer, 2)
        assert sent(sender.send_weights())
        assert same(trainer, held)


def test_one_that_fetched_its_weights() -> None:
    trainer, first, second = Model(), Model(1), Model(2)
    with ws.connect(trainer, to=ws.WeightReceiver(first), delta="always", scrub=0) as sender:
        sender.send_weights()
        sender.add(ws.WeightReceiver(second))
        change(trainer, 1)
        assert sent(sender.send_weights())
        assert equal(trainer, second)
        change(trainer, 2)
        give_id_to_present_weights(sender, trainer)
        report = sender.send_weights()
        assert report.delta is not None
        assert "they are not the same" in report.delta.reason
        assert equal(trainer, first)
        assert equal(trainer, second)


@every_kind
@packed_or_not
@pytest.mark.usefixtures("broken_numba")
def test_every_kind_takes_whole_models_where_numba_turns_out_not_to_compile(
    kind: str, packed: bool | None
) -> None:
    """The sender's numba compiles: it says of each update that a delta follows."""
    make, settings = KINDS[kind]
    trainer = Model()
    with make(Model(1), **settings) as (receiver, held):

        def handle(message: Mapping[str, Any]) -> Mapping[str, object]:
            body = message["body"]
            if message["call"] == "update_weights":
                body = {**body, "update_info": {**body["update_info"], "delta_follows": True}}
            elif message["call"] == "finish_weight_update":
                body = {**body, "delta_follows": True}
            reply: dict[str, object] = receiver.handle({**message, "body": body})
            assert not reply.get("delta_base")
            return reply

        with ws.connect(trainer, to=handle, delta="off", packed=packed) as sender:
            for step in range(3):
                change(trainer, step)
                sender.send_weights()
                for name, tensor in trainer.state_dict().items():
                    assert torch.equal(held()[name].to(tensor.dtype), tensor)
            assert receiver.status().delta_forms == []
