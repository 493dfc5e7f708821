"""Messages of each protocol that this version has, as they were recorded, mean what they meant."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.wire import shapes
from tests.wire.record import DIRECTORY
from tests.wire.shapes import Plain
from weightsync.errors import ProtocolError
from weightsync.wire import codec, problem
from weightsync.wire.messages import CALLS, PROTOCOL, PROTOCOL_MIN

RECORDED: dict[int, Plain] = {
    made["protocol"]: made
    for made in (json.loads(path.read_text()) for path in sorted(DIRECTORY.glob("*.json")))
}
SPOKEN = range(PROTOCOL_MIN, PROTOCOL + 1)
MESSAGES = [message for number in SPOKEN for message in RECORDED[number]["messages"]]
SCHEMA: dict[str, Plain] = RECORDED[PROTOCOL]["schema"]
PASSED_ON = {"SegmentHandle", "CudaHandle", "ProbeInfo", "Peer"}
"""Structs of replies that a sender passes on to other receivers: it has to know all fields."""


def name_of(message: Plain) -> str:
    if "problem" in message:
        return f"problem {message['problem']['error']}"
    return f"{'request' if 'request' in message else 'reply'} {message['call']}"


def test_each_protocol_has_its_recording() -> None:
    assert set(SPOKEN) <= set(RECORDED), "python -m tests.wire.record"


@pytest.mark.parametrize("number", SPOKEN)
def test_a_recording_has_every_call_and_every_struct(number: int) -> None:
    recording = RECORDED[number]
    messages = recording["messages"]
    for kind in ("request", "reply"):
        assert {m["call"] for m in messages if kind in m} == set(CALLS)
    assert {name for m in messages for name, _ in shapes.structs_in(m)} == set(recording["schema"])


def contains(now: Any, before: Any) -> bool:
    """Whether `now` is `before`, but for fields that it has besides."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and contains(now[key], value) for key, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(now) == len(before) and all(map(contains, now, before))
    return bool(now == before)


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_recorded_message_means_what_it_meant(message: Plain) -> None:
    shapes.decode(message, message)
    if "problem" in message:
        document = msgspec.convert(message["problem"], problem.Problem)
        again = msgspec.to_builtins(problem.to_problem(problem.from_problem(document)))
        assert contains(again, message["problem"])
        return
    call = message["call"]
    if "request" in message:
        decoded = codec.decode_request(call, json.dumps(message["request"]).encode())
        again = {"call": call, "request": json.loads(codec.encode(decoded))}
        assert filled(again) == filled(message)
    else:
        reply = codec.decode_reply(call, json.dumps(message["reply"]).encode())
        again = {"call": call, "reply": json.loads(codec.encode(reply))}
        assert contains(filled(again), filled(message))


def filled(message: Plain) -> Plain:
    """Return a message with the defaults of its protocol in the fields that are left out."""

    def fill(name: str, fields: Plain) -> Plain:
        properties = SCHEMA[name].get("properties", {})
        return {k: v["default"] for k, v in properties.items() if "default" in v} | fields

    return shapes.changed(message, fill)


@pytest.mark.parametrize("number", SPOKEN)
def test_the_fields_are_those_of_the_recording(number: int) -> None:
    """docs/wire-protocol.md says which changes need a new number, and which are none at all."""
    before = RECORDED[number]["schema"]
    assert shapes.breaks(before, shapes.schema(), newer=number < PROTOCOL) == []


def added(field: str, **schema: Any) -> Callable[[Plain], object]:
    return lambda struct: struct["properties"].update({field: schema})


def removed(field: str) -> Callable[[Plain], object]:
    return lambda struct: struct["properties"].pop(field)


