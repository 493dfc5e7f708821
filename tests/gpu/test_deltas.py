"""Deltas from and to tensors on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.tensors import as_bytes

pytestmark = pytest.mark.gpu


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(512, 513), nn.Linear(513, 7), nn.LayerNorm(3)).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return made.cuda()


def step(trainer: nn.Module, number: int) -> None:
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.view(-1)[number::97] += 0.5


def same(trainer: nn.Module, server: nn.Module) -> bool:
    pairs = zip(trainer.parameters(), server.parameters(), strict=True)
    return all(
        torch.equal(as_bytes(sent.to(held.dtype)).cpu(), as_bytes(held).cpu())
        for sent, held in pairs
    )


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_chain_of_deltas_is_the_trainers_model(where: str, apply: str) -> None:
    trainer, server = model(0), model(1).to(where)
    receiver = ws.WeightReceiver(server, apply=apply)  # type: ignore[arg-type]  # parametrised
    with ws.connect(trainer, to=receiver, delta="always") as sender:
        for number in range(6):
            report = sender.send_weights()
            assert report.delta is not None
            assert report.delta.sent == (number > 0), report.delta
            assert same(trainer, server)
            step(trainer, number)


def test_float32_masters_of_a_bfloat16_server() -> None:
    trainer, server = model(0, torch.float32), model(1)
    with ws.connect(
        trainer, to=ws.WeightReceiver(server), delta="always", dtype=torch.bfloat16
    ) as sender:
        for number in range(4):
            report = sender.send_weights()
            assert report.delta is not None
            assert report.delta.sent == (number > 0), report.delta
            assert same(trainer, server)
            step(trainer, number)


def test_a_model_that_moves_to_the_host_and_back() -> None:
    trainer, server = model(0), model(1)
    with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
        for number, where in enumerate(["cuda", "cuda", "cpu", "cpu", "cuda", "cuda"]):
            trainer.to(where)
            report = sender.send_weights()
            assert report.delta is not None
            assert report.delta.sent == (number > 0), report.delta
            assert same(trainer, server)
            step(trainer, number)


class Made(ws.ModuleSource):
    """Tensors that are made on the way, each in memory of its own."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors():
            yield name, tensor.clone()

    def stable_tensors(self) -> None:
        return None


def test_tensors_that_are_made_on_the_way() -> None:
    trainer, server = model(0), model(1)
    with ws.connect(Made(trainer), to=ws.WeightReceiver(server), delta="always") as sender:
        for number in range(4):
            report = sender.send_weights()
            assert report.delta is not None
            assert report.delta.sent == (number > 0), report.delta
            assert same(trainer, server)
            step(trainer, number)
