"""The lifecycle of an update on one receiver: a pure state machine without threads or tensors.

    READY(v) --start--> UPDATING --prepared--> PREPARED --finish--> READY(w)
       ^                    |                      |
       '------ ABORTING <---'----------------------'      in place and already dirty: TORN

A receiver that joins a fleet with a newer version than its own is CATCHING_UP instead of READY
until a full update commits: it may not generate. Nor may one that sleeps, in whichever state.

Callers hold their own lock. A method that raises has changed nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from enum import StrEnum
from typing import Literal, get_args

from weightsync.errors import NotReadyError, StaleVersionError, UpdateConflictError
from weightsync.specs import MAX_VERSION
from weightsync.wire.messages import SleepTag, StartTerms
from weightsync.wire.offers import UpdateId

ApplyChoice = Literal["auto", "staged", "in_place"]
"""How a receiver applies weights, as its user configures it."""


class State(StrEnum):
    """The state of a receiver."""

    READY = "READY"
    CATCHING_UP = "CATCHING_UP"
    UPDATING = "UPDATING"
    PREPARED = "PREPARED"
    ABORTING = "ABORTING"
    TORN = "TORN"


class Terms(StartTerms, frozen=True, kw_only=True):
    """The terms of the update `update_id`, which its sender sets when it starts it.

    `version` None means one more than the receiver's version. `base_version` applies to `partial`
    updates only. `weights_id` identifies the weights that are sent; the default is the update's id.
    """

    update_id: UpdateId


def version_after(version: int) -> int:
    """Return the version that follows `version`; after MAX_VERSION it is 1."""
    return version + 1 if version < MAX_VERSION else 1


_WAKE = "call send_weights(wake=True), or wake it first: POST /wake_up?tags=weights"


class UpdateLifecycle:
    """State and version of one receiver. Methods raise UpdateConflictError or StaleVersionError."""

    def __init__(self, version: int = 0) -> None:
        self.state = State.READY
        self.version = version
        self.label: str | None = None
        self.terms: Terms | None = None
        self.next_version = version
        self.dirty = False
        self.torn_by = ""
        self.is_discarded = False
        self.asleep: tuple[SleepTag, ...] = ()
        self.sleep_level = 0
        self.required_version = 0
        self.last_finished = ""
        self.weights_id = ""

    @property
    def update_id(self) -> str:
        """The open update, or the update that left the receiver TORN, or an empty string."""
        return self.terms.update_id if self.terms else self.torn_by

    @property
    def may_generate(self) -> bool:
        """Whether the weights in use are one complete, current version."""
        is_whole = not self.torn_by and not self.dirty and not self.required_version
        return is_whole and not self.asleep

    @property
    def refusal(self) -> str:
        """The reason why the weights in use must not be read; an empty string where they may."""
        if self.may_generate:
            return ""
        if self.asleep:
            return self._why_asleep()
        if self.required_version and not (self.torn_by or self.dirty):
            return (
                f"this receiver holds version {self.version} and joined a fleet that "
                f"holds version {self.required_version}; its sender has to bring it up to "
                "date: call send_weights() or resync()"
            )
        if self.is_discarded and not self.dirty:
            return (
                "the weights were discarded (WeightReceiver.discarded(), or sleep of level 2); a "
                "full update brings them back: call send_weights() again"
            )
        return (
            f"the weights are {self.state.value}: update {self.update_id} changed them "
            "and did not finish; a full update heals this: call send_weights() again"
        )

    def _why_asleep(self) -> str:
        if "weights" not in self.asleep:
            return (
                "the KV cache sleeps, and the weights are awake: POST /wake_up wakes it, and so "
                "does send_weights(wake=True) after its update"
            )
        gone = ", and the weights are gone" if self.is_discarded else ", and its weights are kept"
        return (
            f"this receiver sleeps (level {self.sleep_level}){gone}: send_weights(wake=True) wakes "
            "it and sends weights; POST /wake_up wakes it as it is"
        )

    def check_awake(self, step: str, advice: str = _WAKE) -> None:
        """Raise UpdateConflictError while the weights sleep: there is no memory to write to."""
        if "weights" in self.asleep:
            raise UpdateConflictError(
                f"{step} is refused, and nothing is changed: this receiver sleeps (level "
                f"{self.sleep_level}); {advice}",
                state=self.state.value,
                update_id=self.update_id,
            )

    def check_readable(self) -> None:
        """Raise NotReadyError unless the weights in use are one complete, current version."""
        if not self.may_generate:
            raise NotReadyError(self.refusal, state=self.state.value, update_id=self.update_id)

    def join(self, fleet_version: int) -> None:
        """Enter CATCHING_UP where `fleet_version` is newer than the version in use, else READY."""
        self.required_version = fleet_version if fleet_version > self.version else 0
        if self.state in (State.READY, State.CATCHING_UP):
            self._settle(State.READY)

    def start(self, terms: Terms) -> None:
        """READY, CATCHING_UP or TORN becomes UPDATING. Only the open update may start again."""
        if self.terms is not None:
            if self.terms.update_id == terms.update_id and self.state is State.UPDATING:
                return
            raise self._conflict(f"start of update {terms.update_id}")
        self.check_awake(f"update {terms.update_id}")
        self._check_version(terms)
        self.terms = terms
        self.next_version = version_after(self.version) if terms.version is None else terms.version
        self.state = State.UPDATING
        self.dirty = False

    def mark_dirty(self, update_id: str) -> None:
        """Mark the weights in use as dirty. Called before an update in place writes to them."""
        self.expect(update_id, State.UPDATING, step="load")
        self.dirty = True

    def prepared(self, update_id: str) -> None:
        """UPDATING becomes PREPARED: all tensors arrived and were checked."""
        self.expect(update_id, State.UPDATING, step="prepare")
        self.state = State.PREPARED

    def finish(self, update_id: str) -> None:
        """PREPARED becomes READY with the new version."""
        terms = self.expect(update_id, State.PREPARED, step="finish")
        self.version = self.next_version
        self.label = terms.label
        if not terms.partial:
            self.required_version = 0
        self.last_finished = update_id
        self.weights_id = terms.weights_id or update_id
        self._settle(State.READY)

    def begin_abort(self, update_id: str) -> bool:
        """Enter ABORTING; return False when no update is open. `end_abort` has to follow."""
        if self.terms is None:
            return False
        if self.terms.update_id != update_id:
            raise self._conflict(f"abort of update {update_id}")
        self.state = State.ABORTING
        return True

    def end_abort(self) -> None:
        """Return to READY(v), or enter TORN when weights in use are dirty.

        Called when the loader has stopped.
        """
        if self.state is not State.ABORTING or self.terms is None:
            raise self._conflict("end of an abort")
        was_torn = bool(self.torn_by)
        if self.dirty:
            self.torn_by, self.is_discarded = self.terms.update_id, False
        self._settle(State.TORN if self.dirty or was_torn else State.READY)

    def discarded(self) -> None:
        """Enter TORN: the weights in use are gone. Raises UpdateConflictError in an update.

        They have no id any more: nobody may take them for those that were sent under it.
        """
        if self.terms is not None:
            raise self._conflict("discarding the weights")
        self.torn_by, self.is_discarded = new_update_id("discarded"), True
        self.weights_id = ""
        self._settle(State.TORN)

    def fell_asleep(self, level: int) -> None:
        """All tags sleep. Level 2 discards the weights. Raises UpdateConflictError in an update."""
        if self.terms is not None:
            raise self._conflict("a sleep")
        if level > 1 and not self.is_discarded:
            self.discarded()
        self.asleep, self.sleep_level = get_args(SleepTag), level

    def woke_up(self, tags: Collection[str]) -> None:
        """These tags are awake."""
        self.asleep = tuple(tag for tag in self.asleep if tag not in tags)
        self.sleep_level = self.sleep_level if self.asleep else 0

    def _settle(self, state: State) -> None:
        self.state = State.CATCHING_UP if state is State.READY and self.required_version else state
        self.terms = None
        self.dirty = False
        if state is State.READY:
            self.torn_by, self.is_discarded = "", False

    def _check_version(self, terms: Terms) -> None:
        if terms.partial:
            if self.state is State.TORN:
                raise UpdateConflictError(
                    f"the receiver is TORN by update {self.torn_by}; only a full update heals it",
                    state=self.state,
                    update_id=self.torn_by,
                )
            if self.required_version:
                raise UpdateConflictError(
                    f"the receiver is CATCHING_UP: it holds version {self.version}, its fleet "
                    f"{self.required_version}; only a full update brings it up to date",
                    state=self.state,
                )
            if terms.base_version is not None and terms.base_version != self.version:
                raise StaleVersionError(
                    f"a partial update builds on version {terms.base_version}, but version "
                    f"{self.version} is held; send a full update",
                    held=self.version,
                    offered=terms.base_version,
                )
        if terms.version is None or terms.rewind:
            return
        heals = self.state is State.TORN and terms.version == self.version
        if terms.version <= self.version and not heals:
            raise StaleVersionError(held=self.version, offered=terms.version)

    def expect(self, update_id: str, state: State, *, step: str) -> Terms:
        """Return the terms of the open update, if it is this one in this state.

        Raises UpdateConflictError otherwise.
        """
        if self.terms is None or self.terms.update_id != update_id or self.state is not state:
            raise self._conflict(f"{step} of update {update_id}")
        return self.terms

    def _conflict(self, what: str) -> UpdateConflictError:
        holder = f", held by update {self.update_id}" if self.update_id else ", no update is open"
        return UpdateConflictError(
            f"{what} is refused: the receiver is {self.state.value} at version "
            f"{self.version}{holder}; finish or abort that update, or start a new one",
            state=self.state.value,
            update_id=self.update_id,
        )


def new_update_id(prefix: str = "anonymous") -> str:
    """Return a new unique id for an update."""
    return f"{prefix}-{secrets.token_hex(8)}"
