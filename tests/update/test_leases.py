"""An update of which nothing more is heard ends, whatever else the receiver does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment
from weightsync.specs import Manifest, ManifestDifference
from weightsync.tensors import as_bytes
from weightsync.update.lifecycle import ApplyChoice, State
from weightsync.weights.sinks.base import LoadTarget
from weightsync.weights.sinks.module_sink import ModuleSink

LEASE_S = 3.0
"""Longer than what has to happen within it takes on a busy machine; see let_a_lease_pass."""
PATIENT_S = 30.0


def tell(receiver: ws.WeightReceiver, call: str, **body: object) -> None:
    receiver.handle({"call": call, "body": body})


def send_all(receiver: ws.WeightReceiver) -> None:
    """A whole Linear(4, 4), in a message that carries its handles."""
    tensors = {name: t.detach() for name, t in nn.Linear(4, 4).named_parameters()}
    handles: list[object] = []
    with Segment.create(4096) as segment:
        at = 0
        for tensor in tensors.values():
            flat = as_bytes(tensor)
            segment.tensor(at, flat.numel()).copy_(flat)
            where = {"kind": "segment", "name": segment.name, "nbytes": 4096, "offset": at}
            handles.append({host_key(): where})
            at += flat.numel()
        info = {
            "names": list(tensors),
            "dtype_names": ["float32"] * len(tensors),
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "ipc_handles": handles,
        }
        tell(receiver, "update_weights", update_info=info)


def let_a_lease_pass(receiver: ws.WeightReceiver) -> None:
    """Put the last message and the last sign of life a lease back: the timer finds them too old."""
    session = receiver._session
    with session.lock:
        session._last_message_at -= session._lease_s
        session._last_sign_at -= session._lease_s


def take_several_leases(receiver: ws.WeightReceiver) -> None:
    """Called in a step, which then takes so long; the timer looks in the midst of it."""
    for _ in range(6):
        let_a_lease_pass(receiver)
    receiver._session._check_progress()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def state_after_a_while(receiver: ws.WeightReceiver) -> str:
    """Where an update that has begun ends; the state it is in when it does not."""
    deadline = time.monotonic() + PATIENT_S
    while receiver.status().update_id and time.monotonic() < deadline:
        state = receiver.status().state
        if state in ("READY", "TORN"):
            break
        time.sleep(0.02)
    return receiver.status().state


class Slow(ModuleSink):
    """Takes its time to compare names, as a large model's init does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def difference(self, offered: Manifest) -> ManifestDifference:
        self.asked.set()
        assert self.go_on.wait(PATIENT_S)
        return super().difference(offered)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("apply", "left"), [("staged", "READY"), ("in_place", "TORN")])
def test_a_prepared_session_that_nobody_finishes_ends(
    apply: ApplyChoice, left: str, times: int
) -> None:
    """A prepare that is repeated is no end of waiting."""
    receiver = ws.WeightReceiver(nn.Linear(4, 4), apply=apply, lease_s=LEASE_S)
    try:
        tell(receiver, "start_weight_update")
        send_all(receiver)
        for _ in range(times):
            tell(receiver, "prepare_weight_update")
        assert receiver.status().state == "PREPARED"
        let_a_lease_pass(receiver)
        assert state_after_a_while(receiver) == left
    finally:
        receiver.close()


