"""MegatronSource with the real megatron-core: ranks of tensor, pipeline and expert parallelism."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.crew import Crew, Died, crew
from tests.e2e.serving import serve_http
from tests.megatron import models, ranks, workers
from tests.megatron.ranks import Case

CASES = {
    "llama, tied, TP 2, PP 2": Case("llama", tp=2, pp=2, tied=True),
    "qwen2, TP 2, PP 2, 2 virtual stages": Case("qwen2", tp=2, pp=2, vp=2),
    "qwen3, more ranks than groups": Case("qwen3", tp=4, tied=True),
    "qwen3, data parallel": Case("qwen3", tp=2),
    "qwen3_moe, TP 2, PP 2, EP 2": Case("qwen3_moe", tp=2, pp=2, ep=2),
    "qwen3_moe, TP 2 of experts": Case("qwen3_moe", tp=2, pp=2),
    "mixtral, PP 2, EP 2": Case("mixtral", pp=2, ep=2),
    "deepseek_v3, TP 2, PP 2, EP 2": Case("deepseek_v3", tp=2, pp=2, ep=2),
}
TOKENS = torch.randint(0, models.VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def trainers() -> Iterator[Crew]:
    """Four ranks, which have other groups in each test; those of earlier ones are destroyed."""
    with crew(4) as made:
        yield made
        assert max(made.run(ranks.threads)) < 300


class Received(dict[str, torch.Tensor]):
    """What a hook was given."""

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.update((name, tensor.clone()) for name, tensor in pairs)


Serve = Callable[[ws.WeightReceiver], str]


@contextmanager
def server() -> Iterator[Serve]:
    """Yield a function that serves a receiver over HTTP, and returns its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    mount, stop = serve_http(listener)
    served: list[ws.WeightReceiver] = []

    def serve(receiver: ws.WeightReceiver) -> str:
        served.append(receiver)
        mount(str(len(served)), receiver)
        return f"http://127.0.0.1:{port}/{len(served)}"

    try:
        yield serve
    finally:
        for receiver in served:
            receiver.close()
        stop()


def differing(held: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert set(held) == set(wanted)
    return [name for name, tensor in wanted.items() if not torch.equal(held[name], tensor)]


def receiving_model(case: Case) -> nn.Module:
    return models.checkpoint_model(case.family, 99, tied=case.tied)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_step_is_equal_in_a_module_of_transformers(trainers: Crew, case: Case) -> None:
    """Bit for bit, its logits too; and nothing was gathered."""
    model = receiving_model(case)
    with server() as serve:
        url = serve(ws.WeightReceiver(model))
        trainers.run(ranks.connect, case, [url])
        for step in (1, 2, 3):
            said = trainers.run(ranks.update, step)
            wanted = models.checkpoint_model(case.family, step, tied=case.tied)
            assert differing(model.state_dict(), wanted.state_dict()) == []
            with torch.no_grad():
                assert torch.equal(model(TOKENS).logits, wanted(TOKENS).logits)
            assert [(version, gathered) for version, gathered, _ in said] == [(step, {})] * 4
        trainers.run(ranks.close)


def test_fused_parameters_are_read_where_they_are(trainers: Crew) -> None:
    """They move into shared memory once, as parameters that are sent whole."""
    with server() as serve:
        case = CASES["llama, tied, TP 2, PP 2"]
        trainers.run(ranks.connect, case, [serve(ws.WeightReceiver(receiving_model(case)))])
        trainers.run(ranks.update, 1)
        assert trainers.run(ranks.in_place) == [True] * 4
        trainers.run(ranks.close)


@pytest.mark.parametrize("name", ["qwen3_moe, TP 2, PP 2, EP 2", "mixtral, PP 2, EP 2"])
def test_a_hook_gets_each_expert_under_the_names_of_checkpoints(trainers: Crew, name: str) -> None:
    case, received = CASES[name]._replace(fused=False), Received()
    with server() as serve:
        trainers.run(ranks.connect, case, [serve(ws.WeightReceiver(received.load))])
        for step in (1, 2):
            received.clear()
            trainers.run(ranks.update, step)
            assert differing(received, ranks.state_of_step(case, step)) == []
        trainers.run(ranks.close)


@pytest.mark.parametrize(
    "name", ["qwen2, TP 2, PP 2, 2 virtual stages", "deepseek_v3, TP 2, PP 2, EP 2"]
)
def test_receivers_with_shards_read_their_own(trainers: Crew, name: str) -> None:
    case = CASES[name]
    with crew(2) as servers:
        urls = servers.run(workers.serve, case)
        trainers.run(ranks.connect, case, urls)
        for step in (1, 2, 3):
            said = trainers.run(ranks.update, step)
            assert servers.run(workers.differing, step) == [[], []]
            assert [gathered for _, gathered, _ in said] == [{}] * 4
        trainers.run(ranks.close)
        servers.run(workers.end)


DENSE = [Case(family, tp=tp) for family in ("llama", "qwen2", "qwen3") for tp in (1, 2, 4)]
OTHERS = [Case(family) for family in models.MIXTURES]


@pytest.mark.parametrize("case", [*DENSE, *OTHERS], ids=str)
def test_the_trainer_computes_what_the_checkpoint_does(trainers: Crew, case: Case) -> None:
    """So the weights that the other tests load are those of the same model."""
    with torch.no_grad():
        wanted = models.checkpoint_model(case.family, 1)(TOKENS).logits
    for made in trainers.run(ranks.logits, case, TOKENS):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=5e-5)


