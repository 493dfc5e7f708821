"""Deltas between tensors on a GPU. Never run on a GPU yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weightsync as ws

pytestmark = pytest.mark.gpu


def model(seed: int) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(512, 513), nn.Linear(513, 7)).bfloat16()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return made.cuda()


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_chain_of_deltas_is_the_trainers_model(where: str) -> None:
    trainer, server = model(0), model(1).to(where)
    with ws.connect(trainer, to=ws.WeightReceiver(server), delta="always") as sender:
        for step in range(6):
            report = sender.send_weights()
            assert report.delta is not None
            assert report.delta.sent == (step > 0)
            for sent, held in zip(trainer.parameters(), server.parameters(), strict=True):
                assert torch.equal(sent.cpu(), held.cpu())
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.view(-1)[step::97] += 0.5
