"""One update on the sender, as a transaction: control messages and the transfer of the bytes."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import asdict

from weightsync.backends.base import ReaderChanges, ReaderWatch, part
from weightsync.errors import (
    ConfigError,
    DeltaError,
    ProtocolError,
    RemoteError,
    SourceLostError,
    TransferError,
    TransferTimeout,
    TransportError,
    VerificationError,
    WeightSyncError,
    shorten,
)
from weightsync.ranks.commands import (
    LINES_DIGEST,
    BeforeBegin,
    Begin,
    ChangeEstimate,
    CommandResult,
    DeltaOffer,
    DeltaTask,
    End,
    KeepAlive,
    ReadersByRank,
    Transfer,
)
from weightsync.ranks.group import are_alike
from weightsync.report import GpuPair, MergeReport, ReceiverReport, Rule, SyncReport
from weightsync.update.fleet import (
    Fleet,
    Member,
    MemberReply,
    add_target,
    failures,
    names,
    raise_first,
)
from weightsync.update.paths import PathSelector
from weightsync.weights.copying.checksums import compare_sums, join_parts
from weightsync.weights.copying.fingerprint import as_words, joined_totals, table_digest
from weightsync.weights.sources.base import NamedTensors
from weightsync.wire.codec import InvalidReplyError
from weightsync.wire.messages import (
    MAX_FLEET,
    AbortRequest,
    DeltaTerms,
    FinishRequest,
    FleetServer,
    PrepareRequest,
    RegisteredUpdate,
    Request,
    StartRequest,
    StartTerms,
    StateName,
    StepReply,
    TensorPart,
    UpdateRequest,
)
from weightsync.wire.offers import StreamPackets, StreamsUpdate

logger = logging.getLogger(__name__)

_FINISH_TRIES = 3
_EPOCHS = itertools.count(1)
"""Epochs of update messages, unique over all senders of this process."""
_ABORT_TIMEOUT_S = 30.0
_STRENGTH = ("none", "arrived", "held")
COMMITTED_STATES: tuple[StateName, ...] = ("READY", "CATCHING_UP")
"""The states after a finish. CATCHING_UP: the fleet moved on, and a part of the model came."""


class NothingSentError(Exception):  # only a signal: the update is sent in another way
    """The ranks have not begun together. No receiver knows of the update."""


class MemoryMovedError(NothingSentError):
    """Memory that receivers have mapped was moved: the fleet has to be connected again."""


class UnlikeRanksError(NothingSentError):
    """Some ranks would send a delta, and others cannot."""


class UpdateTransaction:
    """A transaction over members of the fleet. The sender creates it; `send` adds tensors.

    Receivers finish only when every staged receiver is PREPARED. In-place receivers cannot roll
    back: once one of them is PREPARED, all PREPARED receivers finish. Where the fleet drops failed
    members, the others finish without these.

    `failed` has the members that did not finish, `replies` the last replies of the others.
    `dirty` is True after an abort that left a receiver TORN, `finishing` when a finish request
    may have been sent: the update cannot be aborted any more. `estimate` is what the ranks decided
    an offered delta by. `summed` are the tensors of which the sums over all ranks were compared.
    """

    def __init__(
        self, fleet: Fleet, paths: PathSelector, members: Sequence[Member], *, verify: bool
    ) -> None:
        self.update_id = fleet.new_update_id()
        self.rule: Rule = "two-phase"
        self.last_report: SyncReport | None = None
        self.failed: dict[Member, WeightSyncError] = {}
        self.dirty = False
        self.finishing = False
        self.replies: dict[Member, StepReply] = {}
        self.estimate: ChangeEstimate | None = None
        self._members = list(members)
        self._fleet = fleet
        self._group = fleet.group
        self._paths = paths
        self._verify = verify
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._begun: list[CommandResult] = []
        self._results: list[CommandResult] = []
        self._whole = False
        self._delta: DeltaTask | None = None
        self._offer: DeltaOffer | None = None
        self._aborted = False
        self._torn: list[str] = []
        self._servers: list[FleetServer] = []
        self._described: set[Member] = set()
        self._first_failed: Member | None = None
        self._sourceless = False
        self._late: Sequence[Member] = ()
        self._version: int | None = None
        self._sums = False
        self.summed: set[str] = set()

    def absorb(self, replies: Mapping[Member, StepReply], summed: set[str]) -> None:
        """Add the replies of members that failed here and received the same version afterwards."""
        self.replies.update(replies)
        self.summed |= summed
        for member in replies:
            self.failed.pop(member, None)

    @property
    def members(self) -> Sequence[Member]:
        """The members that are updated."""
        return self._members

    @property
    def is_delta(self) -> bool:
        """Whether only what changed is sent."""
        return self._delta is not None and bool(self._delta.bases)

    @property
    def refused_delta(self) -> bool:
        """Whether a member refused a delta: its base, its packets or its result were wrong."""
        refusals = [e for e in self.failed.values() if isinstance(e, DeltaError)]
        wrong = [e for e in self.failed.values() if isinstance(e, VerificationError)]
        damaged = [e for e in self.failed.values() if type(e) is ProtocolError]
        return self.is_delta and bool(refusals or wrong or damaged)

    @property
    def results(self) -> Sequence[CommandResult]:
        """The results of the ranks at the end of the transfer."""
        return self._results

    @property
    def table_digests(self) -> list[Mapping[str, str | None]]:
        """The digests of all sent fingerprints, by rank and by backend."""
        return [result.digests for result in self._results]

    def send_whole(
        self,
        terms: StartTerms,
        *,
        same_as: LastVersion | None = None,
        delta: DeltaTask | DeltaOffer | None = None,
        checks_memory: bool = False,
    ) -> None:
        """Send the whole model with two messages per receiver: start, load and prepare; finish.

        With the bases of a `delta`, what changed of it since then; an offer is decided by the
        ranks, see `estimate`. Raises TransferError where the weights differ from those that
        `same_as` was sent with, or where that cannot be told, and MemoryMovedError with
        `checks_memory`.
        """
        layout, verify = self._paths.layout, self._verify and bool(self._group.manifest.nbytes)
        lines = self._group.worker.lines_digest if delta is not None else ""
        if same_as and verify and not same_as.is_comparable(layout, lines=lines):
            raise same_as.unknown()  # before a receiver in place is written to
        try:
            self._whole = True
            self._version = terms.version
            if isinstance(delta, DeltaOffer):
                self._offer = delta
            else:
                self._delta = delta
            try:
                self._transfer(terms=terms, prepare=True, checks_memory=checks_memory)
            except UnlikeRanksError:
                self._offer = None  # they have decided, and none sends a delta
                self._transfer(terms=terms, prepare=True)
            self._check_sums()
            if same_as is not None:
                same_as.check_unchanged(self.table_digests, layout, verify=verify)
            self.finish()
        except NothingSentError:
            raise
        except BaseException as exc:
            self.abort(f"the sender gave up: {type(exc).__name__}")
            raise

    def start(self, terms: StartTerms) -> None:
        """Start the update on every receiver. Raises the first error of a receiver."""
        self._version = terms.version
        fields = asdict(terms)
        answers = self._call(
            lambda m: StartRequest(update_id=self.update_id, sender=m.sender or None, **fields)
        )
        self._note(answers)
        if failures(answers) and not (self._drop_servers() and self._staying):
            self.abort("a receiver refused to start")
            raise_first(answers)

    def send(self, named_tensors: NamedTensors) -> None:
        """Send tensors to every receiver; returns when all of them have loaded these."""
        self._group.worker.pairs = named_tensors
        try:
            self._transfer(pairs=True)
        finally:  # it may have failed before this rank began
            self._group.worker.pairs = None
        self._group.finish(self._group.version, goes_on=True)

    def prepare(self) -> None:
        """Have every receiver check that the update is complete."""
        answers = self._call(PrepareRequest(update_id=self.update_id), self._staying)
        answers = [self._prepared(answer) for answer in answers]
        self._note(answers)
        self._raise_unless_all(answers)

    def finish(self) -> None:
        """Commit the update on every receiver.

        A receiver that cannot be reached gets the request again before the next update. Members
        that fail are in `failed`; raises only when no receiver has the new version.
        """
        started = time.perf_counter()
        unverified = [m.target for m, reply in self.replies.items() if reply.verified == "none"]
        if self._verify and unverified and self._group.manifest.nbytes:
            raise VerificationError(
                f"not verified by {', '.join(unverified)}: other tensors were added to the update"
            )
        self._drop_servers()
        self._describe_fleet()
        self._await_set()
        self._group.check_still_followed()
        self.finishing = True
        if self.failed:
            self._abort([m for m in self._members if m in self.failed], "it failed here")
        staying = self._staying
        for member in staying:
            member.delta_base = None
            member.unfinished = self._finish_request(member)
            member.last_finish_sent = self.update_id
        answers = self._call(self._finish_request, staying)
        for _ in range(_FINISH_TRIES - 1):
            failed = [a.member for a in answers if isinstance(a.error, TransportError)]
            again = [member for member in failed if not self._fleet.is_silent(member)]
            if not again:
                break
            answers = [a for a in answers if a.member not in again]
            answers += self._call(self._finish_request, again)
        answers = [self._committed(answer) for answer in answers]
        for answer in answers:
            # The receiver's own word; any other error leaves open whether it has finished.
            if not isinstance(answer.error, TransportError | RemoteError | InvalidReplyError):
                answer.member.unfinished = None
        self._note(answers)
        for member, reply in self.replies.items():
            member.delta_base = reply.delta_base
        self._seconds["finish"] = time.perf_counter() - started
        if not self._staying:
            raise_first(answers)

    def _await_set(self) -> None:
        """As a part of a set: wait until its other parts are PREPARED, too."""
        if self._fleet.set_update is not None:
            self._check_tables()
            self._fleet.set_update.ready()
            self._fleet.set_update = None  # what is sent again is sent to this part alone

    def _check_tables(self) -> None:
        """Raise VerificationError where a receiver was sent another table of fingerprints.

        A receiver compares them at the finish. It gets none where this process dies after the
        finish of another part of the set, which commits this one, too.
        """
        sent = {member: self._finish_request(member).table_digest for member in self._staying}
        held = {member: self.replies[member].table_digest for member in sent}
        wrong = [m for m in sent if sent[m] is not None and held[m] not in (None, sent[m])]
        if wrong:
            error = VerificationError(
                f"{names(wrong)}: the table of fingerprints that arrived is not the one that was "
                "sent: it was changed in transit; send the update again"
            )
            self.failed.update(dict.fromkeys(wrong, error))
            raise error

    def abort(self, reason: str) -> None:
        """Abort the update on every receiver, unless a finish request was sent."""
        if not (self.finishing or self._aborted):
            self._aborted = True
            self._drop_servers()
            self._abort(self._members, reason)

    def _abort(self, members: Sequence[Member], reason: str) -> None:
        timeout_s = min(_ABORT_TIMEOUT_S, self._fleet.timeout_s)
        request = AbortRequest(update_id=self.update_id, reason=reason)
        for answer in self._fleet.call(request, members, timeout_s=timeout_s):
            if answer.error is None:
                if answer.step.state == "TORN" and answer.step.update_id == self.update_id:
                    self.dirty = True
                    self._torn.append(answer.member.target)
                continue
            logger.warning("abort at %s: %s", answer.member.target, answer.error)
            if isinstance(answer.error, TransportError):
                answer.member.unaborted = self.update_id
                self.failed.setdefault(answer.member, answer.error)

    def report(self, version: int, label: str | None, before: tuple[int, int]) -> SyncReport:
        """Return the report; `before` are the fleet's counts of bytes and messages at the start."""
        seconds = {**self._seconds, "total": time.perf_counter() - self._started}
        replies = self.replies
        receivers = tuple(
            ReceiverReport(
                target=member.target,
                path=member.shown_path,
                apply=reply.apply,
                verified=reply.verified,
                stall_s=reply.stall_s,
                seconds=reply.seconds,
                peak_extra_nbytes=reply.peak_extra_nbytes,
                names_nothing=reply.names_nothing,
                sources=reply.sources,
                whole=member.whole,
                casts=member.casts,
                skipped_paths=member.skipped,
                gpus={
                    rank: GpuPair(trainer=ours, receiver=theirs)
                    for rank, (ours, theirs) in member.gpus.items()
                },
            )
            for member, reply in replies.items()
        )
        nbytes, messages = (
            now - then for now, then in zip(self._fleet.sent_counts, before, strict=True)
        )
        skipped = {path: why for member in replies for path, why in member.skipped.items()}
        return SyncReport(
            version=version,
            label=label,
            update_id=self.update_id,
            tensors=len(self._group.manifest.specs),
            nbytes=max((r.nbytes for r in replies.values()), default=0),
            packed=any(packed for result in self._begun for packed in result.packed.values()),
            path="+".join(sorted({r.path for r in receivers})),
            apply="in_place" if any(r.apply == "in_place" for r in receivers) else "staged",
            verified=min((r.verified for r in receivers), key=_STRENGTH.index, default="none"),
            stall_s=max((r.stall_s for r in receivers), default=0.0),
            seconds=seconds,
            control_nbytes=nbytes,
            control_messages=messages,
            peak_extra_nbytes=max((one.extra_nbytes for one in self._results), default=0),
            written_nbytes=sum(one.written_nbytes for one in self._results),
            receivers=receivers,
            skipped_paths=skipped,
            not_finite=self._not_finite(),
            replicas_differ=self._group.worker.replicas.take_differing(),
            gathered=self._gathered(),
            summed=len(self.summed),
            casts=self._group.worker.casts,
            merge=self._merge(),
            rule=self.rule,
        )

    def _gathered(self) -> dict[str, str]:
        """Return which tensors the ranks gathered, and why."""
        if not self._whole:
            return {}
        if self._group.sends_streams:
            return dict(self._group.worker.plan.gathered)
        reason = self._paths.why_gathered
        return {"all tensors": reason} if reason else {}

    @property
    def _staying(self) -> list[Member]:
        return [member for member in self._members if member not in self.failed]

    def _drop_servers(self) -> bool:
        """Whether the others continue without failed members; these include whole servers."""
        gone = self._fleet.with_workers(self.failed)
        others = [member for member in self._members if member not in gone]
        if self.finishing or not (self._fleet.drops and others):
            return False
        for member in gone:
            if member in self._members and member not in self.failed:
                self.failed[member] = TransferError(f"{member.target}: its server lost a worker")
                self.replies.pop(member, None)
        return True

    def _transfer(
        self,
        *,
        terms: StartTerms | None = None,
        prepare: bool = False,
        pairs: bool = False,
        checks_memory: bool = False,
    ) -> None:
        """Send one message to each receiver, and the bytes of the message while they read."""
        started = time.perf_counter()
        members = self._staying
        begin = Begin(
            readers=self._readers_by_rank(members, pairs=pairs),
            verify=self._verify,
            pairs=pairs,
            checks_memory=checks_memory,
            delta=self._delta,
            offer=self._offer,
            apart=self._is_apart(pairs=pairs),
            sums=self._wants_sums(members, pairs=pairs),
        )
        self._sums = begin.sums
        epoch = next(_EPOCHS)

        def request(member: Member) -> Request:
            info = self._info(member, epoch)
            return UpdateRequest(
                update_id=self.update_id, start=terms, update_info=info, prepare=prepare
            )

        calls: dict[Member, Future[MemberReply]] = {}
        interrupt: BaseException | None = None
        try:
            try:
                self._begun = self._group.run_on_all(begin)
                self._note_begun()
                calls = dict(zip(members, self._fleet.begin(request, members), strict=True))
                self._run_transfer(lambda: self._raise_early(calls), apart=begin.apart)
                self._seconds["transfer"] = time.perf_counter() - started
                self._fleet.await_all(list(calls.values()), idle=lambda: self._watch(calls))
            except NothingSentError:
                raise
            except BaseException as exc:
                interrupt = None if isinstance(exc, Exception) else exc
                self._stop(calls, exc, apart=begin.apart and bool(calls))
                raise
            finally:
                self._results = self._end_transfer(interrupt)
        except VerificationError as exc:
            self._refuse_changed(exc)
            raise
        answers = [future.result() for future in calls.values()]
        if prepare:
            answers = [self._prepared(answer) for answer in answers]
        self._note(answers)
        self._refuse_changed()
        self._seconds["load"] = time.perf_counter() - started
        self._raise_unless_all(answers)
        compares = self._whole and self._verify and not self.is_delta
        for member in self._staying if compares else ():
            if self._digest(member) is None:
                raise ConfigError(
                    f"backend {member.backend!r}: table_digest is None after a verified transfer"
                )

    def _wants_sums(self, members: Sequence[Member], *, pairs: bool) -> bool:
        """Whether sums over all ranks are compared: once for each plan and receiver."""
        if pairs or not (self._whole and self._verify and self._group.sends_streams):
            return False
        plan = self._group.worker.sums_for
        return bool(plan) and any(m.summed != (plan, m.status.instance) for m in members)

    def _check_sums(self) -> None:
        """Compare the tensors as all ranks hold them with those that the receivers have loaded.

        Each byte was compared where it was copied; this says that each was copied to its place,
        once, whatever the plan. Raises VerificationError, before anything is committed.
        """
        if not self._sums or self.is_delta:
            return
        servers: dict[str, list[Mapping[str, Sequence[TensorPart]]]] = {}
        for member in self._staying:
            servers.setdefault(member.server_target, []).append(self.replies[member].parts)
        found = compare_sums(
            [result.parts for result in self._results],
            {server: join_parts(parts) for server, parts in servers.items()},
        )
        if found.wrong:
            listed = shorten(f"{name} ({where})" for name, where in found.wrong.items())
            raise VerificationError(
                f"{len(found.wrong)} tensors are not those that the ranks hold together, though "
                f"each part of them arrived: {listed}; the update is not applied. Where nothing "
                "wrote to them meanwhile, please report it, with the placements of both sides",
                names=list(found.wrong),
            )
        self.summed = found.compared
        # A worker alone has parts only; those of all are compared when all are sent something.
        everyone = set(self._fleet.members) <= set(self._staying)
        for member in self._staying:
            if everyone or member.server_target not in found.partial:
                member.summed = self._group.worker.sums_for, member.status.instance

    def _end_transfer(self, interrupt: BaseException | None) -> list[CommandResult]:
        """End the transfer on all ranks. Raises the error of a rank that transferred by itself.

        After an `interrupt` (Ctrl-C) of this rank it raises that: the ranks agree on an error that
        only names it.
        """
        try:
            return self._group.run_on_all(End())
        except WeightSyncError as exc:
            if interrupt is not None:
                raise interrupt from None
            if isinstance(exc, TransferTimeout) and self._late and not self._group.comm.broken:
                add_target(exc, names(self._late))
                self.failed.update(dict.fromkeys(self._late, exc))
            raise

    def _is_apart(self, *, pairs: bool) -> bool:
        """Whether no rank waits for another one between Begin and End."""
        return not pairs and self._group.sends_streams and self._group.worker.can_be_apart

    def _run_transfer(self, check: Callable[[], None], *, apart: bool) -> None:
        """Transfer every byte; `apart` the ranks reply at the End."""
        if apart:
            self._group.transfer_apart(check=check)
        else:
            self._group.run_on_all(Transfer(), check=check)

    def _note_begun(self) -> None:
        """Take what the ranks found and decided. Raises NothingSentError where none transfers."""
        if BeforeBegin.of_all(self._begun).moved:
            raise MemoryMovedError
        if self._offer is not None:
            self.estimate = self._offer.deciding(self._begun)
            if self.estimate is not None:
                self._delta, _ = self._offer.decide(self.estimate)
        if self._group.sends_streams and not are_alike(self._begun):
            raise UnlikeRanksError

    def _readers_by_rank(self, members: Sequence[Member], *, pairs: bool) -> ReadersByRank:
        """Return the readers of an update of these members; `pairs` come from one rank each."""
        readers: ReadersByRank = {}
        for member in members:
            for base in self._group.worker.backend(member.backend).requires:
                readers.setdefault(base, {})
            by_rank = readers.setdefault(member.backend, {})
            for rank in (member.rank,) if pairs else member.sending:
                by_rank.setdefault(rank, []).append(member.reader)
        return readers

    def _not_finite(self) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name for one in self._results for name in one.not_finite))
        if found:
            logger.warning("%d tensors hold NaN or infinity: %s", len(found), shorten(found))
        return found

    def _merge(self) -> MergeReport | None:
        """Return what rounding took of merged adapters: ranks that merge all do the same."""
        counts = next((one.merged for one in self._results if one.merged is not None), None)
        return None if counts is None else MergeReport(elements=counts[0], lost=counts[1])

    def _refuse_changed(self, cause: BaseException | None = None) -> None:
        """Raise VerificationError, with the update aborted, if the source changed meanwhile.

        The received weights, and the fingerprints that verify them, may be of two training steps.
        """
        changed = list(dict.fromkeys(name for result in self._results for name in result.changed))
        if not changed:
            return
        self.abort("the source changed while it was sent")
        refused = [m for m, error in self.failed.items() if isinstance(error, VerificationError)]
        for member in refused:
            del self.failed[member]
        torn = ", ".join(self._torn)
        held = f"{torn} load in place and are TORN until the next send" if torn else ""
        raise VerificationError(
            f"the source changed while it was sent: {len(changed)} tensors: {shorten(changed)}; "
            f"{held or 'nothing was committed'}. Let the send return (await asend_weights()) "
            "before the next optimizer step, then send again",
            names=changed,
        ) from cause

    def _collect_signs(self) -> None:
        """Collect the signs of life of all ranks' readers; errors are ignored."""
        with suppress(WeightSyncError):
            self._fleet.collect_signs(may_raise=False)

    def _info(self, member: Member, epoch: int) -> RegisteredUpdate:
        """Return the update info of one member, with the payload of its trainer engine."""
        begun = self._begun[member.rank]
        payload = self._payload(member, member.rank)
        manifest, delta = begun.manifest, begun.delta
        if member.ranks and delta is not None:
            payload = [self._packets(member, rank) for rank in member.ranks]
            manifest, delta = None, _joined_terms([self._begun[rank] for rank in member.ranks])
        elif member.ranks and manifest is None:
            payloads = [self._payload(member, rank) for rank in member.ranks]
            payload = StreamsUpdate(payloads=payloads, sums=self._sums)
        return RegisteredUpdate(
            sender=member.sender,
            epoch=epoch,
            verify=self._verify and delta is None,
            manifest=manifest,
            delta=delta,
            delta_follows=self._delta is not None,
            payload=payload,
            registered=True,
        )

    def _packets(self, member: Member, rank: int) -> StreamPackets:
        """Return the packets of a rank's delta, as the message to a member has them."""
        manifest = self._begun[rank].manifest
        if manifest is None:
            raise TransferError(f"rank {rank} sends no delta to {member.target}, as others do")
        return StreamPackets(manifest=manifest, payload=self._payload(member, rank))

    def _payload(self, member: Member, rank: int) -> object:
        """Return the payload of a rank's trainer engine for a member."""
        updates = self._begun[rank].updates
        if member.backend not in updates:
            raise TransferError(f"rank {rank} began no update for {member.target}")
        payload = updates[member.backend]
        if isinstance(payload, Mapping) and member.reader in payload:
            return payload[member.reader]
        return payload

    def _call(
        self,
        request: Request | Callable[[Member], Request],
        members: Sequence[Member] | None = None,
    ) -> list[MemberReply]:
        chosen = self._members if members is None else members
        idle = self._collect_signs if any(member.rank for member in chosen) else None
        return self._fleet.call(request, chosen, idle=idle)

    def _finish_request(self, member: Member) -> FinishRequest:
        return FinishRequest(
            update_id=self.update_id,
            table_digest=self._digest(member) if self._whole and self._results else None,
            fleet=self._servers if member in self._described else None,
            delta_follows=self._delta is not None,
        )

    def _digest(self, member: Member) -> str | None:
        """Return the digest of the fingerprints that a member was sent; of several ranks, of all.

        None where a rank has none.
        """
        found = [self._results[rank].digests.get(member.backend) for rank in member.sending]
        known = [digest for digest in found if digest is not None]
        if len(known) < len(found):
            return None
        if not member.ranks:
            return known[0]
        return table_digest([word for digest in known for word in as_words(digest)])

    def _describe_fleet(self) -> None:
        """Describe the fleet for status pages, to one worker of each server."""
        workers: dict[str, list[Member]] = {}
        for member in dict.fromkeys([*self._fleet.members, *self._members]):
            workers.setdefault(member.server_target, []).append(member)
        try:
            if len(workers) > 1:
                shown = list(workers.items())[:MAX_FLEET]
                self._servers = [self._described_server(*server) for server in shown]
        except Exception:  # a user's transport may name its path by anything
            logger.debug("the fleet could not be described", exc_info=True)
        else:
            ours = set(self._members)
            told = (next(filter(ours.__contains__, each), None) for each in workers.values())
            self._described = {member for member in told if member is not None}

    def _described_server(self, name: str, workers: Sequence[Member]) -> FleetServer:
        loads = [self.replies[m].seconds.get("load", 0.0) for m in workers if m in self.replies]
        errors = [self.failed[member] for member in workers if member in self.failed]
        apart = set(self._members).isdisjoint(workers)
        return FleetServer(
            target=_clipped(name),
            workers=len(workers),
            path=_clipped("+".join(sorted({str(member.shown_path) for member in workers}))),
            load_s=min(max([0.0, *filter(math.isfinite, loads)]), 1e9),
            version=self._fleet.version if apart else None,
            error=_clipped(str(errors[0])) if errors else "",
        )

    def _stop(
        self, begun: Mapping[Member, Future[MemberReply]], why: BaseException, *, apart: bool
    ) -> None:
        """Abort after a failed transfer, and wait until no receiver reads any more.

        The members that failed before are to blame, else those that kept a rank waiting. Where
        another rank has failed that transferred `apart`, only the latter: the errors of the others
        may come of that.
        """
        # Before the ranks are asked: receivers fail when the ranks end the update.
        done = [future.result() for future in begun.values() if future.done()]
        answers: Sequence[CommandResult] = self._signs_of_all() if apart else ()
        blamed: Sequence[Member]
        if any(answer.has_failed for answer in answers[1:]):
            blamed = self._late = _late_members(begun, [answer.late for answer in answers])
        else:
            blamed = self._blamed(begun, done, why)
        self._fleet.mark_silent(self._late)
        if isinstance(why, WeightSyncError):
            self.failed.update(dict.fromkeys(blamed, why))
        self.abort("the sender stopped in the middle")
        for member, future in begun.items():
            packed = [
                self._begun[rank].packed.get(member.backend, False) for rank in member.sending
            ]
            if all(packed) and member.unaborted == self.update_id:
                continue  # it cannot be reached, and reads buckets, not the source
            self._fleet.await_all([future], idle=self._collect_signs if member.rank else None)
            error = future.result().error
            if error is not None:
                logger.debug("after the stop: %s: %s", member.target, error)

    def _blamed(
        self, begun: Iterable[Member], done: list[MemberReply], why: BaseException
    ) -> Sequence[Member]:
        """Return the members to blame for the failure of a transfer on this rank."""
        if self.failed:
            return ()
        if self._first_failed is not None:
            return [self._first_failed]
        if isinstance(why, TransferTimeout):
            engines = self._group.worker.engines.items()
            own = {name: part(engine, ReaderWatch).late_readers for name, engine in engines}
            self._late = _late_members(begun, [own])
            if not self._late and any(member.rank for member in begun):
                answers = self._signs_of_all()
                self._late = _late_members(begun, [answer.late for answer in answers])
            if self._late:
                add_target(why, names(self._late))
        if not self._late:
            self._note(done)
        return self._late

    def _signs_of_all(self) -> Sequence[CommandResult]:
        """Return what all ranks know of their readers; nothing where a rank is lost."""
        with suppress(WeightSyncError):  # the update ends with the error of that rank
            return self._group.run_on_all(KeepAlive(may_raise=False))
        return ()

    def _raise_unless_all(self, answers: list[MemberReply]) -> None:
        """Raise the first error, unless the PREPARED members can finish without the failed ones.

        They can where failed members are dropped, or where an in-place receiver cannot roll back.
        """
        failed = failures(answers)
        if not failed:
            return
        if self.refused_delta:
            raise_first(answers)  # the whole model is sent to all of them
        if self._sourceless:
            raise_first([a for a in failed if not isinstance(a.error, SourceLostError)])
        dropped = self._drop_servers()
        prepared = [a for a in answers if a.member not in self.failed]
        if dropped and prepared:
            return
        if any(a.step.apply == "in_place" for a in prepared):
            self.rule = "roll-forward"
            going_on = names(answer.member for answer in prepared)
            logger.warning("update %s: rolling forward on %s", self.update_id, going_on)
            return
        raise_first(answers)

    def _raise_early(self, begun: Mapping[Member, Future[MemberReply]]) -> None:
        """Raise when the update was cancelled, a receiver failed, or it has not read all bytes."""
        self._group.worker.stop.check()
        self._fleet.assume_alive()
        self._fleet.look()
        for member, future in begun.items():
            if future.done():
                answer = future.result()
                if answer.error is not None:
                    if self._goes_on_without(member, answer.error):
                        self._drop_reader(member)
                        continue
                    self._first_failed = member
                    raise answer.error
                if not member.rank and self._has_unread(member):
                    self.failed[member] = ProtocolError(
                        f"{member.target} replied that the update is complete, but has not read "
                        "the ring to its end; do several receivers share this target?"
                    )
                    raise self.failed[member]
        self._raise_sourceless(begun)

    def _raise_sourceless(self, begun: Mapping[Member, Future[MemberReply]]) -> None:
        """Raise where all members have failed, and one since it lost its source.

        The bytes that are left have no reader, and the update is sent again. A rank that has died
        is noticed then: nothing else tells this one of it in the middle of a transfer.
        """
        if all(future.done() for future in begun.values()):
            errors = [future.result().error for future in begun.values()]
            lost = [error for error in errors if isinstance(error, SourceLostError)]
            if lost and None not in errors:
                raise lost[0]

    def _has_unread(self, member: Member) -> bool:
        """Whether a reader of this rank has not read all bytes."""
        engine = self._group.worker.engines[member.backend]
        return part(engine, ReaderWatch).has_unread(member.reader)

    def _watch(self, begun: Mapping[Member, Future[MemberReply]]) -> None:
        """While receivers are at work that have all bytes from here: see that none waits for ever.

        On another host they may still wait for one that has failed.
        """
        self._fleet.collect_signs()
        for member, future in begun.items():
            if future.done() and future.result().error is not None:
                self._drop_reader(member)

    def _drop_reader(self, member: Member) -> None:
        engine = self._group.worker.engines.get(member.backend)
        if engine is not None and not member.rank:
            part(engine, ReaderChanges).drop_reader(member.reader)

    def _goes_on_without(self, member: Member, error: WeightSyncError) -> bool:
        """Whether an update continues after this failure of a member.

        One that lost its source is not to blame: the one that served it fails, too, perhaps later.
        """
        if isinstance(error, SourceLostError):
            return True
        engine = self._group.worker.engines.get(member.backend)
        if member.rank or engine is None:
            return False
        if not part(engine, ReaderChanges).goes_on_without(member.reader):
            return False
        gone = self._fleet.with_workers([*self.failed, member])
        return self._fleet.drops and not set(gone).issuperset(self._members)

    def _prepared(self, answer: MemberReply) -> MemberReply:
        """Return the result, or an error where the reply says anything else than PREPARED."""
        is_prepared = answer.error is None and answer.step.state == "PREPARED"
        return self._checked(answer, "PREPARED", is_so=is_prepared)

    def _committed(self, answer: MemberReply) -> MemberReply:
        """Return the result, or an error where the reply is not that of a commit."""
        is_committed = answer.error is None and is_commit(answer.step, self._version)
        return self._checked(answer, f"READY at version {self._version}", is_so=is_committed)

    def _checked(self, answer: MemberReply, wanted: str, *, is_so: bool) -> MemberReply:
        """Return the result, or an error where it `is_so` not, or of another update.

        No receiver of weightsync gives such a reply; other code, or a proxy, may.
        """
        if answer.error is not None:
            return answer
        step = answer.step
        if is_so and step.update_id in (None, self.update_id):
            return answer
        error = InvalidReplyError(
            f"{answer.member.target} replied that it is {step.state} at version {step.version} in "
            f"update {step.update_id}, not {wanted} in update {self.update_id}"
        )
        return MemberReply(answer.member, error=error)

    def _note(self, answers: list[MemberReply]) -> None:
        for answer in answers:
            if answer.error is None:
                self.replies[answer.member] = answer.step
            else:
                self.failed[answer.member] = answer.error
                self.replies.pop(answer.member, None)
        lost = [m for m, error in self.failed.items() if isinstance(error, SourceLostError)]
        if len(lost) < len(self.failed):
            for member in lost:
                del self.failed[member]
            self._sourceless = bool(lost)


