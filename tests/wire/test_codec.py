from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.transports.contract import REQUESTS, UPDATE
from weightsync.backends.ring import RingUpdate
from weightsync.errors import ProtocolError
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.report import SyncReport
from weightsync.specs import Manifest, TensorSpec
from weightsync.wire import codec
from weightsync.wire.messages import (
    ALL_CALLS,
    CALL_OF,
    REPLIES,
    CheckReply,
    EmptyUpdate,
    FinishRequest,
    InitReply,
    RegisteredUpdate,
    Request,
    Status,
    StepReply,
    UpdateRequest,
)
from weightsync.wire.offers import ManifestMessage

SEGMENT = {"kind": "segment", "name": "weightsync-1", "nbytes": 64}
UNPACKED: dict[str, Any] = {
    "names": ["a", "b"],
    "dtype_names": ["float32", "int8"],
    "shapes": [[2], [3]],
    "ipc_handles": [{"HOST-1": SEGMENT}, {"HOST-1": SEGMENT}],
}
PACKED = UNPACKED | {
    "ipc_handles": {"HOST-1": SEGMENT},
    "tensor_sizes": [8, 3],
    "packed": True,
}
REGISTERED = {"sender": "s", "epoch": 1, "payload": {"any": [1]}, "registered": True}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_come_back_whole(request_: Request) -> None:
    call = CALL_OF[type(request_)]
    assert codec.decode_request(call, codec.encode(request_)) == request_
    plain = codec.to_plain(request_)
    assert codec.from_plain(plain) == request_
    assert codec.from_plain(json.loads(json.dumps(plain))) == request_


def test_every_call_has_one_request_and_one_reply() -> None:
    assert set(REPLIES) == set(ALL_CALLS)
    assert len(CALL_OF) == len(ALL_CALLS)
    assert {type(request) for request in REQUESTS} == set(CALL_OF)


def test_a_steady_update_is_short() -> None:
    ring = RingUpdate(epoch=200, base=1 << 40, packed=True)
    info = RegisteredUpdate(sender="s" * 16, epoch=200, payload=ring, registered=True)
    update = UpdateRequest(update_info=info, update_id="u" * 16, prepare=True)
    finish = FinishRequest(update_id="u" * 16, table_digest="d" * 32)
    assert len(codec.encode(update)) + len(codec.encode(finish)) < 1024


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["stall_s", "seconds"])
def test_a_duration_that_is_none_is_refused(field: str, value: float) -> None:
    """A report with it could not be written as JSON."""
    call = CALL_OF[FinishRequest]
    plain = codec.reply_to_plain(StepReply(state="READY", version=1))
    damaged = {**plain, field: value if field == "stall_s" else {"copy": value}}
    with pytest.raises(ProtocolError, match=field):
        codec.reply_from_plain(call, damaged)


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({}, EmptyUpdate),
        (UNPACKED, HandlesUpdate),
        (UNPACKED | {"packed": False}, HandlesUpdate),
        (PACKED, HandlesUpdate),
        (REGISTERED, RegisteredUpdate),
    ],
)
def test_the_fields_tell_the_kinds_of_update_apart(info: dict[str, Any], kind: type) -> None:
    assert type(codec.parse_update_info(info)) is kind
    body = json.dumps({"update_info": info}).encode()
    request = codec.decode_request("update_weights", body)
    assert isinstance(request, UpdateRequest)
    assert type(request.update_info) is kind


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (UNPACKED | {"shapes": [[2]]}, "names has 2 entries, shapes has 1"),
        (UNPACKED | {"dtype_names": []}, "names has 2 entries, dtype_names has 0"),
        (UNPACKED | {"ipc_handles": []}, "names has 2 entries, ipc_handles has 0"),
        (UNPACKED | {"fingerprints": ["0"]}, "names has 2 entries, fingerprints has 1"),
        (PACKED | {"tensor_sizes": [8]}, "names has 2 entries, tensor_sizes has 1"),
        (UNPACKED | {"shapes": [[2], [-3]]}, "$.shapes[1][0]"),
        (UNPACKED | {"shapes": [[2], [1 << 63]]}, "$.shapes[1][0]"),
        (UNPACKED | {"shapes": [[2], [1] * 17]}, "$.shapes[1]"),
        (UNPACKED | {"names": ["a", ""]}, "$.names[1]"),
        (UNPACKED | {"names": ["a", "n" * 2000]}, "$.names[1]"),
        (UNPACKED | {"names": "ab"}, "$.names"),
        (UNPACKED | {"extra": 1}, "unknown field `extra`"),
        (UNPACKED | {"tensor_sizes": [8]}, "names has 2 entries, tensor_sizes has 1"),
        (UNPACKED | {"packed": True}, "ipc_handles is a list; packed=True needs one dict"),
        (UNPACKED | {"ipc_handles": {}}, "ipc_handles is a dict; packed=False needs a list"),
        (UNPACKED | {"ipc_handles": None}, "ipc_handles is missing; packed=False needs a list"),
        (PACKED | {"tensor_sizes": None}, "packed=True needs tensor_sizes"),
        (UNPACKED | {"ipc_handles": [{}, {"HOST-1": {"kind": "pickle"}}]}, "$.ipc_handles[1]"),
        (UNPACKED | {"ipc_handles": [{}, {"HOST-1": SEGMENT | {"nbytes": -1}}]}, ".nbytes"),
        (UNPACKED | {"ipc_handles_pickled": "gASV"}, "pickle runs code"),
        ({"names": ["a"]}, "missing required field"),
        (REGISTERED | {"epoch": 0}, "$.epoch"),
        (REGISTERED | {"base": -1}, "unknown field `base`"),
    ],
)
def test_a_bad_update_info_says_where(info: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(text)):
        codec.parse_update_info(info)
    with pytest.raises(ProtocolError, match=re.escape(text)):
        codec.decode_request("update_weights", json.dumps({"update_info": info}).encode())


