"""The errors that weightsync raises.

WeightSyncError
+- ConfigError                wrong arguments, nothing moved (also a ValueError)
+- BackendUnavailableError    no CUDA, another host or GPU
|  +- MissingExtraError       packages that are not installed (also an ImportError)
+- ProtocolError              the two sides disagree
|  +- ManifestMismatchError   .missing .unexpected .mismatched
|  +- StaleVersionError       .held .offered
|  +- DeltaError              a delta cannot be made or applied: send the whole model
|  +- UnknownSenderError      the receiver does not know this sender: init again
|  +- SenderConflictError     .owner .since: the receiver belongs to another living sender
|  |  +- SenderReplacedError  another sender has taken the receiver from this one
|  +- UpdateConflictError     .state .update_id: this step does not fit the receiver's state
+- NotReadyError              the receiver may not generate now: .state .update_id
|  +- SourceBusyError         weights cannot be fetched from this receiver now
+- TransportError             the control plane failed
|  +- ConnectError
|  +- TransportTimeout       also a TimeoutError
+- TransferError              the data plane failed; the update is aborted
|  +- HandleError
|  +- SegmentError
|  +- SourceLostError        the host that served this one is gone, and no other has its bytes
|  +- TransferTimeout        also a TimeoutError
|  +- TransferCancelled       the caller itself ended the wait, or closed the queue
|  +- PeerLostError           .ranks: a process at the other end died or left
|  +- VerificationError       .names
+- ProcessLostError           .process .pid .exitcode: a process of this server ended by itself
|                             (also a RuntimeError)
+- AuthError                  401 or 403
+- RemoteError                the peer raised another type: .remote_type .remote_message

What to do:
ConfigError: fix the call.
BackendUnavailableError: install the named package, or take another path.
ProtocolError: fix versions, names or the order of calls.
TransportError: try again.
TransferError: send the whole update again.
NotReadyError: wait for the update, or send one.
ProcessLostError: read the process's log and start the server again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

INSTALL = "pip install '.[{extras}]'"
"""The command that installs weightsync with extras."""
INSTALL_PLACE = "in a clone of weightsync"
"""Where INSTALL works; empty if anywhere.

Nothing is released, so an index has no weightsync, or a stranger's. A release sets both constants
to what works then, and runs docs/install_commands.py, which rewrites pages and examples.
"""
SHOWN_NAMES = 10
_GATE_OF_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|w1)\.weight$")


def install_hint(extras: str) -> str:
    """Return the command that installs `extras`, names with commas between, and where it works."""
    return f"{INSTALL.format(extras=extras)} {INSTALL_PLACE}".rstrip()


def shorten(names: Iterable[str], limit: int = SHOWN_NAMES) -> str:
    """Join `names` for a message, cut after `limit` names."""
    listed = list(names)
    shown = ", ".join(listed[:limit])
    hidden = len(listed) - limit
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def is_readable(error: BaseException) -> bool:
    """Whether `str()` of an error works; an error of the user's may have a broken one."""
    try:
        str(error)
    except Exception:  # noqa: BLE001  # it is the user's code
        return False
    return True


def text_of(error: BaseException) -> str:
    """Return the message of any error, also of one whose `str()` fails."""
    return str(error) if is_readable(error) else "(an error whose message cannot be made)"


