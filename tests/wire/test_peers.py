"""Peers of the recorded protocol, and newer ones: they update, abort, fetch and send deltas."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.wire import shapes
from tests.wire.scenes import SCENES, Handle, Line, carried
from tests.wire.shapes import Change, Plain
from tests.wire.test_recorded import RECORDED

pytestmark = pytest.mark.usefixtures("shm_clean")


REQUESTED = {
    name
    for name, struct in RECORDED[max(RECORDED)]["schema"].items()
    if struct.get("additionalProperties", True) is False
}
"""Structs of requests, and those that senders pass on in requests: see PASSED_ON."""


class Peer:
    """A line to a peer, or from one, that changes the structs of requests and of replies."""

    def __init__(self, of_requests: Change, of_replies: Change) -> None:
        self.seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._of_requests = self._counted(of_requests)
        self._of_replies = self._counted(of_replies)

    def _counted(self, change: Change) -> Change:
        def counted(name: str, fields: Plain) -> Plain:
            made = change(name, fields)
            with self._lock:
                self.seen[name] += made != fields
            return made

        return counted

    def line(self, handle: Handle) -> Handle:
        def call(message: Mapping[str, Any]) -> Plain:
            name = message["call"]
            reply: Plain = carried(
                handle,
                as_json(shapes.changed_request(message, self._of_requests)),
                reply=lambda reply: as_json(shapes.changed_reply(name, reply, self._of_replies)),
                document=lambda found: shapes.changed_problem(found, self._of_replies),
            )
            return reply

        return call


def as_json(plain: Any) -> Plain:
    made: Plain = json.loads(json.dumps(plain))
    return made


def known(schema: Mapping[str, Plain]) -> Change:
    """Return a change that leaves the fields of a recorded schema."""

    def strip(name: str, fields: Plain) -> Plain:
        names = schema.get(name, {}).get("properties", {})
        return {key: value for key, value in fields.items() if key in names or key == "kind"}

    return strip


def same(_: str, fields: Plain) -> Plain:
    return fields


def more(name: str, fields: Plain) -> Plain:
    """Add what no version knows to a struct of a reply."""
    # The reply to a fetch holds a request, which has the fields of a common protocol.
    if name in REQUESTED:
        return fields
    added: Plain = {"unheard_of": {"a": [1, None]}, "unheard_of_flag": True}
    if name == "Problem":
        attributes = {**fields.get("attributes", {}), "unheard_of": 0.5, "held_by": None}
        return {**fields, **added, "attributes": attributes}
    return {**fields, **added}


@pytest.mark.parametrize("number", sorted(RECORDED))
@pytest.mark.parametrize("scene", SCENES)
def test_a_peer_of_a_recorded_protocol(scene: str, number: int) -> None:
    """It has no field that this protocol had not, in requests and in replies."""
    strip = known(RECORDED[number]["schema"])
    SCENES[scene](Peer(strip, strip).line)


@pytest.mark.parametrize("scene", SCENES)
def test_a_receiver_that_says_more(scene: str) -> None:
    """All of its replies have fields that no sender knows, and so do its errors."""
    newer = Peer(same, more)
    SCENES[scene](newer.line)
    assert newer.seen.total() > 5


def test_the_peers_change_what_they_say() -> None:
    """What is stripped has lost a field, and what says more has it in a reply."""
    reply = {"state": "READY", "version": 1}
    called: list[Mapping[str, Any]] = []

    def handle(message: Mapping[str, Any]) -> Plain:
        called.append(message)
        return {**reply, "unheard_of": 1}

    strip = known(RECORDED[1]["schema"])
    line: Line = Peer(strip, strip).line
    message = {"call": "finish_weight_update", "body": {"update_id": "u", "unheard_of": 2}}
    assert line(handle)(message) == reply
    assert called == [{"call": "finish_weight_update", "body": {"update_id": "u"}}]
    assert Peer(same, more).line(handle)(message) == {
        **reply,
        "unheard_of": {"a": [1, None]},
        "unheard_of_flag": True,
    }
