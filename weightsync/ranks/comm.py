"""Collectives between the ranks of one trainer, in a Gloo group apart from the trainer's own."""

from __future__ import annotations

import hashlib
import logging
import operator
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from traceback import walk_tb
from typing import Any, NoReturn, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    RemoteError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.ranks.watch import LEAST_SILENCE_S, RankWatch, WatchOutcome
from weightsync.runtime.interpreter_exit import TorchCalls, never_destroy
from weightsync.specs import Manifest
from weightsync.wire.problem import Problem, from_problem, to_problem

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMPLETE = "complete"
NAMING_TIMEOUT_S = 3.0
JOIN_TIMEOUT_S = 300.0
_POLL_S = 0.005
_MAX_POLL_S = 0.1
_CANCEL_POLL_S = 0.2
_LOST = "lost"
_DIED = "died"
_STOPPED = "stopped"
_LEFT = "left "
_NOTES = "notes"
_STORE = "the process that holds the trainer's store (rank 0, or torchrun's agent)"
_WAIT_SLICE = timedelta(seconds=0.2)
_NO_MESSAGE = b"\xc1"  # the one byte with which nothing begins in MessagePack
_KEPT = 4
"""Words, and collectives beside them, whose objects are kept after their end.

A thread of Gloo would free their tensors if it were the last to hold them. For that it takes the
interpreter's lock, which aborts the process while the interpreter exits.
"""

# Every call begins with parts of the same size: the call of each rank, and its payload where that
# is short. Gloo sends 1,000 bytes as fast as 8.
_CALLS = ("agree", "failed agree", "exchange", "broadcast", "long replies")
_BRINGING_ALL = (("exchange", {"exchange"}), ("long replies", {"broadcast"}))
"""Calls of rank 0, and of the others, in which all get the payloads of all."""
MAX_RANKS = 32_767
_FIRST_NBYTES = 1024
_HEAD = struct.Struct("<Bq")
_INLINE_NBYTES = _FIRST_NBYTES - _HEAD.size

_Post = Callable[[], dist.Work]
"""Posts a collective: a partial of a method of the group, with no line of Python. See `_post`."""


def _post(kept: list[dist.Work], *posts: _Post) -> None:
    """Post collectives, and keep their objects: all of them or, at an interrupt (Ctrl-C), none.

    No line of Python runs in between, after which a rank could not tell what it has posted.
    """
    kept.extend(map(operator.call, posts))


class _Word:
    """One word: a call in which every rank gives its part to all, by way of rank 0.

    `works` has the collectives of it that this rank has posted: the gather of the parts, their
    broadcast and, for payloads that are too long for a part, a third one. Rank 0 posts the first
    alone, and the others once it has all parts. Another rank posts the first two at once, and the
    third when it has the parts. `parts` is `uint8[ranks, nbytes]`, `bodies` the buffers of the
    third. `said` has the call of each rank, the length of its payload, and the payload where that
    is short. `is_over`: this rank, not 0, has received all. `before` is the payload of rank 0's
    last broadcast before this word.
    """

    def __init__(self, number: int, before: bytes = b"") -> None:
        self.number = number
        self.before = before
        self.call = ""
        self.payload = b""
        self.parts = torch.empty(0)
        self.works: list[dist.Work] = []
        self.said: list[tuple[str, int, bytes]] = []
        self.bodies: list[torch.Tensor] = []
        self.is_over = False

    @property
    def calls(self) -> list[str]:
        """The call of each rank."""
        return [call for call, _, _ in self.said]

    @property
    def payloads(self) -> list[bytes]:
        """The payload of each rank; b"" for a long one that its call does not bring."""
        if len(self.bodies) <= 1:
            short = [inline for _, _, inline in self.said]
            return [*map(_bytes_of, self.bodies), *short[len(self.bodies) :]]
        pairs = zip(self.bodies, self.said, strict=True)
        return [_bytes_of(body[:length]) for body, (_, length, _) in pairs]

    def read(self, group: Any, *, leads: bool) -> list[_Post]:
        """Read the parts; return what brings the payloads that are too long for them, if any."""
        self.said = list(map(_read_first_part, self.parts))
        calls, length = self.calls, max(length for _, length, _ in self.said)
        if all(call == "broadcast" for call in calls):
            length = self.said[0][1]
            if length > _INLINE_NBYTES:
                self.bodies = [_tensor_of(self.payload if leads else b"", length)]
                return [partial(group.broadcast, self.bodies[0], 0)]
        elif length > _INLINE_NBYTES and (calls[0], set(calls[1:])) in _BRINGING_ALL:
            own = _tensor_of(self.payload, length)
            self.bodies = [torch.empty_like(own) for _ in calls]
            return [partial(group.allgather, [self.bodies], [own])]
        return []


