"""Coordinator: runs on rank 0, calls the fleet and directs the other ranks through an update."""

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
from weightsync.ranks.commands import CheckMoved
from weightsync.ranks.group import RankGroup
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
_REMOVE_S = 10.0
_TRIES = 4
"""How often an update is tried: a receiver that refused it may be reconnected in between."""


class Coordinator:
    """Updates a fleet from the source of the rank group. Used by one thread at a time.

    `version` is the newest version that the receivers hold.
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
        fleet.observers = group.observers
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
        """The newest version that the receivers hold."""
        return self._membership.version

    @property
    def connected(self) -> bool:
        """Whether every member is connected and can receive an update."""
        return self._membership.connected

    def connect(self) -> None:
        """Connect every member by a path, and recover the updates that a dead sender left open."""
        self._membership.connect()

    def disconnect(self, *, leaves: bool = False) -> None:
        """Unregister all memory. The next send connects again, unless the sender `leaves`."""
        self._membership.disconnect(leaves=leaves)

    def send(self, version: int | None, label: str | None, *, rewind: bool) -> SyncReport:
        """Send the source's current weights to every receiver, and return the report."""
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
            # The version of a member that failed is not the version of the fleet.
            self._membership.version = sent
        # A member that was unreachable holds a newer version, from another sender. The fleet has to
        # move past that version.
        return self._send(None, label, rewind=rewind, last=True)

    def resync(self, members: Sequence[Member]) -> SyncReport:
        """Send the current version to these members only, and return the report.

        Raises TransferError when the source has changed since that version was sent, and
        ConfigError when this sender did not send that version as a whole.
        """
        if not self.version:
            raise ConfigError("no version was sent yet: send_weights() updates every receiver")
        if self._sent.version != self.version:
            raise ConfigError(
                f"this sender has not sent version {self.version} as a whole, so it cannot send "
                "it again; send_weights() updates every receiver"
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
        """Add a receiver, and send it the current version where this sender has sent one.

        Returns the report, None where nothing had to be sent. An error leaves the fleet unchanged.
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
        """Remove a receiver, or all workers of a server, from the fleet. It keeps its weights.

        Raises ConfigError for the last receiver.
        """
        members = self.members(target)
        if len(self.fleet.members) == len(members):
            raise ConfigError(f"{target} is the last receiver; close() the sender instead")
        try:
            self._membership.retry_pending(members, timeout_s=min(self._timeout_s, _REMOVE_S))
        except WeightSyncError as exc:
            logger.warning("%s is removed and did not reply: %s", target, exc)
        for member in members:
            self._membership.remove(member)

    def members(self, target: str) -> list[Member]:
        """Return the member of that name, or all workers of that server.

        Raises ConfigError that lists the fleet, where there is none.
        """
        return self._membership.find(target)

    @contextmanager
    def updating(
        self, version: int | None, label: str | None, *, rewind: bool, partial: bool
    ) -> Iterator[UpdateTransaction]:
        """Open an update whose tensors the caller sends; it commits or aborts on every receiver."""
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
            self._group.run_on_all(CheckMoved())  # raises where the block of another rank failed
            update.prepare()
            update.finish()
        except BaseException as exc:
            update.abort(f"the sender's block ended with {type(exc).__name__}")
            if isinstance(exc, WeightSyncError):
                self._membership.reconnect(update.failed)
                self._drop_all(update.failed)
            raise
        self._membership.version = version
        self._sent = LastVersion()  # the caller's tensors cannot be sent again
        if update.failed and not self._membership.may_drop(update.failed):
            raise _partial_failure(update.failed, version) from next(iter(update.failed.values()))
        self._drop_all(update.failed)
        update.last_report = self._report(update, version, label, before)

    def _reach_most(
        self, version: int | None, label: str | None, *, rewind: bool
    ) -> tuple[UpdateTransaction, StartTerms]:
        """Send until all reachable members hold the version; `failed` of the update has the others.

        After a member was reconnected, the update is tried again with all members, up to _TRIES
        times. It continues without failed members where these are dropped, or where members cannot
        roll back because an update in place was interrupted.
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
                    # In-place members committed a version that is not newer than that of others.
                    tries, touched = tries + 1, True
                    self._membership.reconnect(update.failed)
                    continue
                update.failed.update(without)
                update.rule = "roll-forward" if touched else update.rule
                return update, terms

    def _next(self, version: int | None, *, rewind: bool) -> tuple[int, bool]:
        """Return the version to send, and whether it is a rewind, as after MAX_VERSION."""
        if version is not None:
            return version, rewind
        following = version_after(self.version)
        return following, rewind or following < self.version

    def _try_again(
        self, update: UpdateTransaction, failure: WeightSyncError, *, follows: bool
    ) -> bool:
        """Whether another try may succeed: a member was reconnected, or holds a newer version."""
        reconnected = self._membership.reconnect(update.failed)
        return reconnected or (follows and isinstance(failure, StaleVersionError))

    def _may_go_on(
        self, update: UpdateTransaction, without: Mapping[Member, WeightSyncError], *, touched: bool
    ) -> bool:
        rest = [member for member in self.fleet.members if member not in without]
        goes_on = touched or self._membership.may_drop(without)
        return bool(update.failed and rest and not update.finishing and goes_on)

    def _reach_rest(self, update: UpdateTransaction, terms: StartTerms) -> None:
        """Update each failed member by itself, or drop it: the others hold the version already."""
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
                waiting += [(new, exc) for new in self._membership.connect_workers(member)]
            except WeightSyncError as exc:
                left[member] = exc
        stays = not self._membership.may_drop(left) or self._group.worker.stop.is_set()
        if left and stays:
            update.rule = "roll-forward"
            raise _partial_failure(left, terms.version or 0) from next(iter(left.values()))
        self._drop_all(left)

    def _send_again(
        self, member: Member, terms: StartTerms, failure: WeightSyncError
    ) -> Mapping[Member, StepReply]:
        """Roll one receiver forward by itself, because the others cannot roll back.

        Where members are dropped, only a receiver that was restarted meanwhile is rolled forward.
        Raises `failure` for any other.
        """
        finished = self._membership.retry_pending([member])
        if finished:
            return finished
        reconnected = self._membership.reconnect({member: failure}, [member])
        reconnected = reconnected or isinstance(failure, WorldSizeChangedError)
        if self._membership.may_drop([member]) and not reconnected:
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
        """Drop failed members, where that is enabled and others remain."""
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
        """Return the update's report, with connect times and dropped members of the same call."""
        connect_seconds = dict(self.paths.seconds) if self.paths.unreported else {}
        self.paths.unreported = False
        dropped, self._membership.dropped = self._membership.dropped, {}
        return dataclasses.replace(
            update.report(version, label, before),
            connect_seconds=connect_seconds,
            dropped=dropped,
        )


def _partial_failure(failed: Mapping[Member, WeightSyncError], version: int) -> WeightSyncError:
    """Return the error of the failed members, which says that the others hold the version."""
    first = next(iter(failed.values()))
    reasons = "; ".join(str(reason) for reason in failed.values())
    error = copy.copy(first)
    error.args = (
        f"{names(failed)} failed and is left behind, while the others hold version {version}: "
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


class UpdateLock:
    """Allows one call of a sender at a time, because its ring has one writer."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock during a call. Raises ConfigError when another call holds it."""
        if not self._taken.acquire(blocking=False):
            raise ConfigError(
                "this sender is in use already, in another thread or in an update() block around "
                "this call; use it from one thread, one update after another"
            )
        try:
            yield
        finally:
            self._taken.release()
