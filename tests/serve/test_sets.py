"""The base model and an adapter of one trainer, in one update of `weightsync serve`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import requests
import torch

import weightsync as ws
from tests.integrations.test_huggingface import quiet_peft
from tests.serve.adapted import (
    Served,
    dying_before,
    tiny_adapted,
    told,
    version_of_killed,
    wait_until_together,
)
from tests.serve.servers import forked_server, wait_until
from tests.vllm.adapted import Told, assert_told, base_of, train
from tests.vllm.tiny import PROMPT, change, expected
from weightsync.wire.messages import FinishRequest, Request, UpdateRequest

pytestmark = [pytest.mark.timeout(600), quiet_peft]

UPDATES = 20
REPLICAS = 2


class Trainer:
    """A PEFT model of which both the base and the adapter are trained."""

    def __init__(self) -> None:
        self.model = tiny_adapted()

    def train(self, seed: int) -> None:
        change(self.model.get_base_model(), seed, "base_layer")
        train(self.model, seed)

    def base(self) -> dict[str, torch.Tensor]:
        """The tensors of the base model, by their names without adapters."""
        found = self.model.get_base_model().state_dict()
        return {n.replace(".base_layer", ""): t for n, t in found.items() if "lora_" not in n}

    def connect(self, served: Served) -> ws.SetSender:
        sources = [self.base, ws.AdapterSource(self.model, name="policy")]
        return ws.connect_set(sources, to=served.url, token=served.token)

    def told(self, count: int = 12) -> tuple[Told, Told]:
        """What base and adapter generate."""
        with self.model.disable_adapter():
            base = expected(self.model, PROMPT, count)
        return base, expected(self.model, PROMPT, count)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with forked_server("--data-parallel", str(REPLICAS)) as (url, token):
        yield Served(url, token)


def versions(served: Served) -> list[tuple[int, int]]:
    """The versions of base and adapter in each worker."""
    found = []
    for worker in range(REPLICAS):
        of_parts = [
            requests.get(f"{served.url}/{path}workers/{worker}/weight_info", timeout=60).json()
            for path in ("", "adapters/policy/")
        ]
        found.append((of_parts[0]["version"], of_parts[1]["version"]))
    return found


def test_base_and_adapter_have_one_version(served: Served) -> None:
    trainer = Trainer()
    with trainer.connect(served) as sender:
        for seed in (1, 2):
            trainer.train(seed)
            base, adapter = trainer.told()
            reports = sender.send_weights()
            assert len({report.version for report in reports}) == 1
            for _ in range(2 * REPLICAS):
                served.assert_serves("tiny", base, version=reports[0].version)
                served.assert_serves("policy", adapter, version=reports[0].version)
                (span,) = served.choice("policy")["weight_versions"]
                assert span["base_version"] == span["version"]
        assert versions(served) == [(sender.version, sender.version)] * REPLICAS


def test_requests_that_begin_after_an_update_have_both_of_it(served: Served) -> None:
    """Each token is that of the two versions that it names, under load."""
    trainer, tokens = Trainer(), 6
    of_version: dict[int, tuple[Told, Told]] = {}
    made: list[tuple[str, int, Any]] = []
    with trainer.connect(served) as sender, ThreadPoolExecutor(4) as pool:
        trainer.train(100)
        of_version[sender.version + 1] = trainer.told(tokens)
        newest, over = sender.send_weights()[0].version, False

        def request(model: str) -> None:
            while not over:
                first = newest
                made.append((model, first, served.choice(model, PROMPT, tokens)))

        work = [pool.submit(request, model) for model in ("tiny", "policy") * 2]
        try:
            for i in range(1, UPDATES):
                trainer.train(100 + i)
                of_version[sender.version + 1] = trainer.told(tokens)
                newest = sender.send_weights()[0].version
        finally:
            over = True
        for each in work:
            each.result()
    whole = 0
    for model, first, choice in made:
        spans = choice["weight_versions"]
        assert spans[0]["version"] >= first
        assert spans[0].get("base_version", first) >= first
        used = {v for span in spans for v in (span["version"], span.get("base_version"))} - {None}
        if len(used) == 1:  # else an update came in the middle, and the base changed below it
            whole += 1
            assert_told(told(choice), of_version[used.pop()][model == "policy"])
    assert whole > len(made) // 4
    assert len(made) > UPDATES


def test_a_part_that_fails_leaves_both_as_they_were(served: Served) -> None:
    trainer = Trainer()
    fails = list[BaseException]()

    def base() -> dict[str, torch.Tensor]:
        if fails:
            raise fails.pop()
        return trainer.base()

    adapter = ws.AdapterSource(trainer.model, name="policy")
    with ws.connect_set([base, adapter], to=served.url, token=served.token) as sender:
        trainer.train(7)
        version = sender.send_weights()[0].version
        before = trainer.told()
        trainer.train(8)
        fails.append(RuntimeError("no more base"))
        with pytest.raises(RuntimeError, match="no more base"):
            sender.send_weights()
        assert versions(served) == [(version, version)] * REPLICAS
        layer = trainer.model.get_base_model().model.layers[0].self_attn.q_proj
        layer.set_scale("default", 3)
        with pytest.raises(ws.ConfigError, match="q_proj"):
            sender.send_weights()
        layer.set_scale("default", 1)
        assert versions(served) == [(version, version)] * REPLICAS
        served.assert_serves("tiny", before[0], version=version)
        served.assert_serves("policy", before[1], version=version)
        sender.send_weights()
        served.assert_serves("policy", trainer.told()[1])


def send_until_killed(served: Served, call: type[Request], count: int, pipe: Connection) -> None:
    """Send base and adapter, and both again; die before a request of this type of that."""
    trainer = Trainer()
    with trainer.connect(served) as sender:
        trainer.train(20)
        sender.send_weights()
        pipe.send(sender.version)
        trainer.train(21)
        with dying_before(call, count):
            sender.send_weights()


@pytest.mark.parametrize(
    ("call", "count"),
    [
        *((UpdateRequest, count) for count in (1, 3)),
        *((FinishRequest, count) for count in (1, 2, 3, 4)),
    ],
)
def test_a_trainer_that_is_killed_leaves_both_old_or_both_new(
    served: Served, call: type[Request], count: int
) -> None:
    before = version_of_killed(send_until_killed, served, call, count)
    wait_until_together(lambda: versions(served), before)
    found = versions(served)
    if call is UpdateRequest:
        assert found == [(before, before)] * REPLICAS
    trainer = Trainer()
    trainer.train(20)
    of_version = {before: trainer.told()}
    trainer.train(21)
    of_version[before + 1] = trainer.told()
    if len(set(found)) == 1:  # else the replicas differ, until the next sender comes
        version = found[0][0]
        served.assert_serves("tiny", of_version[version][0], version=version)
        served.assert_serves("policy", of_version[version][1], version=version)
    # A sender of one part settles the other one with it.
    with ws.connect(trainer.base, to=served.url, token=served.token):
        wait_until(lambda: len(set(versions(served))) == 1, "the replicas are not settled")
    (version, of_adapter), _ = versions(served)
    assert version == of_adapter
    served.assert_serves("policy", of_version[version][1], version=version)
    trainer.train(22)
    with trainer.connect(served) as sender:
        sender.send_weights()
        assert versions(served) == [(sender.version,) * 2] * REPLICAS
    served.assert_serves("tiny", base_of(trainer.model))
    served.assert_serves("policy", expected(trainer.model))