class StoreRendezvous:
    """One rendezvous of all ranks. `store` is a prefix of the trainer's store for it alone.

    Every rank counts its own rendezvous, and the outcome of each is set once in the store. So a
    rank that arrives after the others gave up continues with their next rendezvous.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self.store = store
        self._rank = rank
        self._size = size

    @classmethod
    def arrive(
        cls, store: Store, *, rank: int, size: int, timeout_s: float
    ) -> tuple[Self, list[int]]:
        """Wait for all ranks; return the rendezvous, and the ranks that did not arrive in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            number = store.add(f"rendezvous/{rank}", 1)
            found = cls(PrefixStore(f"rendezvous-{number}", store), rank=rank, size=size)
            if found._enter() in (b"", COMPLETE.encode()) or time.monotonic() >= deadline:
                return found, found._wait(deadline)

    def missing_survivors(self, timeout_s: float) -> list[int]:
        """Return the ranks that do not report alive within `timeout_s`. Called after a loss."""
        self.report_alive()
        return self._missing("survivor", time.monotonic() + timeout_s)

    def report_alive(self) -> None:
        """Report in the store that this rank is alive, for ranks that have noticed a loss."""
        self.store.set(f"survivor/{self._rank}", "1")

    def _enter(self) -> bytes:
        self.store.set(f"rank/{self._rank}", "1")
        if self.store.add("arrived", 1) == self._size:
            return self._set_outcome(COMPLETE)
        return self.store.get("outcome") if self.store.check(["outcome"]) else b""

    def _set_outcome(self, outcome: str) -> bytes:
        """Set the outcome, unless it is set; return the outcome that was set first."""
        return self.store.compare_set("outcome", "", outcome)

    def _wait(self, deadline: float) -> list[int]:
        if _poll(lambda: self.store.check(["outcome"]), deadline):
            outcome = self.store.get("outcome")
        else:
            missing = self._missing("rank", deadline)
            outcome = self._set_outcome(" ".join(map(str, missing)) or COMPLETE)
        return [] if outcome == COMPLETE.encode() else [int(n) for n in outcome.split()]

    def _missing(self, kind: str, deadline: float) -> list[int]:
        """Return the ranks that set no key of this kind by the deadline; [] as soon as all did."""
        left = [rank for rank in range(self._size) if rank != self._rank]

        def all_here() -> bool:
            left[:] = [rank for rank in left if not self.store.check([f"{kind}/{rank}"])]
            return not left

        _poll(all_here, deadline)
        return left


def _poll(ready: Callable[[], bool], deadline: float) -> bool:
    pause = _POLL_S
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _MAX_POLL_S)
    return True


