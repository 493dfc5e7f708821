"""Modules whose code has their weights as constants: refused by name, as no update reaches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

import weightsync as ws
from weightsync.weights.sources.base import as_source

pytestmark = [
    pytest.mark.usefixtures("shm_clean"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()


def scripted(frozen: bool) -> nn.Module:
    jit: Any = torch.jit
    made = jit.script(make())
    module: nn.Module = jit.freeze(made) if frozen else made
    return module


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_script_modules_are_refused_on_both_sides(frozen: bool, inside: bool) -> None:
    module = scripted(frozen)
    if inside:
        holder = make()
        holder.body = module
        module = holder
    name = "body" if inside else "RecursiveScriptModule"
    why = "frozen ScriptModule, whose weights are constants" if frozen else "ScriptModule; give"
    for call in (ws.WeightReceiver, ws.ModuleSink, as_source):
        with pytest.raises(ws.ConfigError, match=f"^{name}.* is a {why}"):
            call(module)


def freezing(on: bool) -> Any:
    """Context in which torch.compile freezes all weights, or none."""
    patch: Any = inductor.patch
    return patch(freezing=on)


def wrapped(module: nn.Module, **how: Any) -> nn.Module:
    compiling: Any = torch.compile
    made: nn.Module = compiling(module, **how)
    return made


def in_place(module: nn.Module, **how: Any) -> nn.Module:
    compiling: Any = module
    compiling.compile(**how)
    return module


WAYS: dict[str, Callable[..., nn.Module]] = {
    "a wrapper": wrapped,
    "a part": lambda module, **how: nn.Sequential(wrapped(module, **how)),
    "in its place": in_place,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["option", "config"])
def test_modules_compiled_with_freezing_are_refused(by: str, way: str) -> None:
    options = {"options": {"freezing": True}} if by == "option" else {}
    with freezing(by == "config"):
        module = WAYS[way](make(), **options)
        with pytest.raises(ws.ConfigError, match="is compiled with freezing: its code has the"):
            ws.WeightReceiver(module)
    ws.WeightReceiver(WAYS[way](make()))
    ws.WeightReceiver(WAYS[way](make(), backend="eager"))


@pytest.mark.parametrize("by", ["option", "config"])
def test_a_server_that_is_compiled_later_with_freezing_is_refused_then(by: str) -> None:
    trainer, served = make(), make()
    options = {"options": {"freezing": True}} if by == "option" else {}
    receiver = ws.WeightReceiver(served)
    with ws.connect(trainer, to=receiver.handle) as sender:
        sender.send_weights()
        with freezing(by == "config"):
            in_place(served, **options)
            with pytest.raises(ws.WeightSyncError, match="compiled with freezing"):
                sender.send_weights()
        assert (receiver.status().state, receiver.version) == ("READY", 1)
        in_place(served)
        assert sender.send_weights().verified == "held"


def test_freezing_that_cannot_be_seen_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weightsync"), freezing(True):
        receiver = ws.WeightReceiver(make())
        with ws.connect(make(), to=receiver.handle) as sender:
            sender.send_weights()
    said = [r.getMessage() for r in caplog.records if "freezing is on" in r.getMessage()]
    assert len(said) == 1
    assert "compiled around this Sequential has its weights as constants" in said[0]


def test_a_compiled_server_without_freezing_computes_with_the_new_weights() -> None:
    trainer, served = make(), make()
    compiled: Any = torch.compile(served, backend="eager")
    row = torch.randn(1, 3)
    with ws.connect(trainer, to=ws.WeightReceiver(compiled).handle) as sender, torch.no_grad():
        compiled(row)
        sender.send_weights()
        assert torch.equal(compiled(row), trainer(row))