def _joined_terms(begun: Sequence[CommandResult]) -> DeltaTerms:
    """Return the terms of a delta that several ranks send: of the bases that each of them knows."""
    terms = [result.delta.bases for result in begun if result.delta is not None]
    shared = [base for base in terms[0] if all(base in bases for bases in terms)]
    return DeltaTerms(
        bases={base: joined_totals([int(bases[base], 16) for bases in terms]) for base in shared}
    )


def is_commit(step: StepReply, version: int | None) -> bool:
    """Whether the reply to a finish says that `version` is in use; None is any version."""
    return step.state in COMMITTED_STATES and version in (None, step.version)


def _clipped(text: str) -> str:
    """Return text that a FleetServer can hold."""
    return text.encode("utf-8", "replace").decode()[:256]


def _late_members(
    members: Iterable[Member], late: Sequence[Mapping[str, Sequence[int]]]
) -> list[Member]:
    """Return the members that a rank waited for in vain; `late` are readers by backend, by rank."""
    return [
        member
        for member in members
        if any(
            rank < len(late) and member.reader in late[rank].get(member.backend, ())
            for rank in member.sending
        )
    ]


@dataclass(frozen=True, slots=True)
class LastVersion:
    """The last version that was sent, with the digests of its fingerprints, and its layout."""

    terms: StartTerms = field(default_factory=StartTerms)
    layout: str = ""
    digests: Sequence[Mapping[str, str | None]] = ()
    update_ids: set[str] = field(default_factory=set)

    @property
    def version(self) -> int:
        """The version, 0 before the first one."""
        return self.terms.version or 0

    def is_comparable(self, layout: str, *, lines: str) -> bool:
        """Whether the fingerprints of another update may show that the weights are the same.

        `lines` is the key of those of lines, which do not depend on the layout of the stream; empty
        where none are taken.
        """
        return self.layout == layout or any(lines in digests for digests in self.digests)

    def unknown(self) -> TransferError:
        """Return the error that says that nothing shows whether the weights are the same."""
        return TransferError(
            f"whether the weights have changed since version {self.version} was sent cannot be "
            "told, since the receivers take them by other paths now; send_weights() updates every "
            "receiver"
        )

    def check_unchanged(
        self, digests: Sequence[Mapping[str, str | None]], layout: str, *, verify: bool
    ) -> None:
        """Raise TransferError unless the weights are those that were sent as this version before.

        Where that cannot be told, too; without `verify` a warning is logged instead.
        """
        compared = [
            _is_unchanged(before, now, same_layout=self.layout == layout)
            for before, now in zip(self.digests, digests, strict=False)
            if any(now.values())
        ]
        if False in compared:
            raise TransferError(
                f"the weights have changed since version {self.version} was sent; "
                "send_weights() updates every receiver"
            )
        if compared and None not in compared:
            return
        if verify:
            raise self.unknown()
        logger.warning(
            "version %s is sent again unchecked: without verify=True a change of the weights "
            "cannot be detected",
            self.version,
        )


def _is_unchanged(
    before: Mapping[str, str | None], now: Mapping[str, str | None], *, same_layout: bool
) -> bool | None:
    """Compare the digests of one rank's fingerprints; None where nothing covers all that was sent.

    Those of lines do not depend on the layout of the stream.
    """
    taken = {name: digest for name, digest in now.items() if digest is not None}
    known = {
        name
        for name in taken
        if before.get(name) is not None and (same_layout or name.startswith(LINES_DIGEST))
    }
    if any(before[name] != taken[name] for name in known):
        return False
    lines = {name for name in taken if name.startswith(LINES_DIGEST)}
    covers_all = bool(lines & known) or known >= taken.keys() - lines
    return True if known and covers_all else None