class RankComm:
    """Collectives of a trainer's ranks. Every rank calls the same methods in the same order.

    `rank` and `size` are those of the trainer's process group; messages name a rank by its global
    rank (`names`). `store` is for short notes, None where there is one rank. `process_group` is the
    trainer's, None for the default one. `calls` are those in progress.

    An interrupt (Ctrl-C) may end a call at any point: what this rank has posted of its word is
    known, and `words` tells whether the word counts as said. Then this rank may make the next call;
    a `broadcast` that it has begun, not on rank 0, is resumed by its next one. What it cannot go on
    with, an `exchange` for instance, breaks the group as the loss of a rank does: see `leave`.

    Different calls on the ranks raise ProtocolError on all of them. If a rank dies, is stopped for
    `watch.limit_s`, or does not call within the group's timeout, all others raise a TransferError
    that names it. The group is then broken: every further call raises TransferError.
    """

    def __init__(
        self,
        group: Any,  # dist.ProcessGroupGloo, whose methods torch's stub lacks
        rendezvous: StoreRendezvous,
        *,
        rank: int,
        names: Sequence[int],
        timeout_s: float,
        watch: RankWatch,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.process_group = process_group
        self.size = len(names)
        self.names = tuple(names)
        self.timeout_s = timeout_s
        self.store: Store | None = PrefixStore(_NOTES, rendezvous.store)
        self._group = group
        self._watch: RankWatch | None = watch
        weakref.finalize(self, watch.close)
        self._kept: deque[object] = deque(maxlen=_KEPT)
        self._word = _Word(1)
        self._rendezvous = rendezvous
        self._broken: str | None = None
        self._broken_as: type[TransferError] = TransferError
        self._order = 0
        self.calls = TorchCalls()

    @property
    def words(self) -> int:
        """How many words this rank has said, or heard in a `broadcast` of rank 0.

        Equal on ranks that are in the same step, also after an interrupt.
        """
        return self._word.number if self._is_said(self._word) else self._word.number - 1

    @property
    def heard(self) -> bytes:
        """The payload that rank 0 has broadcast last, as far as this rank has heard it."""
        word = self._word
        is_heard = self._is_said(word) and word.calls[:1] == ["broadcast"]
        return word.payloads[0] if is_heard else word.before

    def _is_said(self, word: _Word) -> bool:
        waits_for_rank_0 = self.rank > 0 and word.call == "broadcast"
        return word.is_over if waits_for_rank_0 else len(word.works) > 1

    @property
    def broken(self) -> bool:
        """Whether a rank was lost. Every further call then raises."""
        return self._broken is not None

    def limit(self, timeout_s: float) -> None:
        """Set the timeout of all further calls. Not collective; every rank calls it."""
        self.timeout_s = timeout_s
        if self._group is not None:
            self._group.set_timeout(timedelta(seconds=timeout_s))

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order; lengths may differ. Collective."""
        with self.calls.inside():
            return self._meet("exchange", payload)

    def broadcast(self, payload: bytes | None = None, *, reply: bytes = b"") -> bytes:
        """Return the payload of rank 0; the other ranks pass None, and may `reply`. Collective.

        They wait for rank 0 up to the group's timeout. What they reply is lost unless rank 0 calls
        `collect` before. Raises ConfigError without a payload on rank 0.
        """
        if self.rank == 0 and payload is None:
            raise ConfigError("rank 0 has to give the payload that it broadcasts")
        with self.calls.inside():
            said = payload if self.rank == 0 and payload is not None else reply
            return self._meet("broadcast", said)[0]

    def collect(self, own: bytes) -> list[bytes]:
        """Return what the ranks reply, in rank order, `own` for rank 0. On rank 0 alone.

        The others reply in the `broadcast` with which rank 0 has to go on. Raises as `exchange`
        where they are in another call.
        """
        with self.calls.inside():
            self._wait(self._begin_gather)
            said = list(map(_read_first_part, self._word.parts[1:]))
            if any(call != "broadcast" for call, _, _ in said):
                self._meet("broadcast")  # raises, there too
            if any(length > _INLINE_NBYTES for _, length, _ in said):
                return [own, *self._meet("long replies")[1:]]
            return [own, *(inline for _, _, inline in said)]

    def expect(self, reply: bytes = b"") -> None:
        """Begin the next `broadcast`: give the `reply`, and wait for rank 0 without blocking.

        The rank may do other work meanwhile, but no other call. Rank 0 begins to wait for replies.
        """
        if self._broken is not None or self._group is None:
            return
        if self.rank == 0:
            self._begin_gather(self._group)
        else:
            with suppress(TransferError):  # the next call raises it
                self._begin(self._group, "broadcast", reply)

    def check_expected(self) -> None:
        """Raise TransferError where a rank was lost since `expect`; cheap."""
        word = self._word
        if self._is_said(word) or not word.works or not word.works[-1].is_completed():
            return
        try:
            word.works[-1].wait(_WAIT_SLICE)
        except RuntimeError as exc:
            self._lose(exc.with_traceback(None), 0.0)

    def spread(self, flat: torch.Tensor, owner: int) -> None:
        """Overwrite `uint8[nbytes]` of the host with that of rank `owner`. Collective."""
        with self.calls.inside():
            self._run(lambda group: self._spread(group, flat, owner))

    def _spread(self, group: Any, flat: torch.Tensor, owner: int) -> dist.Work:
        kept: list[dist.Work] = []
        self._kept.append(kept)
        _post(kept, partial(group.broadcast, flat, owner))
        return kept[0]

    def agree(
        self,
        error: BaseException | None = None,
        *,
        look: Callable[[], None] | None = None,
        again: bool = False,
    ) -> None:
        """Raise on every rank if any rank passes an error: the same class, with the rank's name.

        Costs one small allgather without an error. Ranks that are in another call raise too. A
        foreign exception becomes a RemoteError. Of several errors one is raised that is not the end
        of a wait, in a collective of torch for instance: such a wait may have been for the rank
        that failed. Of several of the same kind it is that of the lowest rank. `look` is called
        periodically during a long wait, and must not raise. `again`: once more after an interrupt,
        where this rank's word of it is said (`words`). Collective.
        """
        call = "agree" if error is None else "failed agree"
        with self.calls.inside():
            self._meet(call, error=error, look=look, again=again)

    def note_failure(self, error: BaseException) -> int:
        """Return how many waits ended in vain on other ranks before this error, and this one.

        0 for an error that is no wait's. Called before a rank takes part in what others wait for.
        Not collective.
        """
        if not self._order and self.store is not None and _waited(error):
            with suppress(RuntimeError):
                self._order = self.store.add(f"failures/{self.words}", 1)
        return self._order

    def together(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on this rank; an error on one rank is raised on all."""
        try:
            made = make()
        except BaseException as exc:
            self.agree(exc)
            raise
        self.agree()
        return made

    def attend(self) -> None:
        """Report alive to ranks that have noticed a loss. For waits outside of these calls."""
        if self.size == 1:
            return
        with self.calls.inside(), suppress(RuntimeError):
            if self.is_losing():
                self._rendezvous.report_alive()

    def is_losing(self) -> bool:
        """Whether a rank has noticed the loss of another rank; as of some moments ago."""
        return self._watch is not None and self._watch.is_losing

    def check_given_up(self) -> None:
        """Raise where another rank has noticed the loss of a rank: of this one, if it was stopped.

        Not collective. Called where this rank may have been stopped since the last collective.
        """
        if self._watch is not None and self._watch.look_for_loss(LEAST_SILENCE_S):
            self._give_up(WatchOutcome())

    def is_noted(self, note: str) -> bool:
        """Whether a rank has set the key `note` of `store`; as of some moments ago."""
        return self._watch is not None and self._watch.is_set(f"{_NOTES}/{note}")

    def leave(self) -> None:
        """Break the group: this rank cannot take part in what the others wait for next.

        They raise TransferError by its name, within moments; so does each further call here. Not
        collective. Called after an interrupt between collectives.
        """
        if self._broken is not None or self._group is None:
            return
        never_destroy(self._group)  # it would wait for the other ranks
        self._note_loss(f"{_LEFT}{self.rank}")
        self._broken = self._left(self.rank)
        self.close()

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Run a block of collectives in a row: after an error in it this rank leaves."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def close(self) -> None:
        """Leave the group; not collective, may be called twice."""
        if self._watch is not None:
            self._watch.close()
        self._kept.clear()  # they hold the group's sockets
        self._word = _Word(self._word.number + 1)
        self._group = None

    def _meet(
        self,
        call: str,
        payload: bytes = b"",
        *,
        error: BaseException | None = None,
        look: Callable[[], None] | None = None,
        again: bool = False,
    ) -> list[bytes]:
        """Wait until every rank is in this call; return the payload of each.

        In a `broadcast` that of rank 0 first, and b"" for replies that are long. Raises if any rank
        passes an error, or is in another call. `again`: this rank's word is said.
        """
        if again:
            word = self._word
            if word.call != call:
                self.leave()
                raise TransferError(self._broken)
            self._run(lambda _: word.works[1], look)
        elif self.rank == 0:
            self._wait(self._begin_gather, look)
            word = self._word
            word.call, word.payload = call, payload
            word.parts[0] = _first_part(_CALLS.index(call), payload)
            self._run(lambda group: self._say(group, word), look)
        else:
            self._run(lambda group: self._begin(group, call, payload), look)
            word = self._word
        if self.rank and len(word.works) == 2:
            _post(word.works, *word.read(self._group, leads=False))
        if len(word.works) > 2:
            self._run(lambda _: word.works[2], look)
        word.is_over = True
        calls = word.calls
        if calls[0] == "long replies":
            # Rank 0 has collected them; its broadcast follows.
            return word.payloads if self.rank == 0 else self._meet(call, look=look)
        if "failed agree" in calls:
            raise self._agreed_error(error) from error
        if any(other != call for other in calls):
            self._raise_different_calls(calls)
        return word.payloads

    def _begin_gather(self, group: Any) -> dist.Work:
        """Begin the next word, on rank 0: wait for the parts of the others without blocking.

        Also for those of a call that an interrupt ended here, in which the others still are.
        """
        word = self._word
        if self._is_said(word):
            word = self._word = _Word(word.number + 1, self.heard)
        if not word.works:
            word.parts = torch.empty(self.size, _FIRST_NBYTES, dtype=torch.uint8)
            own = torch.empty_like(word.parts[0])
            self._kept.append(word)
            _post(word.works, partial(group.gather, list(word.parts), own, 0))
        return word.works[0]

    def _say(self, group: Any, word: _Word) -> dist.Work:
        """Give all parts to all ranks, on rank 0.

        Gloo's allgather goes around all ranks in a ring. Its threads wait for a core by spinning:
        where there are fewer cores than ranks, it takes ten times as long (measured).
        """
        long = word.read(group, leads=True)
        _post(word.works, partial(group.broadcast, word.parts, 0), *long)
        return word.works[1]

    def _begin(self, group: Any, call: str, payload: bytes) -> dist.Work:
        """Begin the next word, not on rank 0, or resume a broadcast that an interrupt ended here.

        Raises TransferError, on all ranks, after another call that takes more than what this rank
        has posted of it.
        """
        word = self._word
        is_begun = word.works and not word.is_over
        if is_begun and word.call == call == "broadcast":
            return word.works[1]
        if is_begun and word.call != "agree":
            self.leave()
            raise TransferError(self._broken)
        if word.works:
            word = self._word = _Word(word.number + 1, self.heard)
        word.call, word.payload = call, payload
        word.parts = torch.empty(self.size, _FIRST_NBYTES, dtype=torch.uint8)
        part = _first_part(_CALLS.index(call), payload)
        self._kept.append(word)
        _post(
            word.works,
            partial(group.gather, [], part, 0),
            partial(group.broadcast, word.parts, 0),
        )
        return word.works[1]

    def _agreed_error(self, error: BaseException | None) -> WeightSyncError:
        """Return the error that all ranks raise: see `agree`."""
        own = None
        if error is not None:
            own = _Failure(
                problem=_problem_of(error),
                waited=_waited(error),
                gathered=_is_of_a_collective(error),
                order=self.note_failure(error),
            )
        self._order = 0
        bodies = self._meet("exchange", b"" if own is None else msgspec.json.encode(own))
        failures = {
            rank: msgspec.json.decode(body, type=_Failure)
            for rank, body in enumerate(bodies)
            if body
        }
        first = min(failures, key=lambda r: (failures[r].waited, failures[r].order, r))
        if error is not None and self.rank != first:
            logger.warning("rank %d failed too: %r", self.names[self.rank], error)
        winner = failures.pop(first)
        vain = [r for r, failure in failures.items() if failure.gathered and not winner.waited]
        others = []
        for at, text in (
            ([r for r in failures if r not in vain], "too"),
            (vain, "then waited in a collective of the source"),
        ):
            others += [f"{name_ranks(self.names[r] for r in at)} {text}"] if at else []
        problem = winner.problem
        if others:
            problem = msgspec.structs.replace(
                problem, detail=f"{problem.detail} ({'; '.join(others)})"
            )
        return from_problem(problem, peer=f"rank {self.names[first]}")

    def _raise_different_calls(self, calls: Sequence[str]) -> NoReturn:
        where = (
            f"{name_ranks(n for n, at in zip(self.names, calls, strict=True) if at == there)} "
            f"in {there}()"
            for there in sorted(set(calls))
        )
        self.close()
        self._broken = (
            f"the trainer's ranks are not in step: {', '.join(where)}; every rank has to make the "
            "same calls on its sender, in the same order; connect again"
        )
        raise ProtocolError(self._broken)

    def _run(
        self, start: Callable[[Any], dist.Work], look: Callable[[], None] | None = None
    ) -> None:
        """Run a collective; see `agree` for `look`."""
        self._wait(start, look)

    def _wait(
        self, start: Callable[[Any], dist.Work], look: Callable[[], None] | None = None
    ) -> None:
        """Start a collective, or a part of one, and wait for its end."""
        if self._broken is not None:
            raise self._broken_as(self._broken)
        if self._group is None:
            raise ConfigError("the group of the trainer's ranks is closed")
        began = time.monotonic()
        try:
            failure = self._outcome(start(self._group), look)
        finally:
            if self._watch is not None:
                self._watch.end_wait()
        if isinstance(failure, WatchOutcome):
            self._give_up(failure)
        if failure is not None:
            self._lose(failure, time.monotonic() - began)

    def _outcome(
        self, work: dist.Work, look: Callable[[], None] | None = None
    ) -> RuntimeError | WatchOutcome | None:
        """Wait for a collective in slices, so that Ctrl-C interrupts; return its error or None.

        Without the traceback, whose frames would keep the group's sockets open and the others
        waiting. Or return why the collective will not end.
        """
        while True:
            completed = work.is_completed()
            try:
                work.wait(_WAIT_SLICE)
            except RuntimeError as exc:
                if completed:
                    return exc.with_traceback(None)
                self._check_exit()
                if look is not None:
                    look()
                if self._watch is not None:
                    self._watch.begin_wait()
                    outcome = self._watch.poll()
                    if outcome is not None:
                        return outcome
            else:
                return None

    def _check_exit(self) -> None:
        try:
            self.calls.check()
        except TransferCancelled:
            never_destroy(self._group)  # it would wait for the other ranks
            raise

    def _give_up(self, outcome: WatchOutcome) -> NoReturn:
        """Leave the group while a collective waits in it, for a rank that does not answer."""
        never_destroy(self._group)  # it would wait for that rank
        how = _STOPPED
        limit_s = self._watch.limit_s if self._watch is not None else 0.0
        self.close()
        if outcome.store_is_silent:
            self.store = None  # no call to it returns
            lost = _STORE
        elif outcome.silent:
            lost = f"{name_ranks(self.names[rank] for rank in outcome.silent)} of {self.size}"
            self._note_loss(_STOPPED)
        else:
            how = self._note_loss(_STOPPED)
            self._raise_left(how)
            lost = name_lost_ranks(self._rendezvous, self.names)
        self._broken = f"{lost} did not answer the trainer's other ranks"
        if how != _STOPPED:
            self._broken += "; restart what died, and connect again"
            raise TransferError(self._broken)
        self._broken += (
            f" within {limit_s:g} s, so its process is stopped, or its host cannot be reached; "
            "restart it, and connect again"
        )
        self._broken_as = TransferTimeout
        raise TransferTimeout(self._broken)

    def _left(self, rank: int) -> str:
        return (
            f"rank {self.names[rank]} of {self.size} left a call in the middle, by an interrupt "
            "(Ctrl-C) or an error, so that the trainer's ranks are not in step; connect again"
        )

    def _raise_left(self, how: str) -> None:
        """Raise TransferError where a rank has left: `how` is what the first rank noted."""
        if how.startswith(_LEFT):
            self._broken = self._left(int(how.removeprefix(_LEFT)))
            raise TransferError(self._broken)

    def _note_loss(self, how: str) -> str:
        """Note in the store that a rank is lost, and that this one lives; return how it was lost.

        That is what the first rank noted, if one has.
        """
        with suppress(RuntimeError):
            self._rendezvous.report_alive()
            if self.store is not None:
                return self.store.compare_set(_LOST, "", how).decode()
        return how

    def _lose(self, cause: RuntimeError, waited_s: float) -> NoReturn:
        """Leave the broken group, so that all others notice too; raise an error with lost ranks."""
        self.close()
        self._raise_left(self._note_loss(_DIED))
        lost = name_lost_ranks(self._rendezvous, self.names)
        late = waited_s >= self.timeout_s * 0.9
        error = TransferTimeout if late else TransferError
        spent = f" within {self.timeout_s:g} s" if late else ""
        self._broken = (
            f"{lost} did not answer the trainer's other ranks{spent}; restart what died, and "
            "connect again"
        )
        raise error(self._broken) from cause


class SingleRank(RankComm):
    """The collectives of a trainer with one rank, without torch.distributed."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.names = (0,)
        self.timeout_s = 0.0
        self.store = self.process_group = self._group = self._broken = self._watch = None
        self._kept = deque()
        self._word = _Word(1)
        self.calls = TorchCalls()

    def _meet(
        self,
        call: str,
        payload: bytes = b"",
        *,
        error: BaseException | None = None,
        look: Callable[[], None] | None = None,
        again: bool = False,
    ) -> list[bytes]:
        if error is not None:
            raise error
        return [b""]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the payload."""
        return [payload]

    def broadcast(self, payload: bytes | None = None, *, reply: bytes = b"") -> bytes:
        """Return the payload. Raises ConfigError without one."""
        if payload is None:
            raise ConfigError("rank 0 has to give the payload that it broadcasts")
        return payload

    def _run(
        self, start: Callable[[Any], dist.Work], look: Callable[[], None] | None = None
    ) -> None:
        """Do nothing: there is no other rank."""


def alone() -> RankComm:
    """Return the RankComm of a trainer that is one process."""
    return SingleRank()


def name_ranks(names: Iterable[int]) -> str:
    """Return `rank 1` or `ranks 1, 2 and 3`."""
    listed = [str(name) for name in sorted(names)]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def name_lost_ranks(rendezvous: StoreRendezvous, names: Sequence[int]) -> str:
    """Find out through the store which ranks are alive; return the names of the others."""
    try:
        missing = rendezvous.missing_survivors(NAMING_TIMEOUT_S)
    except RuntimeError:
        return _STORE
    if not missing:
        return "a rank (all of them are still alive, so check the network between them)"
    return f"{name_ranks(names[rank] for rank in missing)} of {len(names)}"


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's error. `waited` if it ended a wait, as the `order`-th one of all ranks.

    `gathered` if that wait was in a collective of torch.
    """

    problem: Problem
    waited: bool
    gathered: bool
    order: int


def _problem_of(error: BaseException) -> Problem:
    if not isinstance(error, WeightSyncError):
        kind, message = type(error).__name__, str(error)
        text = f"{kind}: {message}" if message else kind
        error = RemoteError(text, remote_type=kind, remote_message=message)
    return to_problem(error)


def _waited(error: BaseException) -> bool:
    """Whether an error ended a wait: a timeout, or one that torch's collectives raised."""
    return isinstance(error, TimeoutError) or _is_of_a_collective(error)


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether torch's collectives raised an error: those of Gloo have no class of their own."""
    if not isinstance(error, RuntimeError):
        return False
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith("torch.distributed") for name in modules)


