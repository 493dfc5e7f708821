"""The kit itself: every act does what its line says, and the same every time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import weightsync as ws
from weightsync.testing import ACTS, Act, Fault, Faults, FaultyTransport
from weightsync.transports.callback import CallbackTransport
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    LabelRequest,
    PauseRequest,
    Request,
    ResumeRequest,
    StatusRequest,
)

LABEL, PAUSE, RESUME = "update_weight_version", "pause", "resume"


class Receiver:
    """Answers everything, and lists what arrived."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.real = ws.WeightReceiver(lambda _: set())

    def __call__(self, message: Mapping[str, Any]) -> object:
        self.arrived.append(message["call"])
        return self.real.handle(message)


def wired(*script: Fault, **settings: Any) -> tuple[FaultyTransport, Receiver]:
    receiver = Receiver()
    transport = CallbackTransport(receiver, "it")
    return FaultyTransport(transport, Faults(*script), **settings), receiver


def send(transport: FaultyTransport, *requests: Request) -> list[str]:
    """Send all; return the name of the error that each met, or nothing."""
    met = []
    for request in requests:
        try:
            transport.call(request, timeout_s=1.0)
            met.append("")
        except ws.WeightSyncError as exc:
            met.append(type(exc).__name__)
    return met


def label(name: str) -> LabelRequest:
    return LabelRequest(new_version=name)


def test_nothing_happens_by_itself() -> None:
    transport, receiver = wired()
    assert send(transport, label("a"), PauseRequest()) == ["", ""]
    assert receiver.arrived == [LABEL, PAUSE]
    assert (transport.target, transport.sent_messages) == ("it", 2)
    assert [event.call for event in transport.faults.log] == [LABEL, PAUSE]


@pytest.mark.parametrize(
    ("act", "arrived", "met"),
    [
        ("drop", [RESUME], ["TransportTimeout", ""]),
        ("drop_reply", [PAUSE, RESUME], ["ConnectError", ""]),
        ("repeat", [PAUSE, PAUSE, RESUME], ["", ""]),
        ("delay", [PAUSE, RESUME], ["", ""]),
        ("late", [RESUME, PAUSE], ["TransportTimeout", ""]),
        ("kill", [], ["ConnectError", "ConnectError"]),
        ("kill_after", [PAUSE], ["ConnectError", "ConnectError"]),
    ],
)
def test_each_act(act: Act, arrived: list[str], met: list[str]) -> None:
    transport, receiver = wired(Fault(act))
    assert send(transport, PauseRequest(), ResumeRequest()) == met
    assert receiver.arrived == arrived
    assert transport.faults.log[0].act == act
    assert transport.sent_messages == max(2, len(arrived))


def test_there_are_no_other_acts() -> None:
    cases = test_each_act.pytestmark[0].args[1]  # type: ignore[attr-defined]  # pytest's
    assert tuple(case[0] for case in cases) == ACTS


def test_a_fault_waits_for_its_call_and_number() -> None:
    transport, receiver = wired(Fault("drop", PAUSE, nth=2, times=2))
    requests: list[Request] = [PauseRequest(), ResumeRequest()]
    met = send(transport, *requests * 4)
    assert met == ["", "", "TransportTimeout", "", "TransportTimeout", "", "", ""]
    assert receiver.arrived.count(PAUSE) == 2
    assert not transport.faults.pending


def test_what_is_late_comes_after_as_many_answers_as_asked() -> None:
    transport, receiver = wired(Fault("late", LABEL, after=2))
    send(transport, label("old"), label("new"))
    assert receiver.real.label == "new"
    assert transport.deliver_late() == 1
    assert receiver.real.label == "old"
    transport.faults.add(Fault("late", LABEL, after=2))
    send(transport, label("older"), PauseRequest())
    assert receiver.real.label == "old"
    send(transport, ResumeRequest())
    assert receiver.real.label == "older"


def test_closing_delivers_what_is_late() -> None:
    transport, receiver = wired(Fault("late", after=9))
    send(transport, PauseRequest())
    transport.close()
    assert receiver.arrived == [PAUSE]
    assert send(transport, PauseRequest()) == ["ConnectError"]


def test_what_comes_late_and_is_refused_stands_in_the_log() -> None:
    transport, _ = wired(Fault("late"))
    bad = codec.from_plain({"call": "finish_weight_update", "body": {"update_id": "gone"}})
    assert send(transport, bad, StatusRequest()) == ["TransportTimeout", ""]
    errors = [event.error for event in transport.faults.log if event.act == "late"]
    assert [type(error).__name__ for error in errors] == ["TransportTimeout", "UpdateConflictError"]


def test_a_delay_beyond_patience_is_a_loss() -> None:
    transport, receiver = wired(Fault("delay", seconds=0.05))
    with pytest.raises(ws.TransportTimeout, match=r"within 0\.01 s"):
        transport.call(PauseRequest(), timeout_s=0.01)
    assert receiver.arrived == []


def test_a_kill_calls_back_and_lasts_until_revival() -> None:
    killed: list[str] = []
    transport, receiver = wired(
        Fault("late", PAUSE, after=5), Fault("kill", RESUME), on_kill=lambda: killed.append("it")
    )
    send(transport, PauseRequest(), ResumeRequest(), label("a"))
    assert (killed, receiver.arrived, transport.killed) == (["it"], [], True)
    transport.revive()
    assert send(transport, label("b")) == [""]
    assert transport.deliver_late() == 0, "what was on its way to the dead one is gone"


def test_chance_is_the_same_for_the_same_seed() -> None:
    def run(seed: int) -> list[str]:
        faults = Faults(seed=seed, chances={"drop": 0.3, "drop_reply": 0.3})
        transport = FaultyTransport(CallbackTransport(Receiver(), "it"), faults)
        return send(transport, *[PauseRequest()] * 40)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert set(run(1)) == {"", "TransportTimeout", "ConnectError"}


def test_after_clear_all_is_well() -> None:
    faults = Faults(Fault("drop", times=99), seed=1, chances={"drop": 1.0})
    transport = FaultyTransport(CallbackTransport(Receiver(), "it"), faults)
    assert send(transport, PauseRequest()) == ["TransportTimeout"]
    faults.clear()
    assert send(transport, PauseRequest()) == [""]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Fault("explode"),  # type: ignore[arg-type]  # on purpose
        lambda: Fault("drop", "no_such_call"),
        lambda: Fault("drop", nth=0),
        lambda: Faults(chances={"drop": 0.5}),
        lambda: Faults(seed=1, chances={"drop": 0.7, "late": 0.7}),
        lambda: Faults(seed=1, chances={"explode": 0.1}),  # type: ignore[dict-item]  # on purpose
        lambda: ws.testing.InProcessFleet(2, apply=["staged"]),
        lambda: ws.testing.InProcessFleet(0),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(ws.ConfigError):
        wrong()


def test_every_request_has_a_name_to_fail_by() -> None:
    assert {"update_weights", "finish_weight_update"} <= set(CALL_OF.values())
