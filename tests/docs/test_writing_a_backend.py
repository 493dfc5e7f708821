"""The backend of docs/writing-a-backend.md keeps the rules that the page states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.docs.pages import blocks
from weightsync.backends import registry
from weightsync.backends.base import LoadContext, Received
from weightsync.testing import TinyModel
from weightsync.weights.sink import WeightSink
from weightsync.wire.messages import UpdateInfo

CODE = [b for b in blocks("docs/writing-a-backend.md") if b.language == "python"]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in CODE[:3]:  # what init says, and both halves
        exec(compile(block.text, block.page, "exec"), names)
    return names


def model(seed: int) -> TinyModel:
    torch.manual_seed(seed)
    made = TinyModel()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@dataclass
class Pair:
    """Both halves, connected over one directory."""

    sender: Any
    receiver: Any
    trained: TinyModel
    events: list[str] = field(default_factory=list)

    def receive(
        self,
        update: UpdateInfo,
        sink: WeightSink,
        check: Callable[[], None] = lambda: None,
    ) -> Received:
        """Bring one update to a sink; commit it if it came."""
        load_target = sink.open_target(self.receiver.whole_plan, "staged")
        load_target.begin()
        reception = LoadContext(
            open_target=lambda _: load_target,
            touch=lambda: self.events.append("touch"),
            check=check,
            verification=sink.verification,
        )
        received: Received = self.receiver.receive_weights(update, reception)
        load_target.validate()
        load_target.commit()
        return received


@pytest.fixture
def pair(page: dict[str, Any], tmp_path: Path) -> Iterator[Pair]:
    trained = model(1)
    sender = page["SpoolSender"](ws.ModuleSource(trained), tmp_path, timeout_s=20.0)
    receiver = page["SpoolReceiver"](["HOST-any"])
    receiver.init_transfer_engine(sender.init_info(0))
    yield Pair(sender, receiver, trained)
    receiver.shutdown()
    sender.close()


def nothing() -> None:
    pass


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_updates_arrive_one_after_another_and_are_proved(pair: Pair) -> None:
    server = model(2)
    sink = ws.ModuleSink(server)
    for _ in range(3):
        with torch.no_grad():
            pair.trained.norm.add_(1)
        update = pair.sender.begin([0], verify=True)
        sending = threading.Thread(target=pair.sender.transfer, args=(nothing,))
        sending.start()  # the receiver waits for it
        received = pair.receive(update, sink)
        sending.join(10)
        pair.sender.end()
        assert received.verified == "arrived"
        assert same(pair.trained, server)


def test_a_hook_gets_whole_tensors(pair: Pair) -> None:
    got: dict[str, torch.Tensor] = {}
    sink = ws.HookSink(lambda pairs: got.update({n: t.clone() for n, t in pairs}))
    update = pair.sender.begin([0], verify=False)
    pair.sender.transfer(nothing)
    assert pair.receive(update, sink).verified == "none"
    assert set(got) == set(pair.trained.state_dict())
    assert all(torch.equal(got[n], t) for n, t in pair.trained.state_dict().items())


def test_a_flipped_bit_is_named_and_nothing_was_touched(pair: Pair, tmp_path: Path) -> None:
    server = model(2)
    update = pair.sender.begin([0], verify=True)
    pair.sender.transfer(nothing)
    spool = tmp_path / "1.weights"
    content = bytearray(spool.read_bytes())
    content[5] ^= 1
    spool.write_bytes(content)
    with pytest.raises(ws.VerificationError) as caught:
        pair.receive(update, ws.ModuleSink(server))
    assert caught.value.names == ("embedding",)
    assert pair.events == []
    assert same(server, model(2))


def test_an_abort_ends_the_wait(pair: Pair) -> None:
    def abort() -> None:
        raise ws.TransferError("given up")

    update = pair.sender.begin([0], verify=True)
    with pytest.raises(ws.TransferError, match="given up"):
        pair.receive(update, ws.ModuleSink(model(2)), abort)


def test_a_sender_that_is_gone_is_noticed(pair: Pair) -> None:
    assert pair.receiver.sender_alive()
    update = pair.sender.begin([0], verify=True)
    pair.sender.close()
    with pytest.raises(ws.TransferError, match="died"):
        pair.receive(update, ws.ModuleSink(model(2)))


def test_ends_may_come_twice_and_after_a_failed_init(page: dict[str, Any], tmp_path: Path) -> None:
    sender = page["SpoolSender"](ws.ModuleSource(model(1)), tmp_path)
    offer = sender.init_info(0)
    sender.close()
    sender.close()
    tmp_path.joinpath("alive").unlink()
    tmp_path.rmdir()
    receiver = page["SpoolReceiver"](["HOST-any"])
    with pytest.raises(ws.SegmentError, match="no directory"):
        receiver.init_transfer_engine(offer)
    receiver.shutdown()
    receiver.shutdown()
    with pytest.raises(ws.ProtocolError, match="init first"):
        _ = receiver.manifest


def test_the_registry_takes_it_once(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", {})
    halves = (page["SpoolSender"], page["SpoolReceiver"])
    registry.register_backend("spool", *halves)
    assert registry.load_backend("spool") == halves
    with pytest.raises(ws.ConfigError, match="registered already"):
        registry.register_backend("spool", *halves)