def _first_part(call: int, payload: bytes) -> torch.Tensor:
    """Return a call, the length of its payload, and the payload itself where it is short."""
    inline = payload if len(payload) <= _INLINE_NBYTES else b""
    return _tensor_of(_HEAD.pack(call, len(payload)) + inline, _FIRST_NBYTES)


def _read_first_part(part: torch.Tensor) -> tuple[str, int, bytes]:
    """Return the call, and the length of its payload, and the payload; b"" where it is too long."""
    data = _bytes_of(part)
    call, length = _HEAD.unpack_from(data)
    inline = data[_HEAD.size :][:length] if length <= _INLINE_NBYTES else b""
    return _CALLS[call], length, inline


def _tensor_of(payload: bytes, length: int) -> torch.Tensor:
    buffer = bytearray(length)
    buffer[: len(payload)] = payload
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def compare_manifests(manifest: Manifest, ranks: RankComm, *, advice: str) -> None:
    """Raise ManifestMismatchError on all ranks where their manifests differ. Collective.

    Every rank is compared with rank 0. The message names the first tensor that differs, and ends
    with `advice`.
    """
    digests = ranks.exchange(manifest.digest.encode())
    if len(set(digests)) == 1:
        return
    at = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    lines = [f"{spec.name} {spec}" for spec in manifest.specs]
    lines += [f"{alias} = {name}" for alias, name in sorted(manifest.aliases.items())]
    listed = [body.decode().split("\n") for body in ranks.exchange("\n".join(lines).encode())]
    ours, theirs = listed[0], listed[at]
    shared = min(len(ours), len(theirs))
    i = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    first, other = ((side[i : i + 1] or [""])[0] or "nothing" for side in (ours, theirs))
    raise ManifestMismatchError(
        f"the trainer's ranks send different tensors: at position {i} rank {ranks.names[at]} has "
        f"{other}, rank {ranks.names[0]} has {first}; {advice}",
        mismatched=[f"{other} on rank {ranks.names[at]}, {first} on rank {ranks.names[0]}"],
    )


