"""Encoding of control messages as JSON and as plain data. Decoding runs no foreign code."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeVar, cast

import msgspec

from weightsync.errors import ConfigError, ProtocolError
from weightsync.runtime.provided import provided
from weightsync.specs import Manifest
from weightsync.wire.messages import (
    ALL_CALLS,
    CALL_OF,
    PROTOCOL,
    PROTOCOL_MIN,
    REPLIES,
    EmptyUpdate,
    ForeignUpdate,
    InitRequest,
    Protocols,
    RegisteredUpdate,
    Reply,
    Request,
    StartTerms,
    Status,
    UpdateInfo,
    UpdateRequest,
    WorkerReport,
    choose_protocol,
)
from weightsync.wire.offers import InitInfo, ManifestMessage, Message, ProbeRequest, UpdateId
from weightsync.wire.struct_types import prepare

T = TypeVar("T")


class InvalidReplyError(ProtocolError):
    """A reply that is none to its request. The receiver may have done what the request says."""


class _InitEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    """An InitRequest with an undecoded `init_info`, which may be an empty object."""

    init_info: Any = None
    probe: ProbeRequest | None = None


class _UpdateEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    """An UpdateRequest with an undecoded `update_info`, whose fields choose its type."""

    update_info: Any
    update_id: UpdateId | None = None
    start: StartTerms | None = None
    prepare: bool = False


class _InitShape(msgspec.Struct):
    """The fields of an init_info that say which protocols the sender has."""

    protocol_min: int
    protocol_max: int


class _StatusShape(msgspec.Struct):
    """The fields of a status that say which protocols the receiver has."""

    protocol: int
    protocol_min: int = 1


class _UpdateShape(msgspec.Struct):
    """The field of an update_info that chooses its type."""

    registered: bool = False


def encode(message: Message) -> bytes:
    """Return the JSON of a request or a reply."""
    return msgspec.json.encode(message)


def decode_request(call: str, body: bytes) -> Request:
    """Return the request of `call` in the JSON `body`; an empty body is `{}`.

    Raises ProtocolError with the path of the wrong field.
    """
    return _whole(_decode(body or b"{}", _type_of(call)))


def decode_reply(call: str, body: bytes) -> Reply:
    """Return the reply to `call` in a JSON body. Raises InvalidReplyError."""
    try:
        return cast(Reply, msgspec.json.decode(body, type=REPLIES[call]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _invalid_reply(call, body, exc) from exc


def decode_report(body: bytes) -> WorkerReport:
    """Return the report in a JSON body. Raises InvalidReplyError."""
    try:
        return msgspec.json.decode(body, type=WorkerReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidReplyError(f"the report of a receiver is not valid: {exc}") from exc


def to_plain(message: Request) -> dict[str, object]:
    """Return a request as plain data: `{"call": name, "body": {…}}` of str, int, list, dict."""
    call = CALL_OF[type(message)]
    return {"call": call, "body": msgspec.to_builtins(message)}


def from_plain(message: object) -> Request:
    """Return the request that `to_plain` encoded. Raises ProtocolError where it is invalid."""
    if not isinstance(message, Mapping) or set(message) != {"call", "body"}:
        seen = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise ProtocolError(
            f"a plain message has the keys call and body, this is {seen}; "
            "forward the dict of the transport unchanged"
        )
    return _whole(_convert(message["body"], _type_of(str(message["call"]))))


def reply_to_plain(reply: Reply) -> dict[str, object]:
    """Return a reply as plain data."""
    return cast(dict[str, object], msgspec.to_builtins(reply))


def reply_from_plain(call: str, reply: object) -> Reply:
    """Return the reply that `reply_to_plain` encoded. Raises InvalidReplyError."""
    try:
        return cast(Reply, _typed(reply, REPLIES[call]))
    except (msgspec.ValidationError, RecursionError) as exc:
        raise _invalid_reply(call, reply, exc) from exc


def check_reply(call: str, reply: object) -> None:
    """Raise InvalidReplyError unless a reply that was not decoded here is one to `call`.

    A transport of the user's own may have made it.
    """
    if not isinstance(reply, REPLIES[call]):
        raise InvalidReplyError(f"the peer's reply to {call} is a {type(reply).__name__}")
    try:
        plain = msgspec.to_builtins(reply)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise _invalid_reply(call, None, exc) from exc
    reply_from_plain(call, plain)


_MAY_CAST = ":cast"
"""After the name of a dtype: a receiver that keeps the tensor in another one casts it itself."""


def manifest_to_wire(manifest: Manifest, may_cast: Container[str] = ()) -> ManifestMessage:
    """Return a manifest as columns: names, dtypes, shapes.

    Receivers may cast the tensors in `may_cast`, which they keep in unlike dtypes.
    """
    return ManifestMessage(
        names=[spec.name for spec in manifest.specs],
        dtype_names=[
            spec.dtype + _MAY_CAST if spec.name in may_cast else spec.dtype
            for spec in manifest.specs
        ],
        shapes=[list(spec.shape) for spec in manifest.specs],
        aliases=dict(manifest.aliases),
    )


def manifest_from_wire(message: ManifestMessage) -> Manifest:
    """Return the manifest of columns. Raises ProtocolError, which names the wrong entry."""
    dtypes = [dtype.removesuffix(_MAY_CAST) for dtype in message.dtype_names]
    try:
        return Manifest.from_columns(message.names, dtypes, message.shapes, message.aliases)
    except ConfigError as exc:
        raise ProtocolError(f"manifest: {exc}") from exc


def castable(message: ManifestMessage) -> frozenset[str]:
    """Return the names of the tensors that a receiver may cast; see `manifest_to_wire`."""
    columns = zip(message.names, message.dtype_names, strict=False)
    return frozenset(name for name, dtype in columns if dtype.endswith(_MAY_CAST))


def parse_init_info(data: object) -> InitInfo | None:
    """Return the typed init info of a dict; None where it is empty (IPC needs none)."""
    if _is_empty(data):
        return None
    try:
        if isinstance(data, Mapping) and "backend" not in data:
            raise ProtocolError("init_info has no backend; send {} or a whole init_info")
        return _convert(data, InitInfo)
    except ProtocolError:
        _check_protocols(data)
        raise


def _check_protocols(data: object) -> None:
    """Raise ProtocolError for an init_info of protocols that this version does not have.

    Its other fields need not be those of this version.
    """
    try:
        shape = msgspec.convert(data, _InitShape)
    except (msgspec.ValidationError, RecursionError):
        return
    sender = Protocols(shape.protocol_min, shape.protocol_max)
    choose_protocol(sender, Protocols(PROTOCOL_MIN, PROTOCOL))


def decode_payload(payload: Any, kind: type[T]) -> T:
    """Return a backend's payload as the struct `kind`. Raises ProtocolError where it is invalid."""
    return payload if isinstance(payload, kind) else _convert(payload, kind)