def test_the_example_sends_each_step(tmp_path: Path) -> None:
    """As it stands, under torchrun: each rank's part arrives, and nothing is gathered."""
    config = models.checkpoint_config("qwen3", tied=True)
    config.save_pretrained(tmp_path)
    model = models.checkpoint_model("qwen3", 99, tied=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", "-m", "tests.megatron.on_cpu"]
    with server() as serve:
        receiver = ws.WeightReceiver(model)
        command += ["examples/megatron_trainer.py", str(tmp_path), serve(receiver)]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-5000:]
        reports = [line for line in done.stdout.splitlines() if line.startswith("version ")]
        assert len(reports) == receiver.version == 3, done.stdout
        assert all("verified: held" in line and "gathered" not in line for line in reports)
        norm = model.get_parameter("model.norm.weight")  # Megatron makes ones
        torch.testing.assert_close(norm, torch.full_like(norm, 1.01**3))


def test_a_rank_that_is_killed_leaves_all_as_it_was() -> None:
    """The other ranks raise and name it; the next trainer's update is whole."""
    case = CASES["llama, tied, TP 2, PP 2"]
    model = receiving_model(case)
    with server() as serve:
        receiver = ws.WeightReceiver(model)
        url = serve(receiver)
        with crew(4) as made:
            made.run(ranks.connect, case, [url])
            made.run(ranks.update, 1)
            said = made.run(ranks.update_and_die, 3, 2)
            assert isinstance(said[3], Died)
            assert all("rank 3" in one for one in said[:3]), said
            wanted = models.checkpoint_model(case.family, 1, tied=True)
            assert receiver.version == 1
            assert differing(model.state_dict(), wanted.state_dict()) == []
        with crew(4) as made:
            made.run(ranks.connect, case, [url])
            made.run(ranks.update, 3)
            wanted = models.checkpoint_model(case.family, 3, tied=True)
            assert differing(model.state_dict(), wanted.state_dict()) == []
            made.run(ranks.close)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("vocabulary", r"(embed_tokens|lm_head)\.weight"),
        ("dtype", r"other shapes or dtypes .*rank 1"),
    ],
)
def test_ranks_that_disagree_are_refused(trainers: Crew, spoil: str, said: str) -> None:
    case = Case("llama", tp=4)
    with server() as serve:
        url = serve(ws.WeightReceiver(receiving_model(case)))
        for one in trainers.run(ranks.refused, case, spoil, [url]):
            assert "\n" not in one
            assert re.search(said, one), one