def digest_of_call(call: str, arguments: Mapping[str, str]) -> bytes:
    """Return bytes that are equal on ranks that make the same call with the same arguments.

    They are no MessagePack, so that they cannot be read as a result.
    """
    encoded = msgspec.json.encode((call, dict(arguments)))
    return _NO_MESSAGE + hashlib.blake2b(encoded, digest_size=16).digest()


def compare_arguments(call: str, arguments: Mapping[str, str], ranks: RankComm) -> None:
    """Raise ConfigError on all ranks where they give `call` different arguments. Collective.

    `arguments` are those of this rank, as text. Raises ProtocolError where the ranks make different
    calls. An argument that a rank leaves out is not compared with that rank's.
    """
    bodies = ranks.exchange(msgspec.json.encode((call, dict(arguments))))
    given = [msgspec.json.decode(body, type=tuple[str, dict[str, str]]) for body in bodies]
    names = ranks.names
    if len({made for made, _ in given}) > 1:
        made = ", ".join(f"rank {n} {c}" for n, (c, _) in zip(names, given, strict=True))
        raise ProtocolError(
            f"the trainer's ranks make different calls: {made}; every rank has to make the same "
            "calls on its sender, in the same order"
        )
    differing = []
    for argument in dict.fromkeys(argument for _, each in given for argument in each):
        by_value: dict[str, list[int]] = {}
        for name, (_, each) in zip(names, given, strict=True):
            if argument in each:
                by_value.setdefault(each[argument], []).append(name)
        if len(by_value) > 1:
            values = [f"{value[:200]} on {name_ranks(at)}" for value, at in by_value.items()]
            differing.append(f"{argument}= is {', '.join(values[:-1])} and {values[-1]}")
    if differing:
        raise ConfigError(
            f"{call}(): the trainer's ranks differ: {'; '.join(differing)}; every rank has to give "
            "the same"
        )


