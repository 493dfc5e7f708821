"""A real vLLM server that loads in place, as WEIGHTSYNC_VLLM_APPLY in its environment says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import LARGEST_DIFFERENCE, change, expected, largest_difference, make_model

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-worker", "two-workers"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("in-place")
    model = make_model(folder, tied=request.param == 1)
    log = folder / "server.log"
    with vllm_server(folder, log, workers=request.param, apply="in_place") as served:
        yield served, model


@pytest.mark.parametrize("packed", [False, True])
def test_updates_in_place_compute_what_transformers_does(
    server: tuple[Served, Any], *, packed: bool
) -> None:
    served, model = server
    with ws.connect(model, to=served.url, packed=packed) as sender:
        for seed in (1, 2):
            before = expected(model)[1]
            change(model, seed=seed + 10 * packed)
            report = sender.send_weights()
            assert (report.apply, report.verified) == ("in_place", "arrived")
            served.assert_computes(model)
            assert largest_difference(expected(model)[1], before) > 0.01
            assert not served.is_paused


def test_a_torn_server_stays_paused_until_a_whole_update(server: tuple[Served, Any]) -> None:
    served, model = server
    healthy = True

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if i == 9 and not healthy:
                raise RuntimeError("the trainer has lost its weights")
            yield name, parameter.detach()

    with (
        ws.connect(tensors, to=served.url, bucket_nbytes=1 << 14, timeout_s=30) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        sender.send_weights()
        healthy = False
        change(model, 30)
        with pytest.raises(RuntimeError, match="lost its weights"):
            sender.send_weights()
        assert served.is_paused
        waiting = pool.submit(served.complete)
        try:
            time.sleep(1)  # enough for a tiny model's twelve tokens
            assert not waiting.done()
        finally:
            healthy = True
            change(model, 31)
            sender.send_weights()
        _assert_says(waiting, model)
    served.assert_computes(model)


def _assert_says(waiting: Future[tuple[list[int], list[float]]], model: Any) -> None:
    """What waited for the update was computed with its weights alone."""
    tokens, logprobs = waiting.result(60)
    wanted, wanted_logprobs = expected(model)
    assert tokens == wanted
    assert largest_difference(logprobs, wanted_logprobs) < LARGEST_DIFFERENCE
