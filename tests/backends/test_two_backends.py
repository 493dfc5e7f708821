"""One update by two backends, and handshakes of the core with engines that fail half way."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import weightsync as ws
from tests.docs.pages import blocks
from weightsync.backends import registry
from weightsync.errors import ConnectError
from weightsync.wire import codec
from weightsync.wire.messages import InitRequest

TIMEOUT_S = 10.0
PAGE = [block for block in blocks("docs/writing-a-backend.md") if block.language == "python"][:4]


@pytest.fixture
def spool(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> type[ws.Backend]:
    monkeypatch.setenv("SPOOL_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_endpoints", {})
    names: dict[str, Any] = {}
    for block in PAGE:
        exec(compile(block.text, block.page, "exec", dont_inherit=True), names)
    ws.register_backend(names["Spool"])
    made: type[ws.Backend] = names["Spool"]
    return made


class Held:
    """A receiver that may believe to be on another host; init messages to it may be cut."""

    def __init__(self, *hosts: str) -> None:
        self.model = nn.Linear(4, 3)
        self.receiver = ws.WeightReceiver(self.model)
        if hosts:
            self.receiver._session.senders.keys[:] = hosts
        self.cut = False
        self.inits: list[Any] = []

    def __call__(self, message: Mapping[str, Any]) -> object:
        if message["call"] == "init_weight_transfer_engine" and message["body"].get("init_info"):
            if self.cut:
                raise ConnectError("cut")
            self.inits.append(codec.from_plain(message))
        return self.receiver.handle(message)

    def equals(self, model: nn.Module) -> bool:
        mine, theirs = self.model.state_dict(), model.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.fixture
def near_and_far() -> Iterator[tuple[Held, Held]]:
    near, far = Held(), Held("HOST-elsewhere")
    with closing(near.receiver), closing(far.receiver):
        yield near, far


class Model(nn.Linear):
    """A model, and a callable source of it that may be changed between two passes."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.changes_in_pass = 0
        self.passes = 0

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        if self.passes == self.changes_in_pass:
            self.step()
        for name, parameter in self.named_parameters():
            yield name, parameter.detach()

    def step(self) -> None:
        with torch.no_grad():
            self.weight.add_(1)


@pytest.mark.usefixtures("spool", "shm_clean")
def test_each_receiver_is_sent_the_update_by_its_own_backend(
    near_and_far: tuple[Held, Held],
) -> None:
    near, far = near_and_far
    model = Model()
    with ws.connect(model, to=[near, far], backend=["ipc", "spool"], timeout_s=TIMEOUT_S) as sender:
        for _ in range(3):
            model.step()
            report = sender.send_weights()
            assert report.path == "shared_memory+spool"
            assert [receiver.path for receiver in report.receivers] == ["shared_memory", "spool"]
            assert near.equals(model)
            assert far.equals(model)
        model.step()
        with sender.update(partial=True) as update:
            update.send([("weight", model.weight.detach())])
        assert near.equals(model)
        assert far.equals(model)
        assert "host" in report.receivers[1].skipped_paths["shared_memory"]


@pytest.mark.usefixtures("spool", "shm_clean")
@pytest.mark.parametrize("late", [1, 2], ids=["in the first pass", "between the passes"])
def test_a_source_that_changes_between_two_backends_is_named(
    near_and_far: tuple[Held, Held], late: int
) -> None:
    """Each backend reads a source that makes its tensors: both have to see the same."""
    near, far = near_and_far
    model = Model()
    with ws.connect(
        model.pairs, to=[near, far], backend=["ipc", "spool"], timeout_s=TIMEOUT_S
    ) as sender:
        sender.send_weights()
        held = near.model.weight.detach().clone()
        model.changes_in_pass = model.passes + late
        if late == 1:  # at the start of the first pass is before the update
            sender.send_weights()
            assert near.equals(model)
            assert far.equals(model)
            return
        with pytest.raises(ws.VerificationError, match="weight") as caught:
            sender.send_weights()
        assert caught.value.names == ("weight",)
        assert torch.equal(near.model.weight, held)
        assert torch.equal(far.model.weight, held)
        sender.send_weights()
        assert near.equals(model)
        assert far.equals(model)


@pytest.mark.usefixtures("shm_clean")
def test_a_receiver_that_could_not_join_the_ring_of_its_host_tries_again() -> None:
    logging.getLogger("weightsync").setLevel(logging.ERROR)
    member, beside = Held(), Held()
    for held in (member, beside):
        held.receiver._session.senders.keys.append("h")
    model = Model()
    try:
        with ws.connect(model, to=member, backend="tcp", timeout_s=TIMEOUT_S) as sender:
            sender.send_weights()
            sender.add(beside)
            assert beside.equals(model)
            beside.cut = True
            with pytest.raises(ConnectError):
                sender.send_weights()
            beside.cut = False
            for inits in (3, 4, 4):  # by the other one, then as a member of its own at first
                model.step()
                sender.send_weights()
                assert member.equals(model)
                assert beside.equals(model)
                assert (len(member.inits), len(beside.inits)) == (1, inits)
    finally:
        member.receiver.close()
        beside.receiver.close()
        logging.getLogger("weightsync").setLevel(logging.NOTSET)


@pytest.mark.parametrize("payload", [7, {}, {"extra": 1}])
def test_a_malformed_init_closes_no_engine(payload: object) -> None:
    held = Held()
    model = Model()
    with (
        closing(held.receiver),
        ws.connect(model, to=held, backend="tcp", timeout_s=TIMEOUT_S) as sender,
    ):
        sender.send_weights()
        sent = held.inits[-1].init_info
        bad = msgspec.structs.replace(sent, payload=payload, generation=sent.generation + 1)
        with pytest.raises(ws.ProtocolError):
            held.receiver.dispatch(InitRequest(init_info=bad))
        model.step()
        sender.send_weights()
        assert held.equals(model)
        assert len(held.inits) == 1
