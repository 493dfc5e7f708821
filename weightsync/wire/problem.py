"""Errors over the wire: problem documents (RFC 9457), raised as the same class on arrival."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from weightsync import errors
from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    NotReadyError,
    ProtocolError,
    RemoteError,
    TransferError,
    TransferTimeout,
    UpdateConflictError,
    WeightSyncError,
    text_of,
)
from weightsync.wire.struct_types import prepare

MEDIA_TYPE = "application/problem+json"

_CLASSES: dict[str, type[WeightSyncError]] = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, WeightSyncError)
}

_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "ManifestMismatchError": ("missing", "unexpected", "mismatched"),
    "StaleVersionError": ("held", "offered"),
    "UpdateConflictError": ("state", "update_id"),
    "SenderConflictError": ("owner", "since"),
    "SenderReplacedError": ("owner", "since"),
    "NotReadyError": ("state", "update_id"),
    "SourceBusyError": ("state", "update_id"),
    "VerificationError": ("names",),
    "AuthError": ("status",),
    "RemoteError": ("remote_type", "remote_message"),
}

_TYPES: dict[str, type] = {
    **dict.fromkeys(("missing", "unexpected", "mismatched", "names"), list),
    **dict.fromkeys(("held", "offered", "status"), int),
    **dict.fromkeys(("owner", "since", "state", "update_id", "remote_type", "remote_message"), str),
}
"""The types of all attributes; a value of another type is dropped."""

_STATUS: tuple[tuple[type[WeightSyncError], int], ...] = (
    (NotReadyError, 503),
    (errors.StaleVersionError, 409),
    (UpdateConflictError, 409),
    (errors.DeltaError, 409),
    (errors.UnknownSenderError, 409),
    (errors.SenderConflictError, 409),
    (errors.ManifestMismatchError, 422),
    (ProtocolError, 400),
    (ConfigError, 400),
    (TransferTimeout, 408),
    (TransferError, 422),
    (BackendUnavailableError, 422),
)

MAX_LISTED = 1000


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document; `error` is the class to raise, `attributes` its keyword arguments."""

    title: str
    status: int
    detail: str
    error: str
    type: str = "about:blank"
    attributes: dict[str, Any] = {}  # a newer peer's may be of other types


def to_problem(exc: BaseException) -> Problem:
    """Describe an error for the other side. A foreign error keeps its type's name and message."""
    if not isinstance(exc, WeightSyncError):
        remote = RemoteError(remote_type=type(exc).__name__, remote_message=text_of(exc))
        return _describe(remote, status=500)
    return _describe(exc, status=status_of(exc))


def status_of(exc: WeightSyncError) -> int:
    """Return the HTTP status of an error: the caller's fault is 4xx."""
    if isinstance(exc, AuthError):
        return exc.status
    return next((status for kind, status in _STATUS if isinstance(exc, kind)), 500)


def encode_problem(problem: Problem) -> bytes:
    """Return the JSON of a problem document."""
    return msgspec.json.encode(problem)


def encode_error(exc: BaseException) -> bytes:
    """Return the JSON of the problem document of an error; see `to_problem`."""
    return encode_problem(to_problem(exc))


def decode_problem(body: bytes) -> Problem | None:
    """Return the problem document in a body, None where it is none."""
    try:
        return msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_error(body: bytes, *, peer: str = "") -> WeightSyncError:
    """Return the error that `encode_error` wrote, with the name of `peer` in front.

    A ProtocolError for a body that is none.
    """
    document = decode_problem(body)
    if document is None:
        return ProtocolError(
            f"{peer or 'another process'} sent an error that cannot be read: {body[:80]!r}"
        )
    return from_problem(document, peer=peer)


def error_of(problem: Problem, *, peer: str, call: str) -> WeightSyncError:
    """Return the error that `peer` describes after `call`.

    The call is named with errors of foreign types alone: it says where in the peer to look. The
    text of the others is written for the user, who has called `connect` or `send_weights`.
    """
    is_foreign = _CLASSES.get(problem.error, RemoteError) is RemoteError
    return from_problem(problem, peer=f"{peer}: {call}" if is_foreign else peer)


def from_problem(problem: Problem, *, peer: str = "") -> WeightSyncError:
    """Return the error that a problem document describes, attributes included."""
    kind = _CLASSES.get(problem.error, RemoteError)
    allowed = _ATTRIBUTES.get(kind.__name__, ())
    attributes: dict[str, Any] = {
        k: v for k, v in problem.attributes.items() if k in allowed and _is_a(v, _TYPES[k])
    }
    detail = f"{peer}: {problem.detail}" if peer else problem.detail
    return kind(detail, **attributes)


def _is_a(value: Any, kind: type) -> bool:
    """Whether an attribute is of the type that its error takes: int, str or list of str."""
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _describe(exc: WeightSyncError, *, status: int) -> Problem:
    """Return the problem document of an error, under its nearest public class."""
    name = next(kind.__name__ for kind in type(exc).__mro__ if _CLASSES.get(kind.__name__) is kind)
    attributes = {key: _plain(getattr(exc, key)) for key in _ATTRIBUTES.get(name, ())}
    return Problem(
        title=name, status=status, detail=text_of(exc), error=name, attributes=attributes
    )


def _plain(value: Any) -> int | str | list[str]:
    if isinstance(value, tuple):
        return [str(item) for item in value[:MAX_LISTED]]
    return value if isinstance(value, int) else str(value)


prepare(Problem)