class CancelledError(TransferError):
    """A step was cancelled, and the ranks agreed on no error: their command results have it."""


class Cancellation(Exception):  # only a signal: the ranks agree on the actual error
    """Another rank failed in this step. The next call of `agree` raises its error."""


class CancelFlag:
    """Cancellation flag in the trainer's store: one key per step, polled by all ranks.

    It tells ranks that wait for a receiver that another rank failed. Errors of the store are
    ignored: if its process died, the ranks' group notices that.
    """

    def __init__(self, ranks: RankComm) -> None:
        self._ranks = ranks
        self._step = 0
        self._looked = 0.0

    def next_step(self) -> None:
        """Begin another step, with a flag that is not set. Every rank calls it, after a word."""
        self._step = self._ranks.words
        self._looked = time.monotonic()

    def set(self) -> None:
        """Set the flag: this rank leaves the step."""
        store = self._ranks.store
        if store is not None:
            with suppress(RuntimeError):
                store.set(self._key, "1")

    def look(self) -> None:
        """Raise Cancellation when a rank has left the step, or is lost."""
        now = time.monotonic()
        if now - self._looked < _CANCEL_POLL_S:
            return
        self._looked = now
        if self._ranks.is_losing() or self._ranks.is_noted(self._key):
            raise Cancellation

    @property
    def _key(self) -> str:
        return f"cancelled/{self._step}"


