"""Rank 0 of a trainer: it alone calls the fleet, and leads the other ranks through an update."""

from __future__ import annotations

import copy
import dataclasses
import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from weightsync.backends.base import Backend, TransferOptions
from weightsync.errors import ConfigError, StaleVersionError, WeightSyncError
from weightsync.ranks.group import RankGroup
from weightsync.ranks.worker import CheckMoved
from weightsync.report import SyncReport
from weightsync.specs import MAX_VERSION
from weightsync.transports.base import Transport
from weightsync.update.fleet import Fleet, Member, WorldSizeChangedError
from weightsync.update.lifecycle import version_after
from weightsync.update.membership import Membership, names
from weightsync.update.outgoing import LastVersion, UpdateTransaction
from weightsync.update.paths import PathSelector
from weightsync.wire.messages import StartTerms, StepReply

logger = logging.getLogger(__name__)

OnFailure = Literal["abort", "drop"]
_GOODBYE_S = 10.0
_TRIES = 4
"""How often an update begins anew after a receiver was met again, or freed, that refused it."""


class Coordinator:
    """Keeps a fleet in step with the ensemble's source. Used by one thread at a time.

    `version` is the last version that receivers hold.
    """

    def __init__(
        self,
        group: RankGroup,
        fleet: Fleet,
        options: TransferOptions,
        backends: Sequence[Backend],
        *,
        ordered: bool = False,
        unusable: Mapping[str, str] | None = None,
        on_failure: OnFailure,
        takeover: bool = False,
    ) -> None:
        self.fleet = fleet
        self.paths = PathSelector(
            group, fleet, options, backends, ordered=ordered, unusable=unusable
        )
        fleet.beat = self.paths.beat
        self.verify = True
        self._group = group
        fleet.watch = group.observers
        if group.comm.size > 1:
            fleet.idle = group.comm.attend
        self._timeout_s = options.timeout_s
        self._drops = on_failure == "drop"
        self._membership = Membership(
            group,
            fleet,
            self.paths,
            timeout_s=options.timeout_s,
            drops=self._drops,
            takeover=takeover,
        )
        self._sent = LastVersion()

    @property
    def version(self) -> int:
        """The last version that receivers hold."""
        return self._membership.version

    @property
    def connected(self) -> bool:
        """Whether every member has what it needs for an update."""
        return self._membership.connected

    def connect(self) -> None:
        """Take a path to everyone, and take over what a dead sender left."""
        self._membership.connect()

    def disconnect(self, *, leaves: bool = False) -> None:
        """Unregister all memory; the next send connects, unless the sender `leaves` its fleet."""
        self._membership.disconnect(leaves=leaves)

    def send(self, version: int | None, label: str | None, *, rewind: bool) -> SyncReport:
        """Bring every receiver to the source's current weights."""
        _check_version(version)
        before = (self.fleet.sent_nbytes, self.fleet.sent_messages)
        update, sent = self._send(version, label, rewind=rewind, last=version is not None)
        return self._report(update, sent, label, before)

    def _send(
        self, version: int | None, label: str | None, *, rewind: bool, last: bool
    ) -> tuple[UpdateTransaction, int]:
        self._membership.ready()
        update, terms = self._reach_most(version, label, rewind=rewind)
        sent = terms.version or 0
        self._membership.version = sent
        self._sent = LastVersion(
            version=sent,
            label=label,
            weights_id=terms.weights_id,
            layout=self.paths.layout,
            digests=update.table_digests,
            update_ids={update.update_id},
        )
        try:
            self._reach_rest(update, terms)
            return update, sent
        except StaleVersionError:
            if last or self._group.worker.stop.is_set():
                raise
        finally:
            # What those hold who were left behind is not what the fleet holds.
            self._membership.version = sent
        # Another sender had passed one that could not be asked. Those who went on go beyond it.
        return self._send(None, label, rewind=rewind, last=True)

    def resync(self, members: Sequence[Member]) -> SyncReport:
        """Send the current version to these members, and nothing to any other.

        Raises TransferError when the source has changed since that version was sent, ConfigError
        when this sender has not sent that version as a whole.
        """
        if not self.version:
            raise ConfigError("no version was sent yet: send_weights() brings everyone up to date")
        if self._sent.version != self.version:
            raise ConfigError(
                f"this sender has not sent version {self.version} as a whole, so it cannot send "
                "it again; send_weights() brings everyone up to date"
            )
        before = (self.fleet.sent_nbytes, self.fleet.sent_messages)
        self._membership.ready(members)
        terms = self._terms(
            self.version, self._sent.label, rewind=True, weights_id=self._sent.weights_id
        )
        update = self._update(members)
        try:
            update.send_whole(terms, before_finish=self._check_unchanged)
        except WeightSyncError:
            if not self._membership.reconnect(update.failed, members):
                raise
            self._membership.repair_group(members)
            update = self._update(members)
            update.send_whole(terms, before_finish=self._check_unchanged)
        self._sent.update_ids.add(update.update_id)
        return self._report(update, self.version, self._sent.label, before)

    def add(self, transport: Transport) -> SyncReport | None:
        """Take a receiver in, and bring it up to date where this sender has sent a version.

        What fails leaves the fleet as it was.
        """
        members = self._membership.add(transport)
        holds = all(
            member.version == self.version and member.last_finished in self._sent.update_ids
            for member in members
        )
        if not self.version or holds or self._sent.version != self.version:
            return None
        try:
            return self.resync(members)
        except BaseException:
            for member in members:
                self._membership.remove(member)
            raise

    def remove(self, target: str) -> None:
        """Let a receiver, or all of a server, go; it keeps what it holds."""
        members = self.members(target)
        if len(self.fleet.members) == len(members):
            raise ConfigError(f"{target} is the last receiver; close() the sender instead")
        try:
            self._membership.retry_pending(members, timeout_s=min(self._timeout_s, _GOODBYE_S))
        except WeightSyncError as exc:
            logger.warning("%s leaves without an answer: %s", target, exc)
        for member in members:
            self._membership.remove(member)

    def members(self, target: str) -> list[Member]:
        """Return the member of that name, or all of that server.

        Raises ConfigError listing the fleet.
        """
        return self._membership.find(target)

    @contextmanager
    def updating(
        self, version: int | None, label: str | None, *, rewind: bool, partial: bool
    ) -> Iterator[UpdateTransaction]:
        """An update whose tensors the caller sends: it commits, or is aborted on every receiver."""
        _check_version(version)
        before = (self.fleet.sent_nbytes, self.fleet.sent_messages)
        self._membership.ready()
        version, rewind = self._next(version, rewind=rewind)
        base = self.version if partial else None
        terms = StartTerms(
            version=version, label=label, rewind=rewind, partial=partial, base_version=base
        )
        update = self._update(self.fleet.members)
        try:
            update.start(terms)
            self._group.finish(self.version)
            yield update
            self._group.run_on_all(CheckMoved())  # raises where another rank's block has failed
            update.prepare()
            update.finish()
        except BaseException as exc:
            update.abort(f"the sender's block ended with {type(exc).__name__}")
            if isinstance(exc, WeightSyncError):
                self._membership.reconnect(update.failed)
                self._drop_all(update.failed)
            raise
        self._membership.version = version
        self._sent = LastVersion()  # what the caller sent cannot be sent again
        if update.failed and not self._membership.may_drop(update.failed):
            raise _left_behind(update.failed, version) from next(iter(update.failed.values()))
        self._drop_all(update.failed)
        update.last_report = self._report(update, version, label, before)

    def _reach_most(
        self, version: int | None, label: str | None, *, rewind: bool
    ) -> tuple[UpdateTransaction, StartTerms]:
        """Send until those who can go on hold the version; `failed` of the update are the others.

        After one was met again everyone gets another try, a few times. Without those who failed it
        goes on where they are dropped, or where there is no way back: an update in place was cut.
        """
        weights_id = secrets.token_hex(8)
        without: dict[Member, WeightSyncError] = {}
        tries, touched = 1, False
        while True:
            following, back = self._next(version, rewind=rewind)
            terms = self._terms(following, label, rewind=back, weights_id=weights_id)
            update = self._update([m for m in self.fleet.members if m not in without])
            try:
                update.send_whole(terms)
            except WeightSyncError as exc:
                touched = touched or update.touched
                again = self._try_again(update, exc, follows=version is None)
                if self._group.worker.stop.is_set():
                    raise
                if again and tries < _TRIES:
                    tries += 1
                    continue
                without.update(update.failed)
                if not self._may_go_on(update, without, touched=touched):
                    raise
                logger.warning("sending version %s without %s", terms.version, names(without))
                self._membership.repair_group([m for m in self.fleet.members if m not in without])
            else:
                ahead = any(isinstance(e, StaleVersionError) for e in update.failed.values())
                if ahead and version is None and tries < _TRIES:
                    # Those in place took a version that others had passed already.
                    tries, touched = tries + 1, True
                    self._membership.reconnect(update.failed)
                    continue
                update.failed.update(without)
                update.rule = "roll-forward" if touched else update.rule
                return update, terms

    def _next(self, version: int | None, *, rewind: bool) -> tuple[int, bool]:
        """The version to send, and whether that goes back, as after the greatest there is."""
        if version is not None:
            return version, rewind
        following = version_after(self.version)
        return following, rewind or following < self.version

    def _try_again(
        self, update: UpdateTransaction, failure: WeightSyncError, *, follows: bool
    ) -> bool:
        """Whether a second try may go better: someone was met again, or holds a newer version."""
        met = self._membership.reconnect(update.failed)
        return met or (follows and isinstance(failure, StaleVersionError))

    def _may_go_on(
        self, update: UpdateTransaction, without: Mapping[Member, WeightSyncError], *, touched: bool
    ) -> bool:
        rest = [member for member in self.fleet.members if member not in without]
        goes_on = touched or self._membership.may_drop(without)
        return bool(update.failed and rest and not update.finishing and goes_on)

    def _reach_rest(self, update: UpdateTransaction, terms: StartTerms) -> None:
        """The others hold the version: bring those who failed to it one by one, or drop them."""
        left: dict[Member, WeightSyncError] = {}
        waiting = deque(update.failed.items())
        while waiting:
            member, error = waiting.popleft()
            if member not in self.fleet.members:
                continue
            try:
                update.absorb(self._send_again(member, terms, error))
                update.rule = "roll-forward"
            except WorldSizeChangedError as exc:
                waiting += [(new, exc) for new in self._membership.meet_workers(member)]
            except WeightSyncError as exc:
                left[member] = exc
        stays = not self._membership.may_drop(left) or self._group.worker.stop.is_set()
        if left and stays:
            update.rule = "roll-forward"
            raise _left_behind(left, terms.version or 0) from next(iter(left.values()))
        self._drop_all(left)

    def _send_again(
        self, member: Member, terms: StartTerms, failure: WeightSyncError
    ) -> Mapping[Member, StepReply]:
        """Roll one receiver forward by itself: the others cannot go back.

        Where members are dropped, only one that was restarted meanwhile is.
        """
        finished = self._membership.retry_pending([member])
        if finished:
            return finished
        met = self._membership.reconnect({member: failure}, [member])
        met = met or isinstance(failure, WorldSizeChangedError)
        if self._membership.may_drop([member]) and not met:
            raise failure
        self._membership.end_open_update(member)
        self._membership.repair_group([member])
        again = self._update([member])
        try:
            again.send_whole(terms, before_finish=self._check_unchanged)
        except WeightSyncError:
            if member.unfinished is None:
                with suppress(WeightSyncError):
                    self._membership.end_open_update(member)
            raise
        self._sent.update_ids.add(again.update_id)
        return again.replies

    def _drop_all(self, failed: Mapping[Member, WeightSyncError]) -> None:
        """Where failed members are dropped: drop them, but never the last one."""
        if self._membership.may_drop(failed):
            for member, error in failed.items():
                self._membership.drop(member, error)

    def _terms(
        self, version: int, label: str | None, *, rewind: bool, weights_id: str | None
    ) -> StartTerms:
        return StartTerms(
            version=version,
            label=label,
            rewind=rewind,
            weights_id=weights_id,
            manifest_digest=self._group.manifest.digest,
        )

    def _update(self, members: Sequence[Member]) -> UpdateTransaction:
        return UpdateTransaction(
            self.fleet,
            self._group,
            self.paths,
            timeout_s=self._timeout_s,
            verify=self.verify,
            drops=self._drops,
            members=members,
        )

    def _check_unchanged(self, update: UpdateTransaction) -> None:
        self._sent.check_unchanged(update.table_digests, self.paths.layout)

    def _report(
        self, update: UpdateTransaction, version: int, label: str | None, before: tuple[int, int]
    ) -> SyncReport:
        """Add to the update's report what came before and after it in the same call."""
        connect_seconds = dict(self.paths.seconds) if self.paths.unreported else {}
        self.paths.unreported = False
        dropped, self._membership.dropped = self._membership.dropped, {}
        return dataclasses.replace(
            update.report(version, label, before),
            connect_seconds=connect_seconds,
            dropped=dropped,
        )


def _left_behind(failed: Mapping[Member, WeightSyncError], version: int) -> WeightSyncError:
    """Return the error of those who failed, saying that the others went on."""
    first = next(iter(failed.values()))
    reasons = "; ".join(str(error) for error in failed.values())
    told = copy.copy(first)
    told.args = (
        f"{names(failed)} failed and is left behind, while the others hold version {version}: "
        f"{reasons}; send_weights() tries again, sender.remove() lets a receiver go",
    )
    return told


def _check_version(version: object) -> None:
    if version is None:
        return
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise ConfigError(
            f"a version is an integer from 0 to {MAX_VERSION}, not {version!r}; a name goes into "
            "label="
        )


class UpdateLock:
    """Who sends now: the ring of a sender has one writer."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around a call. Raises ConfigError when one is at work."""
        if not self._taken.acquire(blocking=False):
            raise ConfigError(
                "this sender is at work already, in another thread or in an update() block around "
                "this call; use it from one thread, one update after another"
            )
        try:
            yield
        finally:
            self._taken.release()
