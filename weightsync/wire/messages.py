"""The control messages: frozen structs. Unknown fields are refused in requests, ignored in replies.

A steady update is two of them, UpdateRequest (carrying start and prepare) and FinishRequest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import UNSET, Meta, UnsetType

from weightsync.errors import ConfigError, ProtocolError
from weightsync.report import Apply, SyncReport, Verification
from weightsync.wire.offers import (
    BackendName,
    InitInfo,
    ManifestMessage,
    Message,
    Name,
    OwnerStatus,
    ProbeRequest,
    ReplyMessage,
    UpdateId,
    Version,
    WantsInfo,
)
from weightsync.wire.problem import Problem

PROTOCOL_MIN = 1
PROTOCOL = 1
"""The oldest and the newest protocol of this version of weightsync.

docs/wire-protocol.md says what a new number is for; tests/wire has recorded messages of each.
"""


class Protocols(NamedTuple):
    """The protocols of one side, `oldest` to `newest`."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        newest = "" if self.oldest == self.newest else f" to {self.newest}"
        return f"{self.oldest}{newest}"


def choose_protocol(sender: Protocols, receiver: Protocols) -> int:
    """Return the newest protocol that both sides have.

    Raises ProtocolError where there is none. It says which side to upgrade.
    """
    for side, own in (("sender", sender), ("receiver", receiver)):
        if own.oldest > own.newest:
            raise ProtocolError(f"the {side} has protocols {own}, which is no range")
    chosen = min(sender.newest, receiver.newest)
    if chosen < max(sender.oldest, receiver.oldest):
        older = "sender" if sender.newest < receiver.newest else "receiver"
        raise ProtocolError(
            f"no common protocol: the sender has {sender}, the receiver {receiver}; install a "
            f"newer weightsync on the {older}'s side"
        )
    return chosen


class InitRequest(Message, frozen=True, kw_only=True):
    """`init_weight_transfer_engine`; an empty `init_info` only requests a description.

    `probe` alone tests a path before other memory is exported for it.
    """

    init_info: InitInfo | None = None
    probe: ProbeRequest | None = None


class ShutdownRequest(Message, frozen=True, kw_only=True):
    """`shutdown_weight_transfer_engine`: close what `init` opened for `sender` (None: for all).

    `leaves` False: the sender only withdraws memory, keeps its fleet and will init again.
    """

    sender: str | None = None
    leaves: bool = True


