"""Decode steps, captured graphs and updates on real streams. Written without a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.integrations.vllm.ipc_engine import (
    IPCTrainerSendWeightsArgs,
    IPCWeightTransferEngine,
)
from weightsync.wire.messages import UpdateRequest

pytestmark = pytest.mark.gpu

SIDE = 1024
CYCLES = 2_000_000_000
"""About a second of a GPU's clock."""


def layer(value: float, device: str = "cuda") -> nn.Linear:
    made = nn.Linear(SIDE, SIDE, bias=False, device=device)
    return fill(made, value)


def fill(model: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        model.weight.fill_(value)
    torch.cuda.synchronize()
    return model


def values(tensor: torch.Tensor) -> list[float]:
    found: list[float] = tensor.detach().unique().tolist()  # type: ignore[no-untyped-call]  # torch's
    return found


def test_a_captured_graph_computes_with_the_weights_of_the_update() -> None:
    model, server = layer(1), layer(0)
    given = torch.ones(1, SIDE, device="cuda")
    with torch.no_grad():
        server(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = server(given)
    receiver = ws.WeightReceiver(server, apply="staged")
    with ws.connect(model, to=receiver.handle) as sender:
        for value in (1.0, 2.0, 3.0):
            fill(model, value)
            sender.send_weights()
            graph.replay()
            torch.cuda.synchronize()
            assert values(made) == [value * SIDE]


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_step_on_a_stream_of_its_own_sees_one_version(apply: str) -> None:
    model, server = layer(1), layer(0)
    given = torch.ones(1, SIDE, device="cuda")
    receiver = ws.WeightReceiver(server, apply=apply)  # type: ignore[arg-type]  # parametrised
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    with ws.connect(model, to=receiver.handle) as sender, torch.no_grad():
        sender.send_weights()
        fill(model, 2)
        with torch.cuda.stream(stream), receiver.reading() as version:
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]  # torch's
            made = server(given)
        sender.send_weights()  # waits for the step that still sleeps
        torch.cuda.synchronize()
    assert version == 1
    assert values(made) == [SIDE]
    assert values(server.weight) == [2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_handles_of_weights_on_the_second_gpu() -> None:
    model = layer(1, "cuda:1")
    server = copy.deepcopy(model)
    receiver = ws.WeightReceiver(server, apply="staged")
    for value in (2.0, 3.0):
        fill(model, value)
        IPCWeightTransferEngine.trainer_send_weights(
            model.named_parameters(),
            IPCTrainerSendWeightsArgs(
                send_mode=lambda info: receiver.dispatch(UpdateRequest(update_info=info))
            ),
        )
        assert values(server.weight) == [value]
