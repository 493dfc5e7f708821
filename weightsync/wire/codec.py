"""Messages to and from bytes (JSON) and plain data. Nothing here can run foreign code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from weightsync.errors import ProtocolError
from weightsync.specs import Manifest
from weightsync.wire.messages import (
    CALL_OF,
    CALLS,
    NO_PICKLES,
    REPLIES,
    EmptyUpdate,
    HandlesUpdate,
    InitRequest,
    RegisteredUpdate,
    Reply,
    Request,
    StartTerms,
    UpdateInfo,
    UpdateRequest,
)
from weightsync.wire.offers import (
    DistributedInit,
    IpcInit,
    ManifestMessage,
    Message,
    ProbeInfo,
    UpdateId,
)
from weightsync.wire.struct_types import prepare

T = TypeVar("T")


class _InitEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    init_info: msgspec.Raw = msgspec.Raw(b"{}")
    probe: ProbeInfo | None = None


class _UpdateEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    update_info: msgspec.Raw
    update_id: UpdateId | None = None
    start: StartTerms | None = None
    prepare: bool = False


class _UpdateShape(msgspec.Struct):
    """Just enough of an update_info to know which struct it must be."""

    registered: bool = False
    ipc_handles_pickled: object = None


class _InitShape(msgspec.Struct):
    backend: str | None = None


def encode(message: Message) -> bytes:
    """Return the JSON of a request or a reply."""
    return msgspec.json.encode(message)


def decode_request(call: str, body: bytes) -> Request:
    """Return the request of `call` that the JSON `body` holds; an empty body is `{}`.

    Raises ProtocolError with the path of what is wrong.
    """
    kind = CALLS.get(call)
    if kind is None:
        raise ProtocolError(f"there is no call {call!r}; known: {', '.join(CALLS)}")
    body = body or b"{}"
    if kind is InitRequest:
        return _decode_init(body)
    if kind is UpdateRequest:
        return _decode_update(body)
    return cast(Request, _decode(body, kind))


def decode_reply(call: str, body: bytes) -> Reply:
    """Return the reply to `call`. Raises ProtocolError when the JSON is not one."""
    return cast(Reply, _decode(body, REPLIES[call]))


def to_plain(message: Request) -> dict[str, object]:
    """Return a request as plain data: `{"call": name, "body": {…}}` of str, int, list, dict."""
    call = CALL_OF[type(message)]
    return {"call": call, "body": msgspec.to_builtins(message)}


def from_plain(message: object) -> Request:
    """Return the request that `to_plain` made. Raises ProtocolError when it is none."""
    if not isinstance(message, Mapping) or set(message) != {"call", "body"}:
        seen = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise ProtocolError(
            f"a plain message has the keys call and body, this is {seen}; "
            "pass on what the transport was given"
        )
    try:
        body = msgspec.json.encode(message["body"])
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"the body is not plain data: {exc}") from exc
    return decode_request(str(message["call"]), body)


def reply_to_plain(reply: Reply) -> dict[str, object]:
    """Return a reply as plain data."""
    return cast(dict[str, object], msgspec.to_builtins(reply))


def reply_from_plain(call: str, reply: object) -> Reply:
    """Return the reply that `reply_to_plain` made. Raises ProtocolError when it is none."""
    try:
        return cast(Reply, msgspec.convert(reply, REPLIES[call]))
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"the peer's answer to {call} is not one of ours: {exc}") from exc


def manifest_to_wire(manifest: Manifest) -> ManifestMessage:
    """Return a manifest as columns."""
    return ManifestMessage(
        names=[spec.name for spec in manifest.specs],
        dtype_names=[spec.dtype for spec in manifest.specs],
        shapes=[list(spec.shape) for spec in manifest.specs],
        aliases=dict(manifest.aliases),
    )


def manifest_from_wire(
    message: ManifestMessage | HandlesUpdate,
) -> Manifest:
    """Return the manifest that columns describe. Raises ConfigError naming the wrong entry."""
    aliases = message.aliases if isinstance(message, ManifestMessage) else {}
    return Manifest.from_columns(message.names, message.dtype_names, message.shapes, aliases)


_INITS: dict[str, type[IpcInit | DistributedInit]] = {
    "ipc": IpcInit,
    "distributed": DistributedInit,
}


def parse_init_info(data: Mapping[str, object] | bytes) -> IpcInit | DistributedInit | None:
    """Return the typed init info of a dict or JSON; None when it is empty (IPC needs none)."""
    raw = data if isinstance(data, bytes) else msgspec.json.encode(data)
    if _is_empty(raw):
        return None
    shape = _decode(raw, _InitShape)
    if shape.backend is None:
        raise ProtocolError("init_info has no backend; send {} or a whole init_info")
    if shape.backend not in _INITS:
        known = ", ".join(_INITS)
        raise ProtocolError(
            f"init_info: backend {shape.backend!r} is not known here; known: {known}"
        )
    return _decode(raw, _INITS[shape.backend])


def parse_update_info(data: Mapping[str, Any] | bytes) -> UpdateInfo:
    """Return the typed update info of a dict or JSON. Raises ProtocolError saying what is wrong."""
    raw = data if isinstance(data, bytes) else msgspec.json.encode(data)
    if _is_empty(raw):
        return EmptyUpdate()
    shape = _decode(raw, _UpdateShape)
    if shape.ipc_handles_pickled is not None:  # whatever else is there or not
        raise ProtocolError(f"update_info.{NO_PICKLES}")
    if shape.registered:
        return _decode(raw, RegisteredUpdate)
    return _decode(raw, HandlesUpdate)


def _is_empty(raw: bytes) -> bool:
    return raw.translate(None, b" \t\r\n") in (b"{}", b"null")


def _decode_init(body: bytes) -> InitRequest:
    envelope = _decode(body, _InitEnvelope)
    return InitRequest(init_info=parse_init_info(bytes(envelope.init_info)), probe=envelope.probe)


def _decode_update(body: bytes) -> UpdateRequest:
    envelope = _decode(body, _UpdateEnvelope)
    return UpdateRequest(
        update_info=parse_update_info(bytes(envelope.update_info)),
        update_id=envelope.update_id,
        start=envelope.start,
        prepare=envelope.prepare,
    )


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        name = kind.__name__.strip("_")
        raise ProtocolError(f"the message is not a valid {name}: {exc}") from exc


_PARTS = (InitRequest, UpdateRequest)  # decoded part by part
prepare(*(kind for kind in CALLS.values() if kind not in _PARTS), *REPLIES.values())
prepare(_InitEnvelope, _UpdateEnvelope, IpcInit, DistributedInit)
prepare(RegisteredUpdate, HandlesUpdate, EmptyUpdate)