# Updates


Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration; reports print it and write it as JSON, so it is no NaN and not infinite."""


class StartTerms(Message, frozen=True, kw_only=True):
    """The terms of an update, as the sender wants them; see weightsync.update.lifecycle.Terms.

    `weights_id` identifies the weights: equal in every message that sends the same weights. The
    default is the update's own id.
    """

    version: Version | None = None
    label: Annotated[str, Meta(max_length=256)] | None = None
    base_version: Version | None = None
    partial: bool = False
    rewind: bool = False
    manifest_digest: str | None = None
    weights_id: UpdateId | None = None


class StartRequest(StartTerms, frozen=True, kw_only=True):
    """`start_weight_update`; without `update_id` the receiver opens an anonymous session.

    `anonymous` opens one too, under the same id on several receivers. `sender` is the sender that
    called init: when it is dead, the next sender ends the update. `is_checkpoint_format` is for
    vLLM's clients: weights come by the names and shapes of the checkpoint, always.
    """

    update_id: UpdateId | None = None
    sender: Name | None = None
    anonymous: bool = False
    is_checkpoint_format: bool = True

    def __post_init__(self) -> None:
        if not self.is_checkpoint_format:
            raise ConfigError(
                "is_checkpoint_format is false: weights in a kernel's own format are not accepted; "
                "send them in the checkpoint's format"
            )


Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
"""A 64-bit fingerprint in hex digits."""
HexBytes = Annotated[str, Meta(pattern=r"^([0-9a-f]{2})*$")]


class DeltaTerms(Message, frozen=True, kw_only=True):
    """The tensors of a message are packets of a delta; see weightsync.weights.deltas.change_log.

    `bases` are the weights that it can be applied to, by weights id, with the sum of all of their
    lines.
    """

    bases: Annotated[dict[UpdateId, Fingerprint], Meta(max_length=64)]


class RegisteredUpdate(Message, frozen=True, kw_only=True):
    """Update whose bytes use memory that `init` registered; `payload` is for the backend alone.

    `epoch` grows with each message of a sender that is no retry. `manifest` is given when other
    tensors than the registered ones are sent, as the packets of a `delta` are. `delta_follows` says
    that a delta of these weights may follow, so that a receiver of shards adds up what arrives.
    """

    sender: Name
    epoch: Annotated[int, Meta(ge=1, le=1 << 62)]
    verify: bool = True
    manifest: ManifestMessage | None = None
    delta: DeltaTerms | None = None
    delta_follows: bool = False
    payload: Any = None
    registered: Literal[True]


class ForeignUpdate(Message, frozen=True):
    """An update_info in the shape of another system's messages; it comes without an init.

    Its one subclass is what `provided("update")` of weightsync.runtime.provided returns.
    """

    @classmethod
    def parse(cls, data: object) -> Self:
        """Return the update_info of plain data. Raises ProtocolError with the path of an error."""
        raise NotImplementedError

    def receive(self, keys: list[str], context: Any) -> Any:
        """Load the tensors for a receiver with these device keys.

        `context` is a LoadContext, the result a Received of weightsync.backends.base.
        """
        raise NotImplementedError


class EmptyUpdate(Message, frozen=True, kw_only=True):
    """`{}`: nothing new to load."""


UpdateInfo = RegisteredUpdate | ForeignUpdate | EmptyUpdate


class UpdateRequest(Message, frozen=True, kw_only=True):
    """`update_weights`: load. With `start` it begins the update, with `prepare` it ends it.

    Outside a session and without `update_id` it is a whole update of its own.
    """

    update_info: UpdateInfo
    update_id: UpdateId | None = None
    start: StartTerms | None = None
    prepare: bool = False


class PrepareRequest(Message, frozen=True, kw_only=True):
    """`prepare_weight_update`: everything was sent; check it."""

    update_id: UpdateId | None = None


MAX_FLEET = 64
"""Servers of a fleet that a message names; the page of a server shows no more."""


class FleetServer(Message, frozen=True, kw_only=True):
    """One server of the sender's fleet, as the sender knows it: for people, nothing depends on it.

    `load_s` is the time in which the slowest of its `workers` has loaded the update. A server that
    is not part of the update holds `version`, or failed with `error`.
    """

    target: Annotated[str, Meta(max_length=256)]
    workers: Annotated[int, Meta(ge=1)] = 1
    path: Annotated[str, Meta(max_length=256)] = ""
    load_s: Seconds = 0.0
    version: Version | None = None
    error: Annotated[str, Meta(max_length=256)] = ""


class FinishRequest(Message, frozen=True, kw_only=True):
    """`finish_weight_update`: put the prepared weights to use.

    `fleet` has the servers of the sender, none where this is the only one; it is None where that is
    not known, and for all workers of a server but one. `delta_follows` says that the next update
    may be a delta, so that the receiver prepares memory for it when this one is committed.
    """

    update_id: UpdateId | None = None
    table_digest: str | None = None
    clear_cache: bool = True
    weight_version: Annotated[str, Meta(max_length=256)] | None = None
    fleet: Annotated[list[FleetServer], Meta(max_length=MAX_FLEET)] | None = None
    delta_follows: bool = False


class AbortRequest(Message, frozen=True, kw_only=True):
    """`abort_weight_update`: forget the update; returns when the loader has stopped."""

    update_id: UpdateId | None = None
    reason: Annotated[str, Meta(max_length=4096)] = ""


class LabelRequest(Message, frozen=True, kw_only=True):
    """`update_weight_version`: name the weights in use."""

    new_version: Annotated[str, Meta(max_length=256)]


class CheckRequest(Message, frozen=True, kw_only=True):
    """`weight_checker`: `checksum` returns fingerprints, `compare` the names that differ.

    `partial` requests, from one of several workers, its parts of tensors that are cut.
    """

    action: Literal["checksum", "compare"] = "checksum"
    names: list[Name] | None = None
    checksums: dict[Name, str] | UnsetType = UNSET
    partial: bool = False


class StatusRequest(Message, frozen=True, kw_only=True):
    """`weight_info`."""


class ResetCacheRequest(Message, frozen=True, kw_only=True):
    """`reset_prefix_cache`."""


class PauseRequest(Message, frozen=True, kw_only=True):
    """`pause`: `mode` decides about requests in flight."""

    mode: Literal["abort", "wait", "keep"] = "keep"


class ResumeRequest(Message, frozen=True, kw_only=True):
    """`resume`."""


SleepTag = Literal["weights", "kv_cache"]
"""The parts that sleep and wake apart: vLLM's tags. The KV cache is woken last."""


class SleepRequest(Message, frozen=True, kw_only=True):
    """`sleep`: give memory back, by vLLM's levels; `mode` decides about requests in flight.

    0 pauses generation. 1 moves weights to the host, and drops the KV cache. 2 drops both.
    """

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


