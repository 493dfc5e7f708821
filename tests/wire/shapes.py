"""A walk over the structs of a plain message, and a comparison of their fields with older ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from weightsync.backends.ring import IpcInit, RingUpdate
from weightsync.backends.tcp.payload import HostRing, RelayedUpdate, TcpInit
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALLS,
    REPLIES,
    CheckReply,
    EmptyUpdate,
    InitReply,
    RegisteredUpdate,
    Status,
    StepReply,
    UpdateRequest,
)
from weightsync.wire.offers import InitInfo, ProbeInfo, ProbeRequest
from weightsync.wire.problem import Problem

Plain = dict[str, Any]
Change = Callable[[str, Plain], Plain]
"""Returns the fields that a struct of this name is to have; its own are in the dict."""

SENT: tuple[type[msgspec.Struct], ...] = (RingUpdate, RelayedUpdate, IpcInit, TcpInit, ProbeInfo)
"""Payloads of requests, the more special after the others."""
REPLIED = (InitReply, Status, StepReply, CheckReply)
"""Replies that a fetch carries, in an order in which none is mistaken for another one."""
REQUESTED: tuple[type[msgspec.Struct], ...] = (
    *CALLS.values(),
    InitInfo,
    ProbeRequest,
    RegisteredUpdate,
    HandlesUpdate,
    EmptyUpdate,
)
ANSWERED: tuple[type[msgspec.Struct], ...] = (*dict.fromkeys(REPLIES.values()), HostRing, Problem)
_PAYLOADS = {
    ("UpdateRequest", "update_info"): (RegisteredUpdate, HandlesUpdate, EmptyUpdate),
    ("InitInfo", "payload"): SENT,
    ("RegisteredUpdate", "payload"): SENT,
    ("ProbeRequest", "payload"): SENT,
    ("InitReply", "payload"): (HostRing,),
    ("FetchRequest", "reply"): REPLIED,
}


def changed_request(message: Mapping[str, Any], change: Change) -> Plain:
    """Return `{"call": …, "body": {…}}` with every struct in it changed, the inner ones first."""
    call = message["call"]
    return {"call": call, "body": _changed(CALLS[call], message["body"], change)}


def changed_reply(call: str, reply: Any, change: Change) -> Any:
    """Return a plain reply with every struct in it changed."""
    return _changed(REPLIES[call], reply, change)


def changed_problem(problem: Plain, change: Change) -> Any:
    """Return a problem document with its fields changed."""
    return _changed(Problem, problem, change)


def _changed(kind: Any, plain: Any, change: Change) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _changed(args[0], plain, change)
    if origin in (Union, UnionType):
        found = next((arg for arg in args if _fits(plain, arg)), NoneType)
        return _changed(found, plain, change)
    if origin in (list, tuple) and isinstance(plain, list | tuple):
        return [_changed(args[0], item, change) for item in plain]
    if origin is dict and isinstance(plain, dict):
        return {key: _changed(args[1], value, change) for key, value in plain.items()}
    if isinstance(plain, dict) and _is_struct(kind):
        hints = get_type_hints(kind, include_extras=True)
        fields = {
            name: _changed_field(kind.__name__, name, hints.get(name), value, change)
            for name, value in plain.items()
        }
        return change(kind.__name__, fields)
    return plain


def _changed_field(owner: str, name: str, kind: Any, value: Any, change: Change) -> Any:
    if (owner, name) == ("FetchReply", "request") and value is not None:
        return changed_request(value, change)
    found = next((k for k in _PAYLOADS.get((owner, name), ()) if _fits(value, k)), kind)
    return _changed(found, value, change)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind))


def _fits(plain: Any, kind: Any) -> bool:
    try:
        msgspec.convert(plain, kind)
    except msgspec.ValidationError:
        return False
    return True


def structs_in(message: Plain) -> Iterator[tuple[str, Plain]]:
    """Yield name and fields of each struct in a recorded message."""
    found: list[tuple[str, Plain]] = []

    def note(name: str, fields: Plain) -> Plain:
        found.append((name, fields))
        return fields

    changed(message, note)
    yield from found


def decode(message: Plain, original: Plain) -> None:
    """Decode a recorded message, and what it carries, of the types that `original` has there.

    Raises ProtocolError.
    """
    if "problem" in message:
        codec.decode_payload(message["problem"], Problem)
        return
    call = message["call"]
    if "reply" in message:
        reply, was = message["reply"], original["reply"]
        codec.reply_from_plain(call, reply)
        if was.get("payload") is not None:
            codec.decode_payload(reply["payload"], HostRing)
        if was.get("request") is not None:
            inner, before = reply["request"], was["request"]
            decode(
                {"call": inner["call"], "request": inner["body"]},
                {"call": before["call"], "request": before["body"]},
            )
        return
    body, was = message["request"], original["request"]
    codec.from_plain({"call": call, "body": body})
    for carrier in ("init_info", "probe", "update_info"):
        before = (was.get(carrier) or {}).get("payload")
        if before is not None:
            kind = next(kind for kind in SENT if _fits(before, kind))
            codec.decode_payload(body[carrier]["payload"], kind)
    if was.get("reply") is not None:
        found = next(kind for kind in REPLIED if _fits(was["reply"], kind))
        calls = (name for name, kind in REPLIES.items() if kind is found)
        codec.reply_from_plain(next(calls), body["reply"])


def variants(message: Plain, change: Callable[[str, Plain], Plain]) -> Iterator[tuple[str, Plain]]:
    """Yield the message once for each struct in it, with that struct changed, and its name."""
    for at, (name, _) in enumerate(structs_in(message)):
        count = itertools.count()

        def at_one(struct: str, fields: Plain, at: int = at, count: Any = count) -> Plain:
            return change(struct, dict(fields)) if next(count) == at else fields

        yield name, changed(message, at_one)


def changed(message: Plain, change: Change) -> Plain:
    """Return a recorded message with every struct in it changed."""
    if "request" in message:
        made = changed_request({"call": message["call"], "body": message["request"]}, change)
        return {"call": message["call"], "request": made["body"]}
    if "reply" in message:
        reply = changed_reply(message["call"], message["reply"], change)
        return {"call": message["call"], "reply": reply}
    return {"problem": changed_problem(message["problem"], change)}


def schema() -> dict[str, Plain]:
    """Return the JSON Schema of every struct that can be in a message, by its name."""
    kinds = [kind for kind in (*REQUESTED, *ANSWERED, *SENT) if kind is not UpdateRequest]
    kinds.append(codec._UpdateEnvelope)  # its update_info is one of three structs without a tag
    _, found = msgspec.json.schema_components(kinds, ref_template="{name}")
    found["UpdateRequest"] = found.pop("_UpdateEnvelope")
    plain: dict[str, Plain] = json.loads(json.dumps(found))
    for struct in plain.values():
        struct.pop("description", None)
        struct.pop("title", None)
    return dict(sorted(plain.items()))


def breaks(recorded: dict[str, Plain], present: dict[str, Plain], *, newer: bool) -> list[str]:
    """Return the changes that docs/wire-protocol.md does not allow; `newer`: under a new number."""
    found: list[str] = []
    for name, before in recorded.items():
        now = present.get(name)
        if now is None:
            found.append(f"{name} is gone")
            continue
        fields, old = now.get("properties", {}), before.get("properties", {})
        needed, were_needed = set(now.get("required", ())), set(before.get("required", ()))
        found += [f"{name}.{field} is gone" for field in old if field not in fields]
        found += [f"{name}.{field} is needed now" for field in sorted(needed - were_needed)]
        found += [f"{name}.{field} may be left out now" for field in sorted(were_needed - needed)]
        if now.get("additionalProperties", True) is False and not newer:
            added = [field for field in fields if field not in old]
            found += [f"{name}.{field} is new, where unknown fields are refused" for field in added]
        if before.get("additionalProperties", True) != now.get("additionalProperties", True):
            found.append(f"{name} treats unknown fields in another way")
        found += [
            f"{name}.{field} was {old[field]}, and is {fields[field]}"
            for field in old
            if field in fields
            and not _is_wide(_without_empty(old[field]), _without_empty(fields[field]), newer=newer)
        ]
    return found


def _without_empty(field: Plain) -> Plain:
    """Return a field without a default that is empty: msgspec says a factory's since 0.23 alone.

    Whether a field may be left out at all is in the `required` of its struct.
    """
    return {key: to for key, to in field.items() if key != "default" or to not in ([], {})}


def _is_wide(before: Any, now: Any, *, newer: bool) -> bool:
    """Whether a type takes what it took before, and is the same but for larger limits."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        if isinstance(before, list) and isinstance(now, list):
            return len(before) == len(now) and all(
                _is_wide(one, other, newer=newer) for one, other in zip(before, now, strict=True)
            )
        return bool(before == now)
    if newer and "enum" in before and "enum" in now:
        return set(before["enum"]) <= set(now["enum"])
    limits = {key for key in {*before, *now} if "max" in key.lower()}
    rest = {*before, *now} - limits
    wide = all(key not in now or (key in before and now[key] >= before[key]) for key in limits)
    return wide and all(
        key in before and key in now and _is_wide(before[key], now[key], newer=newer)
        for key in rest
    )
