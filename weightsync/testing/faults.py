"""Faults of messages: from a script, or random from a seed; the same in every run."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.wire.messages import ALL_CALLS

Act = Literal["drop", "drop_reply", "repeat", "delay", "late", "kill", "kill_after"]
ACTS: tuple[Act, ...] = get_args(Act)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of some messages to one receiver.

    `act`:

    - `drop`: the message never arrives; its sender gets TransportTimeout.
    - `drop_reply`: the receiver handles the message, and the reply is lost: ConnectError.
    - `repeat`: the message arrives twice; its sender gets the second reply.
    - `delay`: the message arrives `seconds` later, or never where its sender waits for less.
    - `late`: its sender gets TransportTimeout; the message arrives once `after` more messages
      have been answered.
    - `kill`: the receiver dies before the message arrives: ConnectError, for every later message
      as well, until `FaultyTransport.revive`.
    - `kill_after`: the same, once the receiver has handled the message.

    `call` is the name of the call that fails (`finish_weight_update`), None for any. `nth` counts
    the messages of that call since the fault was added, from 1. `times` is the number of messages
    in a row that fail. Raises ConfigError for an unknown act or call, or a number out of range.
    """

    act: Act
    call: str | None = None
    nth: int = 1
    times: int = 1
    seconds: float = 0.0
    after: int = 1

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise ConfigError(f"a fault is one of {', '.join(ACTS)}, not {self.act!r}")
        if self.call is not None and self.call not in ALL_CALLS:
            raise ConfigError(f"there is no call {self.call!r}; known: {', '.join(ALL_CALLS)}")
        if self.nth < 1 or self.times < 1 or self.after < 1 or self.seconds < 0:
            raise ConfigError(f"nth, times and after count from 1, seconds from 0: {self}")


@dataclass(frozen=True, slots=True)
class Event:
    """One message that was sent: its call, its fault (None: none), and its error."""

    call: str
    act: Act | None = None
    error: WeightSyncError | None = None


class Faults:
    """The faults of one receiver's messages; all transports to it share them.

    A message without a fault of the `script` gets each act of `chances` with that probability
    (`{"drop": 0.05}`; at most 1 in sum). The same `seed` and order of messages give the same
    faults. `log` lists all messages so far. Thread-safe. Raises ConfigError for chances that are no
    probabilities, or that have no seed.
    """

    def __init__(
        self,
        *script: Fault,
        seed: int | str | None = None,
        chances: Mapping[Act, float] | None = None,
    ) -> None:
        self.log: list[Event] = []
        self._lock = threading.Lock()
        self._armed = [_Armed(fault) for fault in script]
        self._chances = dict(chances or {})
        self._random = random.Random(seed) if seed is not None else None  # noqa: S311  # no secret
        unknown = set(self._chances) - set(ACTS)
        total = sum(self._chances.values())
        if unknown or min(self._chances.values(), default=0) < 0 or total > 1:
            raise ConfigError(
                f"chances are probabilities of {', '.join(ACTS)} that add up to at most 1, "
                f"not {self._chances}"
            )
        if self._chances and self._random is None:
            raise ConfigError("chances need a seed, so that a failing run can be repeated")

    def add(self, *faults: Fault) -> None:
        """Add faults; they count messages from now on."""
        with self._lock:
            self._armed += [_Armed(fault) for fault in faults]

    def clear(self) -> None:
        """Remove all faults: every later message arrives."""
        with self._lock:
            self._armed.clear()
            self._chances.clear()

    @property
    def pending(self) -> list[Fault]:
        """The scripted faults that are not over: not all of their messages have failed."""
        with self._lock:
            return [armed.fault for armed in self._armed]

    def strike(self, call: str) -> Fault | None:
        """Return the fault of the next message, if any. Called by FaultyTransport once for each."""
        with self._lock:
            struck = [armed.fault for armed in self._armed if armed.meets(call)]
            self._armed = [armed for armed in self._armed if not armed.spent]
            return struck[0] if struck else self._by_chance()

    def note(self, event: Event) -> None:
        """Add to the log; called by FaultyTransport."""
        with self._lock:
            self.log.append(event)

    def _by_chance(self) -> Fault | None:
        if self._random is None or not self._chances:
            return None
        drawn = self._random.random()
        for act, chance in self._chances.items():
            drawn -= chance
            if drawn < 0:
                return Fault(act, seconds=0.01)
        return None


@dataclass(slots=True)
class _Armed:
    """A fault, and the number of messages of its call so far."""

    fault: Fault
    seen: int = 0

    def meets(self, call: str) -> bool:
        if self.fault.call not in (None, call):
            return False
        self.seen += 1
        return self.seen >= self.fault.nth

    @property
    def spent(self) -> bool:
        return self.seen >= self.fault.nth + self.fault.times - 1