class WakeRequest(Message, frozen=True, kw_only=True):
    """`wake_up`: take memory again for `tags`, None: for all. What is awake already is left out.

    `scheduling` resumes after a sleep of level 0; None does, too.
    """

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


MAX_POLLERS = 8
MAIL_FROM = 6
"""The poller of a joint fetch whose replies have a source's mail."""
MAIL_TO = 7
"""The poller of a joint fetch whose requests have a source's mail."""


class FetchRequest(Message, frozen=True, kw_only=True):
    """`fetch_weights`: take the weights in use. The reply is the next request to the caller.

    The first call of a `fetch_id` makes this receiver a sender, whose requests are the replies to
    these calls. The caller handles each, and its next call returns the `reply` or the `problem`.
    Several pollers call at a time, since requests overlap; `turn` counts the calls of one `poller`.
    A call that is repeated gets the same reply.

    `address` is the address at which the caller reaches this host, `backend` as in `connect`,
    `timeout_s` bounds every wait for progress. With `weights_id`, of a fleet that the caller joins,
    only these weights are sent, as they were received, and it is CATCHING_UP until it has them.
    Where several receivers send together, each of which says `lends`, `reply` is a JointTurn.
    """

    fetch_id: UpdateId
    poller: Annotated[int, Meta(ge=0, lt=MAX_POLLERS)] = 0
    turn: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    reply: Any = None
    problem: Problem | None = None
    address: Annotated[str, Meta(max_length=256)] | None = None
    backend: BackendName = "auto"
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    weights_id: UpdateId | None = None


class Mail(ReplyMessage, frozen=True, kw_only=True):
    """A short message between sources that send together, passed on by the receiver that fetches.

    `peer` is the place of the source that it goes to, in a request that of the one it is from. Of
    kind `word` the next one to this source, `note` a key for all, `lost`: that source is gone.
    """

    kind: Literal["word", "note", "lost"] = "word"
    peer: Annotated[int, Meta(ge=0, lt=32_767)]
    body: bytes = b""


class JointTurn(ReplyMessage, frozen=True, kw_only=True):
    """An answer of a receiver that fetches from several sources together, each of which has parts.

    It is the `reply` of FetchRequests: of the first one of each poller, with the `place` of this
    source among the `places` of all, and of those of the poller MAIL_TO, with the `mail` to it. All
    of them have parts of the weights `weights_id`.
    """

    place: Annotated[int, Meta(ge=0, lt=32_767)]
    places: Annotated[int, Meta(ge=2, le=32_767)]
    weights_id: UpdateId
    mail: list[Mail] = []


Request = (
    InitRequest
    | ShutdownRequest
    | StartRequest
    | UpdateRequest
    | PrepareRequest
    | FinishRequest
    | AbortRequest
    | LabelRequest
    | CheckRequest
    | StatusRequest
    | ResetCacheRequest
    | PauseRequest
    | ResumeRequest
    | FetchRequest
    | SleepRequest
    | WakeRequest
)

CALLS: dict[str, type[Message]] = {
    "init_weight_transfer_engine": InitRequest,
    "shutdown_weight_transfer_engine": ShutdownRequest,
    "start_weight_update": StartRequest,
    "update_weights": UpdateRequest,
    "prepare_weight_update": PrepareRequest,
    "finish_weight_update": FinishRequest,
    "abort_weight_update": AbortRequest,
    "update_weight_version": LabelRequest,
    "weight_checker": CheckRequest,
    "weight_info": StatusRequest,
    "reset_prefix_cache": ResetCacheRequest,
    "pause": PauseRequest,
    "resume": ResumeRequest,
    "fetch_weights": FetchRequest,
}
"""The name of each call of the protocol; over HTTP it is the path."""

ANNOUNCED_CALLS: dict[str, type[Message]] = {"sleep": SleepRequest, "wake_up": WakeRequest}
"""Calls that senders make only to a receiver whose status says that it sleeps, and so has them.

Of no protocol number: an older receiver never says so.
"""

ALL_CALLS = CALLS | ANNOUNCED_CALLS
CALL_OF: dict[type[Message], str] = {kind: call for call, kind in ALL_CALLS.items()}


# Replies


WorkerPath = Annotated[str, Meta(max_length=128, pattern=r"^\w[\w-]*(/\w[\w-]*)*$")]


