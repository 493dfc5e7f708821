"""A tensor-parallel pair behind one URL: sent to, checked and verified as one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from fastapi import FastAPI

import weightsync as ws
from tests.cli.running import answer_of, weightsync
from tests.e2e.models import soften
from tests.e2e.tensor_parallel import Group, Rank, group
from tests.e2e.test_tensor_parallel import CONFIGS, make, save
from tests.server.live import TOKEN, serving
from weightsync.server import Workers, worker_path, workers_router
from weightsync.server.dispatcher import Receiver
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request, Status, StatusRequest, WorkerReport

transformers = pytest.importorskip("transformers", reason="needs the hf extra")


class Forwarded(Receiver):
    """A receiver in another process, as a server's routes want it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def dispatch(self, request: Request) -> Reply:
        answer = self._rank(codec.to_plain(request))
        return codec.reply_from_plain(CALL_OF[type(request)], answer)

    def status(self) -> Status:
        status = self.dispatch(StatusRequest())
        assert isinstance(status, Status)
        return status

    def report(self) -> WorkerReport:
        return WorkerReport(status=self.status(), updates_total={})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(2, tmp_path_factory.mktemp("ranks")) as made:
        yield made


@contextmanager
def served(pair: Group) -> Iterator[str]:
    workers = Workers(
        {worker_path(k): Forwarded(rank) for k, rank in enumerate(pair.ranks)}, tensor_parallel=2
    )
    app = FastAPI()
    app.include_router(workers_router(workers, token=TOKEN))
    try:
        with serving(app) as url:
            yield url
    finally:
        workers.close()
        pair.ask("close")


def check(url: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = requests.post(f"{url}/weight_checker", json=body, headers=headers, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("label", "dtype"),
    [(label, torch.float32) for label in CONFIGS] + [("fused and strided", torch.bfloat16)],
    ids=str,
)
def test_shards_add_up_to_the_checksums_of_the_whole_model(
    pair: Group, tmp_path: Path, shm_clean: None, label: str, dtype: torch.dtype
) -> None:
    trained = make(label, dtype)
    pair.ask("load", {"path": save(trained, tmp_path, "start"), "apply": "staged"})
    with served(pair) as url:
        soften(trained, seed=1)
        with ws.connect(trained, to=url, token=TOKEN) as sender:
            report = sender.send_weights()
            assert [r.target for r in report.receivers] == [f"{url}/workers/{k}" for k in (0, 1)]
        whole = ModuleSink(trained).checksums()
        held = check(url)
        assert held["version"] == 1
        assert held["checksums"] == whole
        assert not held.get("different")
        assert check(url, action="compare", checksums=whole)["equal"] is True
        soften(trained, seed=2)
        changed = ModuleSink(trained).checksums()
        different = [name for name in whole if changed[name] != whole[name]]
        assert different
        compared = check(url, action="compare", checksums=changed)
        assert sorted(compared["different"]) == sorted(different)


@pytest.mark.timeout(560)
def test_the_command_line_takes_one_url(pair: Group, tmp_path: Path, shm_clean: None) -> None:
    trained = make("fused rows")
    start = save(trained, tmp_path, "start")
    pair.ask("load", {"path": start, "apply": "staged"})
    soften(trained, seed=1)
    after = save(trained, tmp_path, "after")
    with served(pair) as url:
        token = ("--token", TOKEN, "--json")
        answer_of(weightsync("verify", url, start, *token))
        pushed = answer_of(weightsync("push", after, "--to", url, *token))
        assert len(pushed["receivers"]) == 2
        found = answer_of(weightsync("verify", url, after, *token))
        assert (found["equal"], found["version"]) == (True, 1)
        found = answer_of(weightsync("verify", url, start, *token), 1)
        assert found["different"]
        (server,) = answer_of(weightsync("status", url, "--json"))["servers"]
        assert [(w["url"], w["version"]) for w in server["each_worker"]] == [
            (f"{url}/workers/0", 1),
            (f"{url}/workers/1", 1),
        ]