@pytest.mark.parametrize(
    "info", [{"backend": "nccl"}, {"names": []}, {"backend": "ipc"}, {"backend": 3}]
)
def test_a_bad_init_info_is_refused(info: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        codec.parse_init_info(info)


def test_an_empty_init_info_asks_who_is_there() -> None:
    assert codec.parse_init_info({}) is None


def test_an_unknown_call_names_the_known_ones() -> None:
    with pytest.raises(ProtocolError, match="known: init_weight_transfer_engine"):
        codec.decode_request("load_pickle", b"")


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"call": "resume"},
        {"call": "resume", "body": {}, "more": 1},
        {"call": "resume", "body": object()},
        {"call": "resume", "body": [1]},
        {"call": 3, "body": {}},
    ],
)
def test_a_plain_message_that_is_none_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        codec.from_plain(message)


def test_replies_are_checked_too() -> None:
    reply = StepReply(state="READY", version=3, seconds={"load": 0.5})
    assert codec.decode_reply("finish_weight_update", codec.encode(reply)) == reply
    plain = codec.reply_to_plain(reply)
    assert codec.reply_from_plain("finish_weight_update", plain) == reply
    with pytest.raises(ProtocolError, match=r"\$\.version"):
        codec.decode_reply("finish_weight_update", b'{"state":"READY","version":"3"}')
    with pytest.raises(ProtocolError, match="is not valid"):
        codec.reply_from_plain("weight_info", plain)


STEP: dict[str, object] = {"state": "READY", "version": 3, "apply": "staged", "verified": "held"}
STATUS: dict[str, object] = {
    "instance": "i",
    "protocol": 1,
    "state": "READY",
    "version": 3,
    "may_generate": True,
    "apply": "staged",
    "verification": "held",
}
PART = {"shape": [1], "spans": [[[0, 1]]], "nbytes": 8, "total": "0" * 16, "words": 1}
REPORT = json.loads(
    SyncReport(
        version=1,
        label=None,
        update_id="u",
        tensors=1,
        nbytes=1,
        packed=True,
        path="tcp",
        apply="staged",
        verified="held",
        stall_s=0.0,
        seconds={"total": 1.0},
        control_nbytes=1,
        control_messages=2,
        peak_extra_nbytes=0,
    ).to_json()
)
del REPORT["gbps"]


