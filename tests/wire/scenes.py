"""Trainers and receivers that do everything that messages are for, over a line of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import weightsync as ws
from tests.soak.malformed import whole_update
from weightsync.shm.segment import Segment
from weightsync.tensors import contiguous_bytes
from weightsync.testing import TinyModel
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.wire import problem

Handle = Callable[[Mapping[str, Any]], dict[str, Any]]
Line = Callable[[Handle], Handle]
"""Returns what the sender calls in place of a receiver's `handle`."""
TIMEOUT_S = 20.0


def model(seed: int) -> TinyModel:
    made = TinyModel()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return made


def step(trainer: nn.Module) -> None:
    """Change some numbers of each tensor."""
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.view(-1)[:3] += 1


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def carried(
    handle: Handle,
    message: Mapping[str, Any],
    *,
    reply: Callable[[Any], Any],
    document: Callable[[dict[str, Any]], Any],
) -> Any:
    """Handle a message at the other end of a line, as a transport does.

    Returns what `reply` makes of the reply, or raises the error that `document` makes of its
    problem document.
    """
    try:
        answer = handle(message)
    except Exception as exc:  # noqa: BLE001  # it goes over the line
        plain = document(msgspec.to_builtins(problem.to_problem(exc)))
    else:
        return reply(answer)
    error = msgspec.convert(plain, problem.Problem)
    raise problem.error_of(error, peer="peer", call=message["call"])


def update(line: Line, apply: Any = "staged", packed: bool | None = None) -> None:
    """Whole models and a subset, with a label; an older version is refused."""
    trainer, held = model(1), model(2)
    receiver = ws.WeightReceiver(held, apply=apply)
    with ws.connect(trainer, to=line(receiver.handle), packed=packed) as sender:
        report = sender.send_weights(7, label="step 700")
        assert (report.version, report.verified, receiver.label) == (7, "held", "step 700")
        assert same(trainer, held)
        step(trainer)
        with pytest.raises(ws.StaleVersionError) as caught:
            sender.send_weights(3)
        assert (caught.value.held, caught.value.offered) == (7, 3)
        assert sender.send_weights().version == receiver.version == 8
        assert same(trainer, held)
        step(trainer)
        with sender.update(partial=True) as part:
            part.send([("norm", trainer.norm)])
        assert torch.equal(held.norm, trainer.norm)
        assert not same(trainer, held)
        assert sender.send_weights().receivers[0].verified == "held"
        assert same(trainer, held)
    assert receiver.status().senders == {}
    receiver.close()


def delta(line: Line) -> None:
    """Only what changed is sent, and verified."""
    trainer, held = model(1), model(2)
    receiver = ws.WeightReceiver(held)
    with ws.connect(trainer, to=line(receiver.handle), delta="always", scrub=1.0) as sender:
        for count in range(3):
            report = sender.send_weights()
            assert report.delta is not None
            assert (report.delta.sent, report.verified) == (count > 0, "held")
            assert same(trainer, held)
            step(trainer)
    receiver.close()


def give_up(sender: ws.WeightSender, trainer: TinyModel) -> None:
    with sender.update() as part:
        part.send([("norm", trainer.norm)])
        raise InterruptedError


def abort(line: Line) -> None:
    """An update that its trainer gives up, and one that the receiver's hook refuses."""
    trainer, held = model(1), model(2)
    receiver = ws.WeightReceiver(held)
    with ws.connect(trainer, to=line(receiver.handle)) as sender:
        sender.send_weights()
        before = model(1)
        step(trainer)
        with pytest.raises(InterruptedError):
            give_up(sender, trainer)
        assert (receiver.status().state, receiver.version) == ("READY", 1)
        assert same(before, held)
        assert sender.send_weights().version == 2
        assert same(trainer, held)
    receiver.close()
    refuses = True

    def load(tensors: Any) -> list[str]:
        loaded = dict(tensors)
        if refuses:
            raise ValueError("no room")
        taken.update({name: tensor.clone() for name, tensor in loaded.items()})
        return list(loaded)

    taken: dict[str, torch.Tensor] = {}
    hooked = ws.WeightReceiver(load)
    with ws.connect(trainer, to=line(hooked.handle)) as sender:
        with pytest.raises(ws.WeightSyncError, match="no room"):
            sender.send_weights()
        refuses = False
        sender.send_weights()
        assert all(torch.equal(taken[name], t) for name, t in trainer.named_parameters())
    hooked.close()


