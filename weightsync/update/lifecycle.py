"""The life of an update inside one receiver: a pure state machine, no threads, no tensors.

    READY(v) --start--> UPDATING --prepared--> PREPARED --finish--> READY(w)
       ^                    |                      |
       '------ ABORTING <---'----------------------'      in place and already touched: TORN

A receiver that holds an older version than the fleet that it is taken into is JOINING instead of
READY until a whole update commits: it may not generate.

Callers hold their own lock; every method either makes the whole step or raises and changes nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from weightsync.errors import StaleVersionError, UpdateConflictError
from weightsync.specs import MAX_VERSION

ApplyChoice = Literal["auto", "staged", "in_place"]
"""How a receiver is told to put weights to use."""


class State(StrEnum):
    """What a receiver is doing."""

    READY = "READY"
    JOINING = "JOINING"
    UPDATING = "UPDATING"
    PREPARED = "PREPARED"
    ABORTING = "ABORTING"
    TORN = "TORN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a sender asks for when it starts an update.

    `version` None means one more than the version held. `base_version` is looked at only for
    `partial` updates. `weights_id` names what is sent; empty, the update's id does.
    """

    update_id: str
    version: int | None = None
    label: str | None = None
    base_version: int | None = None
    partial: bool = False
    rewind: bool = False
    weights_id: str = ""


def version_after(version: int) -> int:
    """The version that follows; after the greatest, which nobody reaches by counting, it is 1."""
    return version + 1 if version < MAX_VERSION else 1


class UpdateLifecycle:
    """State and version of one receiver; raises UpdateConflictError or StaleVersionError."""

    def __init__(self, version: int = 0) -> None:
        self.state = State.READY
        self.version = version
        self.label: str | None = None
        self.terms: Terms | None = None
        self.next_version = version
        self.dirty = False
        self.torn_by = ""
        self.required_version = 0
        self.last_finished = ""
        self.weights_id = ""

    @property
    def update_id(self) -> str:
        """The update that holds the receiver, or the one that tore it, or nothing."""
        return self.terms.update_id if self.terms else self.torn_by

    @property
    def may_generate(self) -> bool:
        """Whether the weights in use are one whole version right now."""
        return not self.torn_by and not self.dirty and not self.required_version

    def join(self, fleet_version: int) -> None:
        """READY becomes JOINING where the fleet holds a newer version, and READY where not (0)."""
        self.required_version = fleet_version if fleet_version > self.version else 0
        if self.state in (State.READY, State.JOINING):
            self._settle(State.READY)

    def start(self, terms: Terms) -> None:
        """READY, JOINING or TORN becomes UPDATING. The same update may start again; no other."""
        if self.terms is not None:
            if self.terms.update_id == terms.update_id and self.state is State.UPDATING:
                return
            raise self._conflict(f"start of update {terms.update_id}")
        self._check_version(terms)
        self.terms = terms
        self.next_version = version_after(self.version) if terms.version is None else terms.version
        self.state = State.UPDATING
        self.dirty = False

    def touch(self, update_id: str) -> None:
        """In place: the first byte of the weights in use is about to change."""
        self._expect(update_id, State.UPDATING, step="load")
        self.dirty = True

    def prepared(self, update_id: str) -> None:
        """UPDATING becomes PREPARED: everything arrived and was checked."""
        self._expect(update_id, State.UPDATING, step="prepare")
        self.state = State.PREPARED

    def finish(self, update_id: str) -> None:
        """PREPARED becomes READY with the new version."""
        terms = self._expect(update_id, State.PREPARED, step="finish")
        self.version = self.next_version
        self.label = terms.label
        if not terms.partial:
            self.required_version = 0
        self.last_finished = update_id
        self.weights_id = terms.weights_id or update_id
        self._settle(State.READY)

    def begin_abort(self, update_id: str) -> bool:
        """Enter ABORTING; False when there is nothing to abort. Call `end_abort` afterwards."""
        if self.terms is None:
            return False
        if self.terms.update_id != update_id:
            raise self._conflict(f"abort of update {update_id}")
        self.state = State.ABORTING
        return True

    def end_abort(self) -> None:
        """The loader has stopped: back to READY(v), or TORN when weights in use were touched."""
        if self.state is not State.ABORTING or self.terms is None:
            raise self._conflict("end of an abort")
        was_torn = bool(self.torn_by)
        if self.dirty:
            self.torn_by = self.terms.update_id
        self._settle(State.TORN if self.dirty or was_torn else State.READY)

    def _settle(self, state: State) -> None:
        self.state = State.JOINING if state is State.READY and self.required_version else state
        self.terms = None
        self.dirty = False
        if state is State.READY:
            self.torn_by = ""

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
                    f"the receiver is JOINING: it holds version {self.version}, its fleet "
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

    def _expect(self, update_id: str, state: State, *, step: str) -> Terms:
        if self.terms is None or self.terms.update_id != update_id or self.state is not state:
            raise self._conflict(f"{step} of update {update_id}")
        return self.terms

    def _conflict(self, what: str) -> UpdateConflictError:
        holder = f", held by update {self.update_id}" if self.update_id else ", no update is open"
        return UpdateConflictError(
            f"{what} does not fit: the receiver is {self.state.value} at version "
            f"{self.version}{holder}; finish or abort that update, or start a new one",
            state=self.state.value,
            update_id=self.update_id,
        )


def new_update_id(prefix: str = "anonymous") -> str:
    """Return a fresh id for an update."""
    return f"{prefix}-{secrets.token_hex(8)}"
