"""Rank 0 of a trainer: it alone talks to the fleet, and leads the others through every update."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from weightsync.backends.ipc_sender import IpcOptions
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    StaleVersionError,
    TransferError,
    UnknownSenderError,
    WeightSyncError,
)
from weightsync.report import SyncReport
from weightsync.sending.commands import Look
from weightsync.sending.ensemble import Ensemble
from weightsync.sending.fleet import Fleet, Member, failures, raise_first
from weightsync.sending.outgoing import Update
from weightsync.sending.roads import Roads, meet_fleet
from weightsync.sending.takeover import end_orphans
from weightsync.transports.base import Transport
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Request,
    StartTerms,
    Status,
    StatusRequest,
)

logger = logging.getLogger(__name__)

OnFailure = Literal["abort", "drop"]
_STATUS_TIMEOUT_S = 10.0


class Lead:
    """Keeps a fleet in step with the ensemble's source. Used by one thread at a time.

    `version` is the last version that receivers hold.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        fleet: Fleet,
        options: IpcOptions,
        *,
        backend: str,
        on_failure: OnFailure,
    ) -> None:
        self.fleet = fleet
        self.roads = Roads(ensemble, fleet, options, backend=backend)
        self.version = 0
        self.verify = True
        self._ensemble = ensemble
        self._timeout_s = options.timeout_s
        self._drops = on_failure == "drop"
        self._connected = False
        self._fresh = False
        self._dropped: dict[str, str] = {}
        self._sent_digests: list[str | None] = []

    @property
    def connected(self) -> bool:
        """Whether every member has what it needs for an update."""
        return self._connected

    def connect(self) -> None:
        """Take a road to everyone, and take over what a dead sender left."""
        answers = meet_fleet(self.fleet, self._timeout_s)
        self._learn([answer.status.version for answer in answers])
        self.roads.seconds.clear()
        self.roads.take(self.version)
        self._connected = self._fresh = True
        try:
            self._learn(end_orphans(self.fleet, answers, self._timeout_s))
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Unregister all memory; the next send connects."""
        if self._connected:
            self._connected = False
            self.roads.withdraw()

    def send(self, version: int | None, label: str | None, *, rewind: bool) -> SyncReport:
        """Bring every receiver to the source's current weights."""
        self._ready()
        asked = version
        tried = False
        while True:
            version = self.version + 1 if asked is None else asked
            terms = StartTerms(
                version=version,
                label=label,
                rewind=rewind,
                manifest_digest=self._ensemble.manifest.digest,
            )
            update = self._update(self.fleet.members)
            try:
                update.send_whole(terms)
            except WeightSyncError as exc:
                met = self._recover(exc)
                follows = asked is None and isinstance(exc, StaleVersionError)
                stopped = self._ensemble.feeder.stop.is_set()
                if not (tried or stopped) and (met or follows):
                    tried = True
                    continue
                if stopped:
                    raise
                update = self._go_on_without(update, terms, exc)
            return self._close_round(update, terms, label)

    def resync(self, member: Member) -> SyncReport:
        """Send the current version to one member that does not hold it.

        Raises TransferError when the source has changed since that version was sent.
        """
        if not self.version:
            raise ConfigError("no version was sent yet: send_weights() brings everyone up to date")
        self._ready()
        terms = StartTerms(
            version=self.version, rewind=True, manifest_digest=self._ensemble.manifest.digest
        )
        update = self._update([member])
        update.send_whole(terms, before_finish=self._check_unchanged)
        return self._report(update, self.version, None)

    def add(self, transport: Transport) -> SyncReport | None:
        """Take a receiver in, and bring it up to date where a version was sent."""
        self._ready()
        member = self.fleet.add(transport)
        try:
            meet_fleet(self.fleet, self._timeout_s, newcomers=[member])
            if not self.roads.extend(member, self.version):
                self.disconnect()
                self.connect()
        except BaseException:
            self.fleet.remove(member)
            raise
        behind = self.version and member.version != self.version
        return self.resync(member) if behind else None

    def remove(self, target: str) -> None:
        """Let a receiver go; it keeps what it holds."""
        member = self.member(target)
        if len(self.fleet.members) == 1:
            raise ConfigError(f"{target} is the last receiver; close() the sender instead")
        self._let_go(member)

    def member(self, target: str) -> Member:
        """Return the member of that name. Raises ConfigError listing the fleet."""
        for member in self.fleet.members:
            if member.target == target:
                return member
        names = ", ".join(member.target for member in self.fleet.members)
        raise ConfigError(f"no receiver {target} in the fleet: {names}")

    @contextmanager
    def updating(
        self, version: int | None, label: str | None, *, rewind: bool, partial: bool
    ) -> Iterator[Update]:
        """An update whose tensors the caller sends: it commits, or is aborted on every receiver."""
        self._ready()
        version = self.version + 1 if version is None else version
        base = self.version if partial else None
        terms = StartTerms(
            version=version, label=label, rewind=rewind, partial=partial, base_version=base
        )
        update = self._update(self.fleet.members)
        try:
            update.start(terms)
            self._ensemble.done(self.version)
            yield update
            self._ensemble.tell(Look())  # raises where another rank's block has failed
            update.prepare()
            update.finish()
        except BaseException as exc:
            update.abort(f"the sender's block ended with {type(exc).__name__}")
            if isinstance(exc, WeightSyncError):
                self._recover(exc)
            raise
        self.version = version
        self._sent_digests = []
        for member, error in list(update.failed.items()):
            if not self._drops:
                raise _left_behind(member, error, version) from error
            self._drop(member, error)
        update.last_report = self._report(update, version, label)

    def _ready(self) -> None:
        """Connect after `release`, or where registered memory moved; end what is still open."""
        if self._connected and any(told.moved for told in self._ensemble.tell(Look())):
            self.disconnect()
        if not self._connected:
            self.connect()
        for member in list(self.fleet.members):
            self._settle(member)
        if self.roads.broken:
            self._mend()

    def _update(self, members: Sequence[Member]) -> Update:
        return Update(
            self.fleet,
            self._ensemble,
            self.roads,
            timeout_s=self._timeout_s,
            verify=self.verify,
            drops=self._drops,
            members=members,
        )

    def _close_round(self, update: Update, terms: StartTerms, label: str | None) -> SyncReport:
        """Those who could go on did; bring the others up to date, or let them go."""
        version = terms.version or 0
        self.version = version
        self._sent_digests = update.table_digests
        for member, error in list(update.failed.items()):
            if self._drops:
                self._drop(member, error)
            else:
                self._send_again(member, update, terms, error)
        return self._report(update, version, label)

    def _go_on_without(self, cut: Update, terms: StartTerms, failure: WeightSyncError) -> Update:
        """Send to all but those who failed, where they are dropped or there is no way back."""
        blamed = dict(cut.failed)
        rest = [member for member in self.fleet.members if member not in blamed]
        if not blamed or not rest or not (self._drops or cut.touched):
            raise failure
        if cut.finishing:
            if not self._drops:
                raise failure
            return cut
        logger.warning("sending version %s without %s", terms.version, _names(blamed))
        if self.roads.broken:
            raise_first(self.roads.mend(self.version, rest), "rendezvous")
        update = self._update(rest)
        update.rule = "roll-forward" if cut.touched else update.rule
        update.send_whole(terms)
        update.failed.update(blamed)
        return update

    def _send_again(
        self, member: Member, update: Update, terms: StartTerms, failure: WeightSyncError
    ) -> None:
        """Roll one receiver forward by itself: the others cannot go back."""
        update.rule = "roll-forward"
        try:
            self._recover(failure, [member])
            if self.roads.broken:
                raise_first(self.roads.mend(self.version), "rendezvous")
            again = self._update([member])
            again.send_whole(terms)
        except WeightSyncError as exc:
            raise _left_behind(member, exc, self.version) from failure
        update.absorb(again)

    def _drop(self, member: Member, reason: WeightSyncError) -> None:
        logger.warning("%s is dropped from the fleet: %s", member.target, reason)
        self._dropped[member.target] = str(reason)
        self._let_go(member)

    def _let_go(self, member: Member) -> None:
        self.roads.withdraw([member])
        self.roads.forget(member)
        self.fleet.remove(member)

    def _mend(self) -> None:
        """Make the private group anew; who cannot join is dropped, or named."""
        while True:
            failed = failures(self.roads.mend(self.version))
            if not failed:
                return
            if not self._drops or len(failed) == len(self.fleet.members):
                raise_first(failed, "rendezvous")
            for answer in failed:
                self._drop(answer.member, answer.error or TransferError("it did not join"))

    def _settle(self, member: Member) -> None:
        """Tell a member again what it could not be told the last time."""
        requests: list[Request] = []
        if member.unfinished is not None:
            requests.append(FinishRequest(update_id=member.unfinished))
        if member.unaborted is not None:
            requests.append(AbortRequest(update_id=member.unaborted, reason="as told before"))
        for request in requests:
            answer = self.fleet.ask(request, timeout_s=self._timeout_s, members=[member])[0]
            if answer.error is not None and not isinstance(answer.error, ProtocolError):
                if self._drops and len(self.fleet.members) > 1:
                    self._drop(member, answer.error)
                    return
                raise answer.error
            if answer.error is None:
                self._learn([answer.step.version])
        member.unfinished = member.unaborted = None

    def _recover(self, failure: WeightSyncError, members: Sequence[Member] | None = None) -> bool:
        """After a failed update: learn what receivers hold, connect those who do not know us.

        Returns whether there were such.
        """
        timeout_s = min(self._timeout_s, _STATUS_TIMEOUT_S)
        answers = self.fleet.ask(StatusRequest(), timeout_s=timeout_s, members=members)
        known = [(a.member, a.reply) for a in answers if isinstance(a.reply, Status)]
        self._learn([status.version for _, status in known])
        unknown = isinstance(failure, UnknownSenderError)
        strangers = [m for m, status in known if unknown or status.instance != m.instance]
        if not strangers or not self._connected:
            return False
        logger.warning("connecting again: %s", _names(strangers))
        self.roads.offer(strangers, self.version)
        return True

    def _learn(self, versions: Sequence[int]) -> None:
        self.version = max([self.version, *versions])

    def _check_unchanged(self, update: Update) -> None:
        """What goes out again as a version must be what went out as that version before."""
        before, now = self._sent_digests, update.table_digests
        comparable = [
            (a, b) for a, b in zip(before, now, strict=False) if a is not None and b is not None
        ]
        if any(a != b for a, b in comparable):
            raise TransferError(
                f"the weights have changed since version {self.version} was sent; "
                "send_weights() brings everyone up to date"
            )

    def _report(self, update: Update, version: int, label: str | None) -> SyncReport:
        connect_seconds = dict(self.roads.seconds) if self._fresh else {}
        dropped, self._dropped, self._fresh = self._dropped, {}, False
        return dataclasses.replace(
            update.report(version, label), connect_seconds=connect_seconds, dropped=dropped
        )


def _names(members: Iterable[Member]) -> str:
    return ", ".join(member.target for member in members)


def _left_behind(member: Member, error: WeightSyncError, version: int) -> WeightSyncError:
    """Return the error of one receiver, saying that the others went on."""
    return type(error)(
        f"{member.target} failed and is left behind, while the others hold version {version}: "
        f"{error}; send_weights() tries it again, sender.remove() lets it go"
    )