def parse_update_info(data: object) -> UpdateInfo:
    """Return the typed update info of a dict. Raises ProtocolError with the path of an error."""
    if _is_empty(data):
        return EmptyUpdate()
    if _convert(data, _UpdateShape).registered:
        return _convert(data, RegisteredUpdate)
    kind: type[ForeignUpdate] = provided("update")
    return kind.parse(data)


def _is_empty(data: object) -> bool:
    return data is None or data == {}


_ENVELOPES: dict[type[Message], type[msgspec.Struct]] = {
    InitRequest: _InitEnvelope,
    UpdateRequest: _UpdateEnvelope,
}


def _type_of(call: str) -> type[msgspec.Struct]:
    """Return the type that a request of `call` is decoded as. Raises ProtocolError."""
    kind = ALL_CALLS.get(call)
    if kind is None:
        raise ProtocolError(f"there is no call {call!r}; known: {', '.join(ALL_CALLS)}")
    return _ENVELOPES.get(kind, kind)


def _whole(decoded: msgspec.Struct) -> Request:
    """Return the request of a decoded body, with its plain part typed as well."""
    if isinstance(decoded, _InitEnvelope):
        return InitRequest(init_info=parse_init_info(decoded.init_info), probe=decoded.probe)
    if isinstance(decoded, _UpdateEnvelope):
        return UpdateRequest(
            update_info=parse_update_info(decoded.update_info),
            update_id=decoded.update_id,
            start=decoded.start,
            prepare=decoded.prepare,
        )
    return cast(Request, decoded)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _invalid(kind, exc) from exc


def _convert(data: object, kind: type[T]) -> T:
    try:
        return _typed(data, kind)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise _invalid(kind, exc) from exc


def _typed(data: object, kind: type[T]) -> T:
    """Return plain data as `kind`. Numbers that are keys are strings if it was JSON on its way."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:
        return msgspec.convert(data, kind, str_keys=True)  # slower


def _invalid_reply(call: str, reply: object, exc: Exception) -> InvalidReplyError:
    """Return the error of a reply; that of the protocols, for the status of another protocol."""
    if REPLIES[call] is Status:
        try:
            shape = (
                msgspec.json.decode(reply, type=_StatusShape)
                if isinstance(reply, bytes)
                else msgspec.convert(reply, _StatusShape)
            )
            receiver = Protocols(shape.protocol_min, shape.protocol)
            choose_protocol(Protocols(PROTOCOL_MIN, PROTOCOL), receiver)
        except ProtocolError as apart:
            return InvalidReplyError(str(apart))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # no status of any protocol
    return InvalidReplyError(f"the peer's reply to {call} is not valid: {exc}")


def _invalid(kind: type, exc: Exception) -> ProtocolError:
    return ProtocolError(f"the message is not a valid {kind.__name__.strip('_')}: {exc}")


prepare(*(_ENVELOPES.get(kind, kind) for kind in ALL_CALLS.values()), *REPLIES.values())
prepare(WorkerReport)
prepare(InitInfo)
prepare(_InitShape, _StatusShape, _UpdateShape, RegisteredUpdate, EmptyUpdate)