def join_ranks(
    process_group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    call: str = "connect()",
) -> RankComm:
    """Create the private group over the ranks of `process_group`; every rank has to call this.

    None means the default group where it has more than one rank, otherwise `alone()`. `timeout_s`
    bounds every later wait for another rank, so it has to cover the longest time that rank 0 may
    wait for receivers; a rank that is stopped is noticed after `join_timeout_s`. Raises
    TransferTimeout that names the ranks that did not make the user's `call` within the shorter of
    the two times, and ConfigError outside of `process_group`.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return alone()
    names = dist.get_process_group_ranks(process_group)
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ConfigError("this process is no member of the process_group that connect() was given")
    if len(names) == 1:
        return alone()
    if len(names) > MAX_RANKS:
        raise ConfigError(f"one sender has at most {MAX_RANKS} ranks, not {len(names)}")
    if rank == 0:
        _compare_timeouts(process_group, join_timeout_s)
    bound_s = min(join_timeout_s, timeout_s)
    rendezvous = _rendezvous_at_store(names, rank, bound_s, call)
    watch = RankWatch(
        rendezvous.store,
        rank=rank,
        size=len(names),
        lost=f"{_NOTES}/{_LOST}",
        timeout_s=join_timeout_s,
    )
    group = _make_group(rendezvous, rank, names, bound_s)
    group.set_timeout(timedelta(seconds=timeout_s))
    watch.start()
    return RankComm(
        group,
        rendezvous,
        rank=rank,
        names=names,
        timeout_s=timeout_s,
        watch=watch,
        process_group=process_group,
    )


def _compare_timeouts(process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Warn where a collective of the trainer notices a dead rank only after `timeout_s`."""
    group = process_group or dist.group.WORLD
    longest = 0.0
    with suppress(AttributeError, RuntimeError):  # a backend may have no timeout
        backends = [group._get_backend(device) for device in group._device_types] if group else []
        longest = max((b.options._timeout.total_seconds() for b in backends), default=0.0)
    if longest > timeout_s:
        logger.warning(
            "a rank that dies while tensors are gathered is noticed after the process group's own "
            "timeout of %g s, later than timeout_s (%g s): init_process_group(timeout=…) sets it",
            longest,
            timeout_s,
        )


