"""Coordinator: runs on rank 0, calls the fleet and directs the other ranks through an update."""

from __future__ import annotations

import copy
import dataclasses
import logging
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from msgspec.structs import replace

from weightsync.arguments import as_label
from weightsync.errors import (
    ConfigError,
    DeltaError,
    SourceLostError,
    StaleVersionError,
    WeightSyncError,
)
from weightsync.ranks.commands import CheckMoved, DeltaOffer, DeltaTask
from weightsync.report import SyncReport
from weightsync.specs import MAX_VERSION
from weightsync.transports.base import BaseTransport
from weightsync.update.deltas import DeltaChoice, DeltaPlanner
from weightsync.update.fleet import Fleet, Member, WorldSizeChangedError, names
from weightsync.update.joining import Joining
from weightsync.update.lifecycle import version_after
from weightsync.update.membership import Membership
from weightsync.update.outgoing import LastVersion, MemoryMovedError, UpdateTransaction, is_commit
from weightsync.update.paths import PathSelector
from weightsync.update.recovery import abort_prepared
from weightsync.wire.codec import InvalidReplyError
from weightsync.wire.messages import (
    StartTerms,
    Status,
    StatusRequest,
    StepReply,
    WakeRequest,
)

logger = logging.getLogger(__name__)

OnFailure = Literal["abort", "drop"]
_TRIES = 4
"""How often an update is tried: a receiver that refused it may be reconnected in between."""