class SharedMemoryUsage(ReplyMessage, frozen=True, kw_only=True):
    """One live export, mapping or ring of `sender` (empty in the sender's own list).

    `readers` have its handle and have not left; `unreleased` are those that still hold a chunk of
    the ring.
    """

    kind: str
    name: str
    nbytes: int
    owner: bool
    age_s: float
    sender: str = ""
    readers: list[str] = []
    unreleased: list[str] = []


DeltaForm = Literal["lines", "shards", "values"]
StateName = Literal["READY", "CATCHING_UP", "UPDATING", "PREPARED", "ABORTING", "TORN"]
"""The states of a receiver; see weightsync.update.lifecycle."""


class Status(ReplyMessage, frozen=True, kw_only=True):
    """The state of one receiver.

    `weights_id` tells weights apart that have the same version, after a rewind for instance.
    `prepared_version` is the version that `finish` would commit; `orphaned` says that the sender
    of the open update is dead, `detail` why the receiver may not generate. `workers` are the paths,
    below this one's URL, of the receivers that it stands for; none where it is one itself.
    `delta_forms` are the forms of deltas that can be applied once a whole model was received:
    `lines`, or `shards` (lines, for a receiver that holds parts of tensors), and `values`;
    `stream_deltas` says that it takes lines of several ranks, each of its own stream.
    `senders` are the paths by which connected senders send, by sender id; `owner` is the last one
    that the receiver belonged to, alive or not. `fetchable` says that other receivers may fetch the
    weights in use, by `fetch_weights`; `lends`, that it holds parts of them, which others may fetch
    from those that hold all parts together. `backends` are those that can be used here, each with
    what it says of this process; `unusable_backends` the others, with the reason.
    `protocol` is the newest protocol of the receiver, `protocol_min` the oldest. `set_id` is the
    same for the receivers of a server that finish an update of one id together, all or none.
    `asleep` is what sleeps of `weights` and `kv_cache`, since a sleep of `sleep_level`; `discarded`
    says that the weights of `version` are gone, awake or not.
    """

    instance: str
    protocol: int
    state: StateName
    version: int
    may_generate: bool
    apply: Apply
    verification: Verification
    label: str | None = None
    update_id: str | None = None
    last_finished: str | None = None
    weights_id: str | None = None
    prepared_version: int | None = None
    manifest_digest: str | None = None
    busy: bool = False
    orphaned: bool = False
    paused: bool = False
    delta_forms: list[DeltaForm] = []
    detail: str = ""
    device_keys: list[str] = []
    shared_memory: list[SharedMemoryUsage] = []
    workers: list[WorkerPath] = []
    senders: dict[Name, str] = {}
    owner: OwnerStatus | None = None
    fetchable: bool = False
    backends: dict[BackendName, Any] = {}
    unusable_backends: dict[BackendName, str] = {}
    stream_deltas: bool = False
    protocol_min: int = 1  # receivers that do not say it have protocol 1
    set_id: str | None = None
    lends: bool = False
    asleep: list[SleepTag] = []
    sleep_level: int = 0
    discarded: bool = False

    @property
    def protocols(self) -> Protocols:
        """The protocols of the receiver."""
        return Protocols(self.protocol_min, self.protocol)


class InitReply(ReplyMessage, frozen=True, kw_only=True):
    """Reply to init: facts about the receiver, and the path that passed its probe (None: no probe).

    `payload` is the data of the receiver's engine for the sender's engine. `widened` are the names
    of offered tensors that the receiver keeps in a floating-point dtype of more digits; None where
    it does not know in which dtype they are kept. `protocol` is the one that the receiver chose:
    the newest that both sides have. `wants` are the boxes that it loads, None for whole tensors;
    `whole` has the tensors that it loads whole because it does not know its box, with the reasons.
    `casts` are the numbers of tensors that it casts itself, as `{"float32 to bfloat16": 3}`. `kept`
    has the names of the tensors that it keeps by their dtype, where nothing else is requested, and
    `quantization` then the `quantization_config` of the checkpoint that it serves, if it has one.
    """

    status: Status
    path: str | None = None
    payload: Any = None
    widened: list[str] | None = None
    protocol: int = 1  # as of receivers that do not say it
    wants: WantsInfo | None = None
    whole: dict[str, str] = {}
    casts: dict[str, int] = {}
    kept: dict[str, list[Name]] | None = None
    quantization: Any = None