def _rendezvous_at_store(
    names: Sequence[int], rank: int, timeout_s: float, call: str
) -> StoreRendezvous:
    """Wait in the trainer's store until all ranks have arrived.

    Raises TransferTimeout that names the missing ranks, TransferError where the store is lost.
    """
    digest = hashlib.blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()
    store = PrefixStore(f"weightsync/{digest}", dist.distributed_c10d._get_default_store())
    try:
        rendezvous, missing = StoreRendezvous.arrive(
            store, rank=rank, size=len(names), timeout_s=timeout_s
        )
    except RuntimeError as exc:
        raise TransferError(
            "the trainer's store (held by rank 0, or by torchrun's agent) does not answer; it has "
            "to live as long as the trainer"
        ) from exc
    if missing:
        late = name_ranks(names[rank] for rank in missing)
        raise TransferTimeout(
            f"{late} of {len(names)} did not call {call} within {timeout_s:g} s; every rank of "
            "the process group has to call it"
        )
    return rendezvous


def _make_group(
    rendezvous: StoreRendezvous, rank: int, names: Sequence[int], timeout_s: float
) -> Any:
    # Not dist.new_group: its group names depend on the groups that this process created before, and
    # ranks that recover from an error at different times would wait under different names.
    try:
        store = PrefixStore("gloo", rendezvous.store)
        return dist.ProcessGroupGloo(store, rank, len(names), timedelta(seconds=timeout_s))
    except RuntimeError as exc:
        lost = name_lost_ranks(rendezvous, names)
        raise TransferError(f"the trainer's ranks could not connect: {lost} stayed away") from exc
