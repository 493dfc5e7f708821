"""Deltas of the parts of a set: all parts hold what was trained, or what they held before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fastapi import FastAPI
from torch import nn

import weightsync as ws
from tests.server.live import serving
from tests.update.test_deltas import Model, change, equal, first_lines, sent
from weightsync.server import weight_router

pytestmark = pytest.mark.usefixtures("shm_clean")

PATHS = ["", "draft"]
__all__ = ["first_lines"]  # a fixture


class Server:
    """Two models behind one URL, and those of their trainer."""

    def __init__(self) -> None:
        self.trained = {path: Model(seed) for seed, path in enumerate(PATHS)}
        self.served = {path: Model(seed + 5) for seed, path in enumerate(PATHS)}
        policy = ws.WeightReceiver(self.served[""])
        self.receivers = {
            "": policy,
            "draft": ws.WeightReceiver(self.served["draft"], beside=policy),
        }
        self.app = FastAPI()
        for path, receiver in self.receivers.items():
            self.app.include_router(
                weight_router(receiver, token=None), prefix=f"/{path}" if path else ""
            )

    def train(self, step: int, *paths: str) -> None:
        for path in paths or PATHS:
            change(self.trained[path], step)

    def check(self, reports: list[ws.SyncReport]) -> None:
        """Both parts hold what was trained, as one version."""
        (version,) = {report.version for report in reports}
        assert [receiver.version for receiver in self.receivers.values()] == [version] * 2
        for path in PATHS:
            assert equal(self.trained[path], self.served[path]), path


@pytest.fixture
def served() -> Iterator[tuple[Server, str]]:
    made = Server()
    with serving(made.app) as url:
        yield made, url
    for receiver in made.receivers.values():
        receiver.close()


def test_each_part_sends_what_changed_of_it(served: tuple[Server, str]) -> None:
    server, url = served
    with ws.connect_set(server.trained, to=url, delta="always") as sender:
        for step in range(8):
            server.train(step, *(PATHS if step % 3 else PATHS[step % 2 :]))
            reports = sender.send_weights()
            server.check(reports)
            assert [sent(report) for report in reports] == [step > 0] * 2
            assert len({report.update_id for report in reports}) == 1


def overwrite(served: nn.Module) -> None:
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.add_(1)


@pytest.mark.parametrize("refusing", PATHS)
def test_a_part_whose_delta_is_refused_is_sent_whole(
    served: tuple[Server, str], refusing: str
) -> None:
    """The set is tried again; the other part sends a delta all the same."""
    server, url = served
    with ws.connect_set(server.trained, to=url, delta="always") as sender:
        for step in range(3):
            server.train(step)
            server.check(sender.send_weights())
        overwrite(server.served[refusing])
        server.train(3)
        reports = sender.send_weights()
        server.check(reports)
        assert [sent(report) for report in reports] == [path != refusing for path in PATHS]
        for step in range(4, 7):
            server.train(step)
            reports = sender.send_weights()
            server.check(reports)
            assert [sent(report) for report in reports] == [True, True]


@pytest.mark.usefixtures("first_lines")
@pytest.mark.parametrize("refusing", PATHS)
def test_a_part_whose_result_is_not_that_of_the_delta_is_sent_whole(
    served: tuple[Server, str], refusing: str
) -> None:
    """A write that torch does not count, which the next delta but one reads back."""
    server, url = served
    with ws.connect_set(server.trained, to=url, delta="always", scrub=1.0) as sender:
        for step in range(3):
            server.train(step)
            server.check(sender.send_weights())
        server.served[refusing].p3.data.view(torch.int16).numpy()[100, 3] ^= 1
        kinds = []
        for _ in range(3):
            for model in server.trained.values():
                with torch.no_grad():
                    model.p0[0, 0] += 1
            reports = sender.send_weights()
            server.check(reports)
            kinds.append([sent(report) for report in reports])
        assert kinds == [[True, True], [path != refusing for path in PATHS], [True, True]]