class Coordinator:
    """Updates a fleet from the source of the rank group. Used by one thread at a time.

    `membership` connects and disconnects the fleet. With `verify`, receivers check fingerprints of
    the weights that arrive. `last_report` is the report of the current call of the user.
    """

    def __init__(
        self,
        fleet: Fleet,
        paths: PathSelector,
        *,
        takeover: bool,
        delta: DeltaChoice = "off",
        scrub: float = 0.0,
    ) -> None:
        self.fleet = fleet
        self.deltas = DeltaPlanner(fleet.group, delta, scrub)
        self.paths = paths
        self.membership = Membership(fleet, paths, takeover=takeover)
        self.verify = True
        self.last_report: SyncReport | None = None
        self._group = fleet.group
        self._sent = LastVersion()
        self._sends_snapshots = False
        self._whole_next = False

    def take_snapshot(self) -> None:
        """Copy the source's tensors on all ranks; from then on every update sends a copy."""
        if not self._sends_snapshots:
            self.membership.disconnect()
        self._group.take_snapshot(streams=self.paths.sends_streams)
        self._sends_snapshots = True

    def _ready(self, members: Sequence[Member] | None = None) -> None:
        """Prepare for a call that does not send the model: as `Membership.ready`.

        After `release` there is no copy of the source to connect with; another one is made.
        """
        if self._sends_snapshots and not self.membership.connected:
            self.take_snapshot()
        self.membership.ready(members)

    def send(
        self,
        version: int | None,
        label: str | None,
        *,
        rewind: bool,
        taken: bool = False,
        weights_id: str = "",
        wake: bool = False,
    ) -> SyncReport:
        """Send the source's current weights to every receiver, and return the report.

        With `taken`, those of the last snapshot. `weights_id` is theirs, if they have one. With
        `wake`, receivers that sleep are woken: their weights before, the rest when all have the
        new ones.
        """
        weights_id = weights_id or secrets.token_hex(8)
        _check_version(version)
        as_label(label)
        woken = self.wake() if wake else None
        if self._sends_snapshots and not taken:
            self.take_snapshot()
        before = self.fleet.sent_counts
        last, checks_memory = version is not None, True
        while True:
            self.membership.ready(checks_memory=False)
            try:
                update, terms = self._reach_most(
                    version, label, weights_id, rewind=rewind, checks_memory=checks_memory
                )
            except MemoryMovedError:
                self.membership.disconnect()
                checks_memory = False  # a source that moves each time is sent all the same
                continue
            sent = self.fleet.version = terms.version or 0
            self._sent = LastVersion(
                terms, self.paths.layout, update.table_digests, {update.update_id}
            )
            try:
                self._reach_rest(update, terms)
                break
            except StaleVersionError:
                if last or self._group.worker.stop.is_set():
                    raise
            finally:
                # The version of a member that failed is not the version of the fleet.
                self.fleet.version = sent
            # A member that was unreachable holds a newer version, from another sender. The fleet
            # has to move past that version.
            version, last = None, True
        report = self._report(update, sent, label, before)
        if woken is not None:
            self.serve(woken)
        return report

    def wake(self) -> list[Member]:
        """Wake the weights of the receivers that sleep; return these members, for `serve`.

        Raises the error of a receiver that stays asleep, unless it may be dropped. One that does
        not say its status is left to the update.
        """
        answers = self.fleet.call(StatusRequest(), timeout_s=self.fleet.brief_s)
        known = {a.member: a.reply for a in answers if isinstance(a.reply, Status)}
        for member, status in known.items():
            if status.discarded:
                member.delta_base = None  # else a delta is offered first, and refused
        asleep = [member for member, status in known.items() if status.asleep]
        self._wake(WakeRequest(tags=["weights"]), asleep)
        return asleep

    def serve(self, woken: Sequence[Member]) -> None:
        """Wake the rest of these members after an update; raises as `wake` does."""
        servers = {member.server_target for member in woken}  # one may have been expanded since
        self._wake(WakeRequest(), [m for m in self.fleet.members if m.server_target in servers])

    def _wake(self, request: WakeRequest, members: Sequence[Member]) -> None:
        answers = self.fleet.call(request, members)
        failed = {a.member: a.error for a in answers if a.error is not None}
        if failed and not self.fleet.may_drop(failed):
            raise next(iter(failed.values()))
        self.membership.drop_all(failed)

    def resync(self, members: Sequence[Member]) -> SyncReport:
        """Send the current version to these members only, and return the report.

        Raises TransferError when the source has changed since that version was sent, and
        ConfigError when this sender did not send that version as a whole.
        """
        version = self.fleet.version
        if not version:
            raise ConfigError("no version was sent yet: send_weights() updates every receiver")
        if self._sent.version != version:
            raise ConfigError(
                f"this sender has not sent version {version} as a whole, so it cannot send it "
                "again; send_weights() updates every receiver"
            )
        before = self.fleet.sent_counts
        self._ready(members)
        terms = replace(self._sent.terms, version=self.fleet.version, rewind=True)
        update = self._update(members)
        delta = self.deltas.repeat()
        try:
            update.send_whole(terms, same_as=self._sent, delta=delta)
        except WeightSyncError:
            if not self.membership.reconnect(update.failed, members):
                raise
            self.membership.repair_group(members)
            update = self._update(members)
            update.send_whole(terms, same_as=self._sent, delta=delta)
        self._sent.update_ids.add(update.update_id)
        return self._report(update, self.fleet.version, terms.label, before, again=True)

    def add(self, transport: BaseTransport) -> SyncReport | None:
        """Add a receiver, and bring it to the fleet's version.

        A receiver of the fleet sends it, where one can: the source may have changed since. Else the
        source does, where this sender has sent that version, and can tell that it has not changed
        since. Returns the report; None where there is no version yet, or neither can send it: the
        next update brings it. An error leaves the fleet unchanged.
        """
        self.membership.check_new(transport)
        self._ready()
        joining = Joining(self.fleet, transport, delta_follows=self.deltas.may_send)
        report = joining.fetch()
        members = self.membership.add(transport)
        # A receiver that says that it holds them may have been written to since.
        if report is not None and all(joining.holds(member.status) for member in members):
            for member in members:
                forms = member.status.delta_forms
                # For shards the sum of no stream of this sender is known, unless one receiver has
                # sent what this sender would: whole tensors, in one stream.
                other = self._group.sends_streams or any(r.peers for r in report.receivers)
                knows = bool(forms) and not ("shards" in forms and other)
                member.delta_base = member.status.weights_id if knows else None
            self.last_report = report
            return report
        if not self.fleet.version or self._sent.version != self.fleet.version:
            return None
        lines = self._group.worker.lines_digest if self.deltas.repeat() is not None else ""
        if self.verify and not self._sent.is_comparable(self.paths.layout, lines=lines):
            # No error: another add() would change the paths again, and fail as well.
            logger.warning(
                "%s gets its first weights with the next update: %s",
                transport.target,
                self._sent.unknown(),
            )
            return None
        try:
            return self.resync(members)
        except BaseException:
            for member in members:
                self.membership.remove(member)
            raise

    def remove(self, target: str) -> None:
        """Remove a receiver, or all workers of a server, from the fleet. It keeps its weights.

        Raises ConfigError for the last receiver.
        """
        members = self.membership.find(target)
        if len(self.fleet.members) == len(members):
            raise ConfigError(f"{target} is the last receiver; close() the sender instead")
        try:
            self.membership.retry_pending(members, timeout_s=self.fleet.brief_s)
        except WeightSyncError as exc:
            logger.warning("%s is removed and did not reply: %s", target, exc)
        for member in members:
            self.membership.remove(member)

    @contextmanager
    def updating(
        self,
        version: int | None,
        label: str | None,
        *,
        rewind: bool,
        partial: bool,
        wake: bool = False,
    ) -> Iterator[UpdateTransaction]:
        """Open an update whose tensors the caller sends; it commits or aborts on every receiver."""
        _check_version(version)
        as_label(label)
        woken = self.wake() if wake else None
        before = self.fleet.sent_counts
        self._ready()
        version, rewind = self._next(version, rewind=rewind)
        base = self.fleet.version if partial else None
        terms = StartTerms(
            version=version, label=label, rewind=rewind, partial=partial, base_version=base
        )
        update = self._update(self.fleet.members)
        try:
            update.start(terms)
            self._group.finish(self.fleet.version, goes_on=True)
            yield update
            self._group.run_on_all(CheckMoved())  # raises where the block of another rank failed
            update.prepare()
            update.finish()
        except BaseException as exc:
            update.abort(f"the sender's block ended with {type(exc).__name__}")
            if isinstance(exc, WeightSyncError):
                self.membership.reconnect(update.failed)
                self.membership.drop_all(update.failed)
            raise
        self.fleet.version = version
        self._sent = LastVersion()  # the caller's tensors cannot be sent again
        if update.failed and not self.fleet.may_drop(update.failed):
            raise _partial_failure(update.failed, version) from next(iter(update.failed.values()))
        self.membership.drop_all(update.failed)
        update.last_report = self._report(update, version, label, before)
        if woken is not None:
            self.serve(woken)

    def _reach_most(
        self,
        version: int | None,
        label: str | None,
        weights_id: str,
        *,
        rewind: bool,
        checks_memory: bool,
    ) -> tuple[UpdateTransaction, StartTerms]:
        """Send until all reachable members hold the version; `failed` of the update has the others.

        After a member was reconnected, the update is tried again with all members, up to _TRIES
        times. It continues without failed members where these are dropped, or where members cannot
        roll back because an update in place was interrupted. Raises MemoryMovedError with
        `checks_memory`, before anything was sent.
        """
        without: dict[Member, WeightSyncError] = {}
        tries, dirty, of_set, was_lost = 1, False, self.fleet.set_update, False
        while True:
            following, back = self._next(version, rewind=rewind)
            terms = StartTerms(
                version=following,
                label=label,
                rewind=back,
                weights_id=weights_id,
                manifest_digest=self._group.manifest.digest,
            )
            update = self._update([m for m in self.fleet.members if m not in without])
            delta = self._delta_task(terms, update, tries)
            try:
                update.send_whole(terms, delta=delta, checks_memory=checks_memory and tries == 1)
            except WeightSyncError as exc:
                self.deltas.note(update.estimate)
                dirty = dirty or update.dirty
                lost = bool(update.failed) and all(
                    isinstance(error, SourceLostError) for error in update.failed.values()
                )
                reconnected = self.membership.reconnect(
                    update.failed, anew=update.failed if lost and was_lost else ()
                )
                was_lost = lost
                ahead = version is None and isinstance(exc, StaleVersionError)
                if self._group.worker.stop.is_set():
                    raise
                whole_helps = update.is_delta and (
                    isinstance(exc, DeltaError) or update.refused_delta
                )
                if whole_helps:
                    self.deltas.failed(exc)
                if of_set is not None:  # all of the set is sent again, or nothing
                    self._whole_next = whole_helps
                    of_set.failed(exc, again=bool(reconnected or whole_helps or lost))
                    raise
                if (reconnected or ahead or whole_helps or lost) and tries < _TRIES:
                    tries += 1
                    continue
                without.update(update.failed)
                rest = [member for member in self.fleet.members if member not in without]
                goes_on = dirty or self.fleet.may_drop(without)
                if not (update.failed and rest and goes_on) or update.finishing:
                    raise
                logger.warning("sending version %s without %s", terms.version, names(without))
                self.membership.repair_group(rest)
            else:
                self.deltas.note(update.estimate)
                stale = any(isinstance(e, StaleVersionError) for e in update.failed.values())
                if stale and version is None and tries < _TRIES:
                    # In-place members committed a version that is not newer than that of others.
                    tries, dirty = tries + 1, True
                    self.membership.reconnect(update.failed)
                    continue
                update.failed.update(without)
                update.rule = "roll-forward" if dirty else update.rule
                return update, terms

    def _delta_task(
        self, terms: StartTerms, update: UpdateTransaction, tries: int
    ) -> DeltaTask | DeltaOffer | None:
        """Return what an update does about deltas: after a failure it sends the whole model."""
        after_refusal, self._whole_next = self._whole_next, False
        if tries > 1 or after_refusal:
            return self.deltas.retry(terms)
        return self.deltas.offer(terms, update.members)

    def _next(self, version: int | None, *, rewind: bool) -> tuple[int, bool]:
        """Return the version to send, and whether it is a rewind, as after MAX_VERSION."""
        if version is not None:
            return version, rewind
        following = version_after(self.fleet.version)
        return following, rewind or following < self.fleet.version

    def _reach_rest(self, update: UpdateTransaction, terms: StartTerms) -> None:
        """Update each failed member by itself, or drop it: the others hold the version already."""
        left: dict[Member, WeightSyncError] = {}
        waiting = deque(update.failed.items())
        while waiting:
            member, error = waiting.popleft()
            if member not in self.fleet.members:
                continue
            try:
                update.absorb(*self._send_again(member, terms, error))
                update.rule = "roll-forward"
            except WorldSizeChangedError as exc:
                waiting += [(new, exc) for new in self.membership.connect_workers(member)]
            except WeightSyncError as exc:
                left[member] = exc
        stays = not self.fleet.may_drop(left) or self._group.worker.stop.is_set()
        if left and stays:
            update.rule = "roll-forward"
            raise _partial_failure(left, terms.version or 0) from next(iter(left.values()))
        self.membership.drop_all(left)

    def _send_again(
        self, member: Member, terms: StartTerms, failure: WeightSyncError
    ) -> tuple[Mapping[Member, StepReply], set[str]]:
        """Roll one receiver forward by itself, because the others cannot roll back.

        Returns the replies, and the tensors whose sums over all ranks were compared.
        Where members are dropped, only a receiver that was restarted meanwhile is rolled forward,
        or one whose source was lost.
        Raises `failure` for any other, for one that is silent, and for one whose reply was invalid:
        it may hold the version already, and would reply the same again.
        """
        if self.fleet.is_silent(member) or isinstance(failure, InvalidReplyError):
            raise failure
        finished = self.membership.retry_pending([member]).get(member)
        if finished is not None and is_commit(finished, terms.version):
            return {member: finished}, set()
        reconnected = self.membership.reconnect({member: failure}, [member])
        reconnected = reconnected or isinstance(failure, WorldSizeChangedError | SourceLostError)
        if self.fleet.may_drop([member]) and not reconnected:
            raise failure
        abort_prepared(self.fleet, member)
        self.membership.repair_group([member])
        again = self._update([member])
        try:
            again.send_whole(terms, same_as=self._sent, delta=self.deltas.repeat())
        except WeightSyncError:
            if member.unfinished is None:
                with suppress(WeightSyncError):
                    abort_prepared(self.fleet, member)
            raise
        self._sent.update_ids.add(again.update_id)
        return again.replies, again.summed

    def _update(self, members: Sequence[Member]) -> UpdateTransaction:
        return UpdateTransaction(self.fleet, self.paths, members, verify=self.verify)

    def _report(
        self,
        update: UpdateTransaction,
        version: int,
        label: str | None,
        before: tuple[int, int],
        *,
        again: bool = False,
    ) -> SyncReport:
        """Return the update's report, with connect times and dropped members of the same call."""
        connect_seconds = dict(self.paths.seconds) if self.paths.unreported else {}
        self.paths.unreported = False
        dropped, self.membership.dropped = self.membership.dropped, {}
        report = update.report(version, label, before)
        self.last_report = dataclasses.replace(
            report,
            connect_seconds=connect_seconds,
            dropped=dropped,
            delta=self.deltas.report(update.results, again=again),
        )
        return self.last_report


def _partial_failure(failed: Mapping[Member, WeightSyncError], version: int) -> WeightSyncError:
    """Return the error of the failed members, which says that the others hold the version."""
    first = next(iter(failed.values()))
    reasons = "; ".join(str(reason) for reason in failed.values())
    error = copy.copy(first)
    unclear = any(isinstance(reason, InvalidReplyError) for reason in failed.values())
    left = "did not confirm it" if unclear else "failed and is left behind"
    error.args = (
        f"{names(failed)} {left}, while the others hold version {version}: "
        f"{reasons}; send_weights() tries again, sender.remove() lets a receiver go",
    )
    return error


def _check_version(version: object) -> None:
    if version is None:
        return
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise ConfigError(
            f"a version is an integer from 0 to {MAX_VERSION}, not {version!r}; a name goes into "
            "label="
        )