def convert_experts(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Return advice on the source that converts the offered experts; "" if there is none."""
    wanted, offered = list(missing), list(unexpected)
    projection = _projection(wanted)
    if projection and (_has_fused(offered) or _projection(offered)):
        source = "PerExpertSource"
    elif _has_fused(wanted) and (projection := _projection(offered)):
        source = "FusedExpertsSource"
    else:
        return ""
    layout = ', layout="mixtral"' if projection == "w1" else ""
    return (
        "These are experts of a mixture in two forms: give connect() "
        f"weightsync.{source}(source{layout}) in place of the source (docs/sources.md)."
    )


def _has_fused(names: Iterable[str]) -> bool:
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def _projection(names: Iterable[str]) -> str:
    """Return the name of the experts' gate projection among `names`; "" if there is none."""
    return next((found[1] for name in names if (found := _GATE_OF_EXPERT.search(name))), "")


def _rename_advice(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return the `rename` that makes at least half of the names equal, by one prefix; else ""."""
    prefix = _common_prefix(unexpected, missing)
    owner, change = "Your", f"name.removeprefix({prefix!r})"
    if not prefix:
        prefix = _common_prefix(missing, unexpected)
        owner, change = "Its", f"{prefix!r} + name"
    if not prefix:
        return ""
    longer, shorter = (unexpected, missing) if owner == "Your" else (missing, unexpected)
    equal = len({f"{prefix}{name}" for name in shorter}.intersection(longer))
    left = len(missing) + len(unexpected) - 2 * equal
    rest = f" ({left} {'name differs' if left == 1 else 'names differ'} otherwise)" if left else ""
    return f"{owner} names begin with {prefix!r}{rest}: rename=lambda name: {change}"


def _common_prefix(longer: Sequence[str], shorter: Sequence[str]) -> str:
    """Return what most names of `longer` have before a name of `shorter`; "" for less than half."""
    wanted = set(shorter)
    counts = Counter(
        name[:dot]
        for name in longer
        for dot in (found.end() for found in re.finditer(r"\.", name))
        if name[dot:] in wanted
    )
    prefix, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return prefix if 2 * count >= max(len(longer), len(wanted)) else ""


_PEFT_NAME = re.compile(r"\.(base_layer|lora_(A|B|embedding_A|embedding_B|magnitude_vector))\.")


def _adapter_advice(unexpected: Iterable[str]) -> str:
    """Return advice on the source that merges the adapters of a PEFT model; "" if there are none.

    The names are those that PEFT gives to the base layers and the matrices of an adapter.
    """
    if not any(map(_PEFT_NAME.search, unexpected)):
        return ""
    return (
        "Your names are those of a PEFT model, whose adapters are not merged: give connect() "
        "weightsync.integrations.huggingface.MergedSource(model) in place of the model."
    )


_MISMATCH = re.compile(r".*: offered (\w+)(\[.*\]), wanted (\w+)(\[.*\])", re.DOTALL)


def _cast_advice(
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: Sequence[str],
    fitting: Iterable[str],
) -> str:
    """Return what makes the tensors equal, where nothing but floating-point dtypes differ.

    `fitting` are the dtypes of the other tensors, which `dtype=` would cast, too.
    """
    found = [_MISMATCH.fullmatch(entry) for entry in mismatched]
    wanted = {pair[3] for pair in found if pair is not None and pair[2] == pair[4]}
    same = all(pair is not None and pair[2] == pair[4] for pair in found)
    if missing or unexpected or not same or not all("float" in dtype for dtype in wanted):
        return ""
    said = f"The {len(found)} {'tensor differs' if len(found) == 1 else 'tensors differ'}"
    if len(wanted | set(fitting)) == 1:
        return f"{said} in dtype only: dtype=torch.{wanted.pop()}"
    return (
        f'{said} in dtype only: connect(dtype="receiver") casts each tensor to what the receiver '
        "keeps, or give WeightReceiver a ModuleSink(module, cast=True)"
    )


INNER_TENSORS = "the inner tensors"
"""How entries of `mismatched` name what torchao keeps inside of a tensor."""


_INNER_ADVICE = (
    "Tensors of torchao are sent whole to a module with tensors of the same class and attributes: "
    "quantize both in the same way, or let the receiver have plain tensors, and give connect() "
    "ws.DequantizedSource(model)"
)


def _inner_advice(mismatched: Iterable[str]) -> str:
    """Return what to do where tensors of torchao differ; "" where none do."""
    return _INNER_ADVICE if any(f" {INNER_TENSORS} of" in entry for entry in mismatched) else ""


def _described_advice(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Return what to do where one side alone has tensors of torchao; "" where none has.

    The names of their descriptions are those of weightsync.specs.described_name.
    """
    described = any(".<" in name and name.endswith(">") for name in (*missing, *unexpected))
    return _INNER_ADVICE if described else ""


def _quantized_advice(missing: Sequence[str], mismatched: Sequence[str]) -> str:
    """Return what to do where the receiver has quantized weights, and these are not."""
    wanted = [entry.partition(", wanted ")[2] for entry in mismatched]
    has_scales = any("weight_scale" in entry for entry in (*missing, *mismatched))
    if not has_scales and not any(dtype.startswith(("float8", "int8")) for dtype in wanted):
        return ""
    return (
        'The receiver has quantized weights: connect(quantize="receiver"), or send the tensors of '
        "a checkpoint that is quantized in the same way"
    )


class WeightSyncError(Exception):
    """The base of every error that weightsync raises."""


class ConfigError(WeightSyncError, ValueError):
    """The arguments of a call are wrong; nothing moved. Fix the call."""


class BackendUnavailableError(WeightSyncError):
    """A path or an extra cannot work here. Install what the message names, or take another path."""


class MissingExtraError(BackendUnavailableError, ImportError):
    """A module needs packages that are not installed. Install the extra that the message names."""


class ProtocolError(WeightSyncError):
    """The two sides disagree on versions, names or the order of calls."""


class ManifestMismatchError(ProtocolError):
    """The tensors offered are not the tensors wanted.

    `missing` are wanted and not offered, `unexpected` are offered and not wanted. Each entry of
    `mismatched` is `name: offered …, wanted …`. `fitting` are the dtypes of the other tensors
    where these are floating-point: the advice in the message depends on them.
    """

    def __init__(
        self,
        message: str = "",
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        fitting: Iterable[str] = (),
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)
        super().__init__(message or self._describe(fitting))

    def _describe(self, fitting: Iterable[str]) -> str:
        groups = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("mismatched", self.mismatched),
        )
        found = [f"{len(names)} {kind}: {shorten(names)}" for kind, names in groups if names]
        advice = (
            _inner_advice(self.mismatched)
            or _quantized_advice(self.missing, self.mismatched)
            or convert_experts(self.missing, self.unexpected)
            or _adapter_advice(self.unexpected)
            or _rename_advice(self.missing, self.unexpected)
            or _described_advice(self.missing, self.unexpected)
            or _cast_advice(self.missing, self.unexpected, self.mismatched, fitting)
            or "Map names with rename=, cast with dtype=, or send a subset with partial=True."
        )
        # The advice stands before the names, which may take a thousand characters.
        return (
            f"the tensors offered do not fit the receiver. {advice.rstrip('.')}. {'; '.join(found)}"
        )


class StaleVersionError(ProtocolError):
    """The version offered is not newer than the one held, or builds on another base."""

    def __init__(self, message: str = "", *, held: int = -1, offered: int = -1) -> None:
        self.held = held
        self.offered = offered
        super().__init__(
            message
            or f"version {offered} is offered, but version {held} is held and versions grow; "
            "leave version out to follow the receiver, or use send_weights(rewind=True) after "
            "resuming from an older checkpoint"
        )


class DeltaError(ProtocolError):
    """A delta cannot be made, or the receiver does not hold its base. Send the whole model."""


class UnknownSenderError(ProtocolError):
    """The receiver does not know this sender, or has closed its connection. Init again."""


class SenderConflictError(ProtocolError):
    """The receiver belongs to another living sender: `owner`, `since` (UTC, as ISO 8601).

    Close that sender, or take the receiver over with `connect(takeover=True)`.
    """

    def __init__(self, message: str, *, owner: str = "", since: str = "") -> None:
        self.owner = owner
        self.since = since
        super().__init__(message)


class SenderReplacedError(SenderConflictError):
    """Another sender, `owner`, has taken over a receiver of this sender."""


class UpdateConflictError(ProtocolError):
    """The step does not fit the receiver's `state`; `update_id` is the update in progress."""

    def __init__(self, message: str, *, state: str = "", update_id: str = "") -> None:
        self.state = state
        self.update_id = update_id
        super().__init__(message)


class NotReadyError(WeightSyncError):
    """The receiver may not generate now; `update_id` is the open update, or the one that failed."""

    def __init__(self, message: str, *, state: str = "", update_id: str = "") -> None:
        self.state = state
        self.update_id = update_id
        super().__init__(message)


class SourceBusyError(NotReadyError):
    """The receiver from which weights are fetched is in an update, or replaced them meanwhile."""


class TransportError(WeightSyncError):
    """A control message did not get through. Try again."""


class ConnectError(TransportError):
    """The peer could not be reached, or the connection broke."""


class TransportTimeout(TransportError, TimeoutError):
    """The peer did not reply in time."""


class TransferError(WeightSyncError):
    """Bytes did not arrive. The update is aborted; send it again."""


class HandleError(TransferError):
    """A handle is malformed, or this process cannot open it."""


class SegmentError(TransferError):
    """A shared-memory segment cannot be made, opened or trusted."""


class SourceLostError(TransferError):
    """No other host has the bytes that this receiver lacks, since one that had them is gone."""


class TransferTimeout(TransferError, TimeoutError):
    """The other side of a transfer made no progress in time."""


class TransferCancelled(TransferError):
    """The caller cancelled its wait, or closed the queue. The call moved nothing."""


class PeerLostError(TransferError):
    """Processes at the other end died or closed their end; `ranks` are their ranks."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class VerificationError(TransferError):
    """Tensors that arrived, or that are held, differ from those sent; `names` lists them."""

    def __init__(self, message: str = "", *, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        super().__init__(
            message
            or f"{len(self.names)} tensors differ from what was sent: {shorten(self.names)}; "
            "the update is not applied, send it again"
        )


class ProcessLostError(WeightSyncError, RuntimeError):
    """A child process of this server ended unexpectedly. Start the server again.

    `exitcode` is that of multiprocessing: after a signal, the negative signal number.
    """

    def __init__(
        self, message: str, *, process: str = "", pid: int = 0, exitcode: int | None = None
    ) -> None:
        self.process = process
        self.pid = pid
        self.exitcode = exitcode
        super().__init__(message)


class AuthError(WeightSyncError):
    """The token is missing (401) or wrong (403)."""

    def __init__(self, message: str, *, status: int = 403) -> None:
        self.status = status
        super().__init__(message)


class RemoteError(WeightSyncError):
    """The peer raised an error of a type that is not in this module."""

    def __init__(
        self, message: str = "", *, remote_type: str = "", remote_message: str = ""
    ) -> None:
        self.remote_type = remote_type
        self.remote_message = remote_message
        super().__init__(message or f"the peer raised {remote_type}: {remote_message}")
