"""The promise of the whole server: every token is exactly one that its claimed weights make."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch

import weightsync as ws
from tests.serve.replay import Replay, versions_of
from tests.serve.servers import forked_server
from weightsync.serve.model import make_tiny_model

CLIENTS = 8
TIE = 1e-4
"""A token may be another one where the reference itself hardly prefers its own."""


def _perturb(model: torch.nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def _generate(url: str, stop: threading.Event, seed: int) -> list[tuple[list[int], Any]]:
    """Ask for completions without a pause; return them with their prompts."""
    random = torch.Generator().manual_seed(seed)
    beginnings = torch.randint(3, 250, (3, 24), generator=random).tolist()
    made: list[tuple[list[int], Any]] = []
    with requests.Session() as session:
        while not stop.is_set():
            length = int(torch.randint(1, 20, (), generator=random))
            # Some begin alike: what was read of one with old weights is of no use to the next.
            beginning = beginnings[int(torch.randint(0, 3, (), generator=random))]
            prompt = beginning[: 24 * (length % 2)]
            prompt += torch.randint(3, 250, (length,), generator=random).tolist()
            tokens = int(torch.randint(4, 60, (), generator=random))
            body = {"prompts": [prompt], "max_new_tokens": tokens, "temperature": 0.0}
            answer = session.post(f"{url}/generate", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            made += [(prompt, completion) for completion in answer.json()["completions"]]
    return made


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize(
    ("layout", "updates", "apply"),
    [
        pytest.param((2, 1, 2), 16, "staged", id="2 api servers, 2 shards"),
        pytest.param((1, 2, 1), 12, "in_place", id="2 replicas in place"),
        pytest.param(
            *((2, 2, 2), 50, "staged"),
            id="2 api servers, 2 replicas, 2 shards",
            marks=[pytest.mark.soak, pytest.mark.timeout(3600)],
        ),
        pytest.param(
            *((1, 1, 1), 1_000, "staged"),
            id="a thousand updates",
            marks=[pytest.mark.soak, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_every_token_is_of_the_weights_it_claims(
    layout: tuple[int, int, int], updates: int, apply: str
) -> None:
    api, data, tensor = map(str, layout)
    parallel = ["--api-servers", api, "--data-parallel", data, "--tensor-parallel", tensor]
    model = make_tiny_model().model
    replay = Replay(make_tiny_model().model)
    replay.remember(0, model)
    generator = torch.Generator().manual_seed(7)
    stop = threading.Event()
    with (
        forked_server(*parallel, "--apply", apply) as (url, token),
        ThreadPoolExecutor(CLIENTS) as pool,
        ws.connect(model, to=url, token=token) as sender,
    ):
        clients = [pool.submit(_generate, url, stop, seed) for seed in range(CLIENTS)]
        try:
            for _ in range(updates):
                _perturb(model, generator)
                report = sender.send_weights()
                replay.remember(report.version, model)
                assert len(report.receivers) == layout[1] * layout[2]
        finally:
            stop.set()
        made = [one for client in clients for one in client.result(120)]
    versions = [versions_of(completion) for _, completion in made]
    for (prompt, completion), claimed in zip(made, versions, strict=True):
        assert completion["prompt_version"] == claimed[0]
        tokens, margins = replay.greedy(prompt, claimed)
        ties = [at for at, margin in enumerate(margins) if margin < TIE]
        until = min(ties, default=len(tokens))
        assert completion["token_ids"][:until] == tokens[:until]
    # What was checked is what was meant to be: many versions, and some within one completion.
    assert len({version for claimed in versions for version in claimed}) > updates / 2
    assert any(len(set(claimed)) > 1 for claimed in versions)
    assert sum(len(claimed) for claimed in versions) > 10 * updates