class StepReply(ReplyMessage, frozen=True, kw_only=True):
    """Reply to a step: the receiver's state, the cost of the step, and the level of verification.

    `table_digest` names the fingerprints of what arrived. `delta_base` is the id of the weights in
    use, if the receiver can apply a delta to them. `delta`: only the lines that changed were
    written, and verified.
    `names_nothing`: a hook took the tensors, and returned no names of what it loaded. `sources` has
    the bytes that were copied from each rank, where several send. `parts` are those of the mix64 of
    each tensor that the update wrote, where it wants them; none of one whose slices cut too much.
    """

    state: StateName
    version: int
    update_id: str | None = None
    apply: Apply = "staged"
    verified: Verification = "none"
    nbytes: int = 0
    stall_s: Seconds = 0.0
    peak_extra_nbytes: int = 0
    seconds: dict[str, Seconds] = {}
    table_digest: str | None = None
    delta_base: UpdateId | None = None
    delta: bool = False
    names_nothing: bool = False
    sources: dict[int, int] = {}
    parts: dict[str, list[TensorPart]] = {}


class TensorPart(ReplyMessage, frozen=True, kw_only=True):
    """One worker's part of the mix64 of a cut tensor of `nbytes` bytes.

    `spans` are the indices that the worker holds, for each dimension: parts of equal spans are
    copies. `total` (16 hex digits) is the sum of the `words` whole words, each mixed. `pieces` are
    the bytes of words that are cut, in hex, by the position of their first byte in the full tensor.
    """

    shape: list[int]
    spans: list[list[tuple[int, int]]]
    nbytes: int
    total: Fingerprint
    words: int
    pieces: dict[int, HexBytes] = {}


class CheckReply(ReplyMessage, frozen=True, kw_only=True):
    """Fingerprints of the weights in use (mix64, 16 hex digits), or the names that differ.

    `parts` are those of tensors that are cut, where the request wants them.
    """

    version: int
    checksums: dict[str, str] = {}
    different: list[str] = []
    equal: bool | None = None
    parts: dict[str, TensorPart] = {}


class FetchReply(ReplyMessage, frozen=True, kw_only=True):
    """The next request to the caller, as `{"call": …, "body": {…}}`; None: there is none yet.

    At the end of the fetch, its `report` or its `problem`. `mail` is for other sources of it.
    """

    request: Any = None
    mail: list[Mail] = []
    report: SyncReport | None = None
    problem: Problem | None = None


Reply = InitReply | StepReply | Status | CheckReply | FetchReply


class UpdateRecord(ReplyMessage, frozen=True, kw_only=True):
    """Record of a committed update, for status pages and metrics.

    `at` is when it was committed, in seconds of Unix time; `duration_s` is from start to commit.
    `delta`: only the lines that changed were written, and verified. `sources` has the bytes that
    were copied from each rank, where several send.
    """

    update_id: str
    version: int
    at: float
    duration_s: Seconds
    nbytes: int
    stall_s: Seconds
    apply: Apply
    verified: Verification
    label: str | None = None
    seconds: dict[str, Seconds] = {}
    delta: bool = False
    sources: dict[int, int] = {}


class OpenUpdate(ReplyMessage, frozen=True, kw_only=True):
    """The open update of a receiver, and the version that it would commit.

    `since` is when it started, in seconds of Unix time.
    """

    update_id: str
    version: int
    since: float
    label: str | None = None
    partial: bool = False


class FleetRecord(ReplyMessage, frozen=True, kw_only=True):
    """The servers of a sender when it finished an update; none where it had one alone."""

    sender: str
    version: int
    servers: list[FleetServer]


class WorkerReport(ReplyMessage, frozen=True, kw_only=True):
    """A snapshot of a receiver's status and history; `recent` has the oldest update first.

    `fleet` is None where the last finish did not say.
    """

    status: Status
    updates_total: dict[str, int]
    last_reply: StepReply | None = None
    recent: list[UpdateRecord] = []
    open_update: OpenUpdate | None = None
    fleet: FleetRecord | None = None


REPORT_CALL = "worker_report"
"""The call of `handle_json` for a WorkerReport. No transport has it."""
UNLOAD_CALL = "unload"
"""The call by which a server forgets a receiver below its URL; its body and reply are `{}`."""

REPLIES: dict[str, type[Message]] = {
    "init_weight_transfer_engine": InitReply,
    "weight_checker": CheckReply,
    "weight_info": Status,
    "update_weight_version": Status,
    "reset_prefix_cache": Status,
    "pause": Status,
    "resume": Status,
    "shutdown_weight_transfer_engine": Status,
    "start_weight_update": StepReply,
    "update_weights": StepReply,
    "prepare_weight_update": StepReply,
    "finish_weight_update": StepReply,
    "abort_weight_update": StepReply,
    "fetch_weights": FetchReply,
    "sleep": Status,
    "wake_up": Status,
}