def resync(line: Line) -> None:
    """A receiver that was restarted gets the weights of the others, which keep theirs."""
    trainer, holding = model(1), [model(2), model(3)]
    receivers = [ws.WeightReceiver(held) for held in holding]
    lines = [line(lambda message, at=at: receivers[at].handle(message)) for at in range(2)]  # type: ignore[misc]  # a default
    with ws.connect(trainer, to=lines) as sender:
        sender.send_weights(4)
        receivers[1].close()
        holding[1] = model(4)
        receivers[1] = ws.WeightReceiver(holding[1])
        target = sender.send_weights().receivers[1].target
        assert all(same(trainer, held) for held in holding)
        receivers[1].close()
        holding[1] = model(5)
        receivers[1] = ws.WeightReceiver(holding[1])
        assert sender.resync(target).version == receivers[1].version == 5
        assert all(same(trainer, held) for held in holding)
    for receiver in receivers:
        receiver.close()


def fetch(line: Line) -> None:
    """A receiver takes the weights of another one, without a trainer."""
    trainer, holding = model(1), [model(2), model(3)]
    receivers = [ws.WeightReceiver(held) for held in holding]
    with ws.connect(trainer, to=receivers[0].handle) as sender:
        sender.send_weights(3, label="three")
    report = ws.fetch(receivers[1], line(receivers[0].handle), timeout_s=TIMEOUT_S)
    assert (report.version, report.verified, receivers[1].label) == (3, "held", "three")
    assert same(trainer, holding[1])
    for receiver in receivers:
        receiver.close()


def other_host(line: Line) -> None:
    """Two receivers of one other host, by `tcp`: one feeds the other."""
    trainer, holding = model(1), [model(2), model(3)]
    receivers = [ws.WeightReceiver(held) for held in holding]
    lines = [line(receiver.handle) for receiver in receivers]
    with ws.connect(trainer, to=lines, backend="tcp", timeout_s=TIMEOUT_S) as sender:
        for version in (1, 2):
            step(trainer)
            report = sender.send_weights()
            assert (report.version, report.path, report.verified) == (version, "tcp", "held")
            assert all(same(trainer, held) for held in holding)
    for receiver in receivers:
        receiver.close()


def client(line: Line) -> None:
    """A client without init: it carries its handles itself, and takes single steps."""
    sent, held = model(1), model(2)
    receiver = ws.WeightReceiver(held)
    call = line(receiver.handle)

    def post(name: str, **body: Any) -> dict[str, Any]:
        return call({"call": name, "body": body})

    with Segment.create(64 << 10) as segment:
        info = whole_update(sent, segment)
        post("start_weight_update", update_id="u-1", version=2, label="by hand")
        tensors = [contiguous_bytes(tensor.detach()) for tensor in sent.parameters()]
        info["fingerprints"] = [to_hex(mix64(tensor)) for tensor in tensors]
        assert post("update_weights", update_id="u-1", update_info=info)["state"] == "UPDATING"
        assert post("prepare_weight_update", update_id="u-1")["state"] == "PREPARED"
        assert post("finish_weight_update", update_id="u-1")["version"] == 2
        assert same(sent, held)
        post("start_weight_update", update_id="u-2")
        post("abort_weight_update", update_id="u-2", reason="by hand")
    assert post("update_weight_version", new_version="named")["label"] == "named"
    checksums = post("weight_checker")["checksums"]
    assert len(checksums) == 3
    assert post("weight_checker", action="compare", checksums=checksums)["equal"] is True
    other = {**checksums, "norm": "0" * 16}
    assert post("weight_checker", action="compare", checksums=other)["different"] == ["norm"]
    assert post("pause", mode="wait")["paused"] is True
    assert "paused" not in post("resume")
    post("reset_prefix_cache")
    assert post("weight_info")["version"] == 2
    post("shutdown_weight_transfer_engine")
    receiver.close()


SCENES: dict[str, Callable[[Line], None]] = {
    "registered memory": lambda line: update(line, packed=False),
    "buckets": lambda line: update(line, packed=True),
    "in place": lambda line: update(line, apply="in_place"),
    "delta": delta,
    "abort": abort,
    "resync": resync,
    "fetch": fetch,
    "other host": other_host,
    "client": client,
}