@pytest.mark.parametrize(
    ("struct", "change", "found", "newer"),
    [
        ("StepReply", added("more", type="integer"), [], []),
        ("StepReply", removed("delta"), ["StepReply.delta is gone"], None),
        ("StepReply", lambda s: s["required"].append("delta"), ["StepReply.delta is needed"], None),
        ("StepReply", lambda s: s["required"].remove("state"), ["StepReply.state may be"], None),
        ("StepReply", lambda s: s.update(additionalProperties=False), ["StepReply treats"], None),
        ("StepReply", added("nbytes", type="string"), ["StepReply.nbytes was"], None),
        ("FinishRequest", added("more", type="integer"), ["FinishRequest.more is new"], []),
        ("FinishRequest", removed("fleet"), ["FinishRequest.fleet is gone"], None),
        ("SegmentHandle", added("huge", type="boolean"), ["SegmentHandle.huge is new"], []),
        ("PauseRequest", added("mode", enum=["abort", "keep"]), ["PauseRequest.mode was"], None),
        (
            "PauseRequest",
            added("mode", enum=["abort", "drop", "keep", "wait"], default="keep"),
            ["PauseRequest.mode was"],
            [],
        ),
        ("LabelRequest", added("new_version", type="string", maxLength=512), [], []),
        ("LabelRequest", added("new_version", type="string", maxLength=8), ["LabelRequest."], None),
    ],
)
def test_a_change_that_is_not_allowed_is_found(
    struct: str, change: Callable[[Plain], object], found: list[str], newer: list[str] | None
) -> None:
    """`newer` is what is found under a new protocol number, None for the same."""
    present = copy.deepcopy(SCHEMA)
    change(present[struct])
    for is_newer, wanted in ((False, found), (True, found if newer is None else newer)):
        seen = shapes.breaks(SCHEMA, present, newer=is_newer)
        assert len(seen) == len(wanted)
        assert all(map(str.startswith, seen, wanted)), seen


def cases(change: Callable[[str, Plain], Plain]) -> Iterator[tuple[Plain, str, Plain]]:
    """Yield each message with one struct of it changed, once for each struct and kind of message.

    Structs that `change` leaves as they are do not count.
    """
    done = set()
    for message in MESSAGES:
        for name, made in shapes.variants(message, change):
            key = name_of(message), name
            if made != message and key not in done:
                done.add(key)
                yield message, name, made


def error_of(message: Plain, original: Plain) -> ProtocolError | None:
    try:
        shapes.decode(message, original)
    except ProtocolError as exc:
        return exc
    return None


def test_unknown_fields_of_replies_are_ignored_and_those_of_requests_refused() -> None:
    """A reply may hold a request, and a request a reply, in a fetch: they are what they are."""
    ignored: set[str] = set()
    refused: set[str] = set()
    for message, name, made in cases(lambda _, fields: {**fields, "unheard_of": [1]}):
        error = error_of(made, message)
        assert error is None or "unknown field `unheard_of`" in str(error)
        (refused if error else ignored).add(name)
    assert ignored | refused == set(SCHEMA)
    assert not ignored & refused
    assert ignored >= {struct.__name__ for struct in shapes.ANSWERED}
    assert refused >= PASSED_ON
    assert refused >= {struct.__name__ for struct in (*shapes.REQUESTED, *shapes.SENT)}


def needed(name: str) -> list[str]:
    """Return the required fields; a tag is none where there is only one kind of handle."""
    return [field for field in SCHEMA[name].get("required", ()) if field != "kind"]


def test_a_field_that_is_missing_is_named() -> None:
    count = 0
    for at in range(max(len(needed(name)) for name in SCHEMA)):

        def without(name: str, fields: Plain, at: int = at) -> Plain:
            dropped = needed(name)[at : at + 1]
            return {key: value for key, value in fields.items() if key not in dropped}

        for message, name, made in cases(without):
            field = needed(name)[at]
            # Without this one it is another form of update_info, which has no sender.
            seen = "sender" if field == "registered" else field
            with pytest.raises(ProtocolError, match=rf"\b{seen}\b"):
                shapes.decode(made, message)
            count += 1
    assert count > 100


def words_of(name: str) -> dict[str, Any]:
    """Return the fields of a struct that hold one of some words, with a word that is none."""
    found: dict[str, Any] = {}
    for field, schema in SCHEMA[name].get("properties", {}).items():
        if "enum" in schema:
            found[field] = "unheard of"
        elif "enum" in schema.get("items", {}):
            found[field] = ["unheard of"]
    return found


def test_a_word_that_is_not_known_is_refused_with_its_path() -> None:
    refused = set()
    for at in range(max(len(words_of(name)) for name in SCHEMA)):

        def other(name: str, fields: Plain, at: int = at) -> Plain:
            return {**fields, **dict(list(words_of(name).items())[at : at + 1])}

        for message, name, made in cases(other):
            field = list(words_of(name))[at]
            with pytest.raises(ProtocolError, match=rf"- at `\$.*\.?{field}(\[|`)"):
                shapes.decode(made, message)
            refused.add(f"{name}.{field}")
    assert refused == {f"{name}.{field}" for name in SCHEMA for field in words_of(name)}
    assert refused >= {
        "StepReply.state",
        "StepReply.apply",
        "StepReply.verified",
        "Status.state",
        "Status.delta_forms",
        "Status.verification",
        "SyncReport.rule",
        "PauseRequest.mode",
        "CheckRequest.action",
    }
