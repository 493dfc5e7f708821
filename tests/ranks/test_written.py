"""`sender.written` on ranks that each send what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync as ws
from tests.crew import Crew, crew
from weightsync.backends.ipc.sender import IpcTrainerEngine

pytestmark = pytest.mark.usefixtures("shm_clean")
WIDTH = 512


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def trained(rank: int, when: str) -> tuple[list[tuple[int, int]], list[bool]]:
    """Send four steps; return how many units of each were known before, of how many, and whether
    the receiver has the trainer's bits.

    `when` `written` is called: after the step, of one layer (`part`), before another step
    (`early`), before a write to one DTensor (`write`), before the module is moved (`moved`), on the
    second rank alone (`second`), or `never`. With `replicas` of the last layer, where each rank has
    all layers, and sends half of them.
    """
    trainer, served = model(), model()
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    for module in (*trainer, trainer):
        fully_shard(module, mesh=replicas if when == "replicas" else None)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    found: list[tuple[int, int]] = []
    genuine = IpcTrainerEngine._publish_table

    def publish(self: Any, check: Any) -> None:
        found.append((len(self._read_early), len(self._whole.units)))
        genuine(self, check)

    equal = []
    with (
        closing(ws.WeightReceiver(served)) as receiver,
        ws.connect(trainer, to=receiver.handle) as sender,
        mock.patch.object(IpcTrainerEngine, "_publish_table", publish),
    ):
        assert sender.send_weights().gathered == {}
        found.clear()
        for _ in range(3):
            trainer(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            if when == "part":
                sender.written(["1.weight"])
            elif when == "replicas":
                sender.written(["3.weight"])
            elif when != "never" and (when != "second" or rank):
                sender.written()
            if when == "early":
                optimizer.step()
            if when == "write":
                with torch.no_grad():
                    next(trainer[2].parameters()).mul_(1.5)
            if when == "moved":
                trainer.double().float()
            optimizer.zero_grad()
            report = sender.send_weights()
            assert (report.gathered, report.verified) == ({}, "held")
            full = [parameter.full_tensor() for parameter in trainer.parameters()]  # type: ignore[attr-defined]
            pairs = zip(full, served.parameters(), strict=True)
            equal.append(rank > 0 or all(torch.equal(a, b) for a, b in pairs))
        with pytest.raises(ws.ConfigError, match="not among those that are sent: other"):
            sender.written(["other"])
    return found, equal


@pytest.mark.parametrize(
    ("when", "shares"),
    [
        ("step", [1.0, 1.0]),
        ("part", [0.25, 0.25]),
        ("early", [0.0, 0.0]),
        ("write", [0.75, 0.75]),
        ("moved", [0.0, 0.0]),
        ("second", [0.0, 1.0]),
        ("replicas", [0.0, 0.5]),
        ("never", [0.0, 0.0]),
    ],
)
def test_each_rank_knows_its_own_boxes(ranks: Crew, when: str, shares: list[float]) -> None:
    for (found, equal), share in zip(ranks.run(trained, when), shares, strict=True):
        assert equal == [True] * 3
        assert [known / units for known, units in found] == [share] * 3