@pytest.mark.parametrize(
    ("call", "reply", "change", "path"),
    [
        ("update_weights", STEP, {"verified": "sampled"}, "verified"),
        ("update_weights", STEP, {"state": "ready"}, "state"),
        ("finish_weight_update", STEP, {"state": ""}, "state"),
        ("finish_weight_update", STEP, {"apply": "swapped"}, "apply"),
        ("weight_info", STATUS, {"state": "IDLE"}, "state"),
        ("weight_info", STATUS, {"apply": "auto"}, "apply"),
        ("weight_info", STATUS, {"verification": "hashed"}, "verification"),
        ("weight_info", STATUS, {"delta_forms": ["rows"]}, "delta_forms"),
        ("weight_checker", {"version": 1}, {"parts": {"a": {**PART, "total": "1"}}}, "total"),
        ("weight_checker", {"version": 1}, {"parts": {"a": {**PART, "pieces": {0: "f"}}}}, "piec"),
        ("fetch_weights", {}, {"report": {**REPORT, "verified": "sampled"}}, "verified"),
        ("fetch_weights", {}, {"report": {**REPORT, "apply": "auto"}}, "apply"),
        ("fetch_weights", {}, {"report": {**REPORT, "rule": "one-phase"}}, "rule"),
    ],
)
def test_words_of_replies_that_are_not_known_are_refused(
    call: str, reply: dict[str, object], change: dict[str, object], path: str
) -> None:
    for good in ({"report": REPORT},) if call == "fetch_weights" else (reply,):
        codec.reply_from_plain(call, good)
    with pytest.raises(ProtocolError, match=path):
        codec.reply_from_plain(call, {**reply, **change})
    body = json.dumps({**reply, **change}).encode()
    with pytest.raises(ProtocolError, match=path):
        codec.decode_reply(call, body)


GOOD = msgspec.convert(STATUS, Status)
STEPPED = StepReply(state="READY", version=3)
ANY: Any = object()


@pytest.mark.parametrize(
    ("call", "made", "path"),
    [
        ("finish_weight_update", {}, "is a dict"),
        ("finish_weight_update", GOOD, "is a Status"),
        ("finish_weight_update", replace(STEPPED, state="DONE"), "$.state"),
        ("finish_weight_update", replace(STEPPED, version="3"), "$.version"),
        ("finish_weight_update", replace(STEPPED, nbytes=None), "$.nbytes"),
        ("finish_weight_update", replace(STEPPED, stall_s=float("nan")), "$.stall_s"),
        ("weight_info", replace(GOOD, delta_forms=["rows"]), "$.delta_forms[0]"),
        ("init_weight_transfer_engine", InitReply(status=replace(GOOD, state="x")), "$.status"),
        ("init_weight_transfer_engine", InitReply(status=GOOD, payload=object()), "not valid"),
        ("weight_checker", CheckReply(version=1, parts={"a": ANY}), "not valid"),
    ],
)
def test_a_reply_that_a_transport_made_is_checked_whole(call: str, made: Any, path: str) -> None:
    for good in (("finish_weight_update", STEPPED), ("weight_info", GOOD)):
        codec.check_reply(*good)
    codec.check_reply("init_weight_transfer_engine", InitReply(status=GOOD, payload=STEPPED))
    with pytest.raises(ProtocolError, match=re.escape(path)):
        codec.check_reply(call, made)


class Places(msgspec.Struct):
    """A payload of a backend."""

    of: dict[int, str]


def test_numbers_that_are_keys_come_back_from_json() -> None:
    """Over HTTP a payload was JSON, whose keys are strings."""
    payload = Places(of={3: "a"})
    for plain in (msgspec.to_builtins(payload), json.loads(msgspec.json.encode(payload))):
        assert codec.decode_payload(plain, Places) == payload
    with pytest.raises(ProtocolError, match=re.escape("- at `key` in `$.of`")):
        codec.decode_payload({"of": {"three": "a"}}, Places)


def test_a_manifest_comes_back_with_its_digest() -> None:
    specs = (TensorSpec("a", "bfloat16", (2, 0)), TensorSpec("größe", "bool", ()))
    manifest = Manifest(specs, {"tied": "a"})
    again = codec.manifest_from_wire(codec.manifest_to_wire(manifest))
    assert again == manifest
    assert again.digest == manifest.digest


def test_a_manifest_that_makes_no_sense_is_refused() -> None:
    message = ManifestMessage(names=["a"], dtype_names=["float99"], shapes=[[1]])
    with pytest.raises(ProtocolError, match="manifest: a: unknown dtype 'float99'; known: float64"):
        codec.manifest_from_wire(message)


def test_the_codec_reads_what_it_wrote_last() -> None:
    # The whole-model message is the longest: nothing of it is lost on the way.
    body = json.loads(codec.encode(UPDATE))
    assert body["update_info"]["names"] == ["layer.weight", "größe"]
    assert body["start"] == {"version": 3, "label": "step 3"}
