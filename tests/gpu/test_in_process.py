"""Fetches, snapshots, experts and updates between hosts of models on a GPU, in one process."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.gpu.receiver_process import EveryDtype, digests, fill

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 60.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
elsewhere = pytest.mark.parametrize("to", DEVICES)


def filled(device: str, seed: int) -> EveryDtype:
    model = EveryDtype(device)
    fill(model, seed)
    return model


@devices
@elsewhere
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_weights_are_fetched(device: str, to: str, apply: Any) -> None:
    trainer, held, joiner = filled(device, 1), filled(device, 2), filled(to, 3)
    with (
        closing(ws.WeightReceiver(held, apply=apply)) as source,
        ws.connect(trainer, to=source) as sender,
        closing(ws.WeightReceiver(joiner)) as receiver,
    ):
        sender.send_weights(7)
        report = ws.fetch(receiver, source)
        assert (report.version, receiver.version) == (7, 7)
        assert report.verified in ("arrived", "held")
        assert digests(joiner) == digests(trainer)


@devices
@elsewhere
def test_snapshots_are_sent_while_the_trainer_goes_on(device: str, to: str) -> None:
    trainer, held = filled(device, 1), filled(to, 2)
    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(trainer, to=receiver) as sender:
        for seed in range(3, 8):
            fill(trainer, seed)
            sent = digests(trainer)
            future = sender.send_async()
            fill(trainer, 100 + seed)
            future.result(WAIT_S)
            assert digests(held) == sent


class Experts(nn.Module):
    """Fused experts under the names that transformers gives them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(16, 4, bias=False, device=device)
        self.mlp.experts = nn.Module()
        made = torch.randn(4, 16, 16, device=device), torch.randn(4, 16, 8, device=device)
        self.mlp.experts.gate_up_proj, self.mlp.experts.down_proj = map(nn.Parameter, made)


class OneByOne(nn.Module):
    """The same, one module for each expert."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(16, 4, bias=False, device=device)
        self.mlp.experts = nn.ModuleList()
        for _ in range(4):
            expert = nn.Module()
            expert.gate_proj = nn.Linear(16, 8, bias=False, device=device)
            expert.up_proj = nn.Linear(16, 8, bias=False, device=device)
            expert.down_proj = nn.Linear(8, 16, bias=False, device=device)
            self.mlp.experts.append(expert)


@devices
@elsewhere
def test_fused_experts_arrive_one_by_one(device: str, to: str) -> None:
    trainer, held = Experts(device), OneByOne(to)
    source = ws.PerExpertSource(trainer)
    with closing(ws.WeightReceiver(held)) as receiver, ws.connect(source, to=receiver) as sender:
        for _ in range(3):
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.add_(1)
            sender.send_weights()
            wanted = {name: tensor.cpu() for name, tensor in source.tensors()}
            assert wanted.keys() == held.state_dict().keys()
            for name, tensor in held.state_dict().items():
                assert torch.equal(tensor.cpu(), wanted[name]), name


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    if not torch.cuda.is_available():
        monkeypatch.setenv("UCX_TLS", "tcp,self")


@devices
@elsewhere
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("lends", ["0", "1"])
@pytest.mark.usefixtures("over_tcp")
def test_hosts_read_the_tensors(
    device: str, to: str, verify: bool, lends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on a GPU are packed, unless they are lent, to updates without verification."""
    monkeypatch.setenv("WEIGHTSYNC_NIXL_GPU", lends)
    trainer, held = filled(device, 1), filled(to, 2)
    with (
        closing(ws.WeightReceiver(held)) as receiver,
        ws.connect(trainer, to=receiver, backend="nixl", verify=verify, delta="off") as sender,
    ):
        for seed in range(3, 6):
            fill(trainer, seed)
            report = sender.send_weights()
            assert report.path == "nixl"
            is_read = device == "cpu" or (lends == "1" and not verify)
            assert (report.written_nbytes == 0) is is_read
            assert digests(held) == digests(trainer)


@devices
@elsewhere
@pytest.mark.parametrize("delta", ["off", "always"])
def test_tcp_between_devices(device: str, to: str, delta: Any) -> None:
    trainer, held = filled(device, 1), filled(to, 2)
    with (
        closing(ws.WeightReceiver(held)) as receiver,
        ws.connect(trainer, to=receiver, backend="tcp", delta=delta) as sender,
    ):
        for seed in range(3, 6):
            fill(trainer, seed)
            assert sender.send_weights().path == "tcp"
            assert digests(held) == digests(trainer)