@pytest.mark.parametrize("beyond_a_lease", [False, True], ids=["at-the-expiry", "for-a-lease"])
def test_one_that_expires_while_another_sender_connects_ends(beyond_a_lease: bool) -> None:
    """Its abort waits for the end of the connect; after a lease it gives up, and is tried again."""
    sink = Slow(nn.Linear(4, 4))
    receiver = ws.WeightReceiver(sink, lease_s=LEASE_S)
    session = receiver._session
    connected: list[ws.WeightSender] = []

    def connect() -> None:
        connected.append(ws.connect(nn.Linear(4, 4), to=receiver.handle, timeout_s=PATIENT_S))

    connecting = threading.Thread(target=connect)
    try:
        tell(receiver, "start_weight_update")
        connecting.start()
        assert sink.asked.wait(PATIENT_S)
        let_a_lease_pass(receiver)
        until(lambda: session.lifecycle.state is State.ABORTING)
        if beyond_a_lease:
            until(lambda: session._timer.runs)  # it does not while the abort waits
        sink.go_on.set()
        connecting.join(PATIENT_S)
        assert connected
        assert state_after_a_while(receiver) == "READY"
        assert connected[0].send_weights().version == 1
    finally:
        sink.go_on.set()
        if connecting.ident is not None:
            connecting.join(PATIENT_S)
        for sender in connected:
            sender.close()
        receiver.close()


def test_one_that_expires_while_many_look_on_ends() -> None:
    """Each look lets go of what dead senders left, and takes a turn for that."""
    receiver = ws.WeightReceiver(nn.Linear(4, 4), lease_s=LEASE_S)
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            receiver.status()

    looking = [threading.Thread(target=look) for _ in range(2)]
    try:
        with ws.connect(nn.Linear(4, 4), to=receiver.handle, timeout_s=PATIENT_S) as sender:
            sender.send_weights()
            for thread in looking:
                thread.start()
            tell(receiver, "start_weight_update")
            let_a_lease_pass(receiver)
            assert state_after_a_while(receiver) == "READY"
            over.set()
            assert sender.send_weights().version == 2
    finally:
        over.set()
        for thread in looking:
            thread.join(PATIENT_S)
        receiver.close()


def test_a_load_that_takes_longer_than_the_lease_is_no_silence() -> None:
    taken: list[str] = []

    def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        take_several_leases(receiver)
        names = [name for name, _ in pairs]
        taken.extend(names)
        return names

    receiver = ws.WeightReceiver(hook, apply="in_place", lease_s=LEASE_S)
    try:
        tell(receiver, "start_weight_update")
        send_all(receiver)
        tell(receiver, "finish_weight_update")
        assert (receiver.version, sorted(taken)) == (1, ["bias", "weight"])
    finally:
        receiver.close()


class SlowAfterwards(ModuleSink):
    """Takes several leases to check what came, and to put it to use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.receiver: ws.WeightReceiver | None = None
        self.took_long: set[str] = set()

    def difference(self, offered: Manifest) -> ManifestDifference:
        self._take_long("difference")
        return super().difference(offered)

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        self._take_long("commit_all")
        super().commit_all(load_targets)

    def _take_long(self, what: str) -> None:
        if self.receiver is not None:
            take_several_leases(self.receiver)
            self.took_long.add(what)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_neither_is_a_prepare_or_a_swap_that_takes_longer(apply: ApplyChoice) -> None:
    """Of a session, which has no sender whose heartbeat would count."""
    sink = SlowAfterwards(nn.Linear(4, 4))
    receiver = sink.receiver = ws.WeightReceiver(sink, apply=apply, lease_s=LEASE_S)
    try:
        tell(receiver, "start_weight_update")
        send_all(receiver)
        tell(receiver, "finish_weight_update")
        assert (receiver.version, receiver.status().state) == (1, "READY")
        assert receiver.updates_total == {"committed": 1}
        assert sink.took_long == {"difference", "commit_all"}
    finally:
        receiver.close()


def test_a_step_that_does_not_fit_is_no_end_of_waiting() -> None:
    receiver = ws.WeightReceiver(nn.Linear(4, 4), lease_s=LEASE_S)
    try:
        tell(receiver, "start_weight_update", update_id="mine")
        for step, update_id in (("prepare", "other"), ("finish", "other"), ("finish", "mine")):
            with pytest.raises(ws.UpdateConflictError):
                tell(receiver, f"{step}_weight_update", update_id=update_id)
        assert receiver.status().state == "UPDATING"
        let_a_lease_pass(receiver)
        assert state_after_a_while(receiver) == "READY"
    finally:
        receiver.close()
