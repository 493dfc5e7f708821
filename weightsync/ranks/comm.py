"""What the ranks of one trainer exchange: a private Gloo group beside the trainer's own."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn, Protocol, Self, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    RemoteError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.specs import Manifest
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

COMPLETE = "complete"
_POLL_S = 0.005
_MAX_POLL_S = 0.1


class StoreRendezvous:
    """One meeting of all ranks. `store` is the meeting's own corner of the trainer's store.

    Every rank counts its own meetings, and the outcome of each is settled once in the store: so a
    rank that comes after the others gave up goes on to the meeting they hold next.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self.store = store
        self._rank = rank
        self._size = size

    @classmethod
    def arrive(
        cls, store: Store, *, rank: int, size: int, timeout_s: float
    ) -> tuple[Self, list[int]]:
        """Wait for all ranks; return the meeting, and the ranks that did not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            number = store.add(f"meetings/{rank}", 1)
            meeting = cls(PrefixStore(f"meeting/{number}", store), rank=rank, size=size)
            if meeting._enter() in (b"", COMPLETE.encode()) or time.monotonic() >= deadline:
                return meeting, meeting._wait(deadline)

    def survivors_miss(self, timeout_s: float) -> list[int]:
        """Return the ranks that do not call this too, within `timeout_s`. Called after a loss."""
        self.survive()
        return self._missing("survivor", time.monotonic() + timeout_s)

    def survive(self) -> None:
        """Say that this rank is left."""
        self.store.set(f"survivor/{self._rank}", "1")

    def _enter(self) -> bytes:
        self.store.set(f"rank/{self._rank}", "1")
        if self.store.add("arrived", 1) == self._size:
            return self._settle(COMPLETE)
        return self.store.get("outcome") if self.store.check(["outcome"]) else b""

    def _settle(self, outcome: str) -> bytes:
        """Settle the outcome; return how it was settled first."""
        return self.store.compare_set("outcome", "", outcome)

    def _wait(self, deadline: float) -> list[int]:
        if _poll(lambda: self.store.check(["outcome"]), deadline):
            settled = self.store.get("outcome")
        else:
            missing = self._missing("rank", deadline)
            settled = self._settle(" ".join(map(str, missing)) or COMPLETE)
        return [] if settled == COMPLETE.encode() else [int(n) for n in settled.split()]

    def _missing(self, kind: str, deadline: float) -> list[int]:
        """Return the ranks without a key of this kind once the time is up, or none at once."""
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


logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMING_TIMEOUT_S = 3.0
_LOST = "lost"
_WAIT_SLICE = timedelta(seconds=0.2)

# Every call begins by summing one word over the ranks: each adds one to the field of its call.
_FIELD_BITS = 15
_CALLS = ("agree", "failed agree", "exchange", "broadcast")
_MASK = (1 << _FIELD_BITS) - 1
MAX_RANKS = _MASK
"""The most that one word can count."""


class Gloo(Protocol):
    """What is used of `dist.ProcessGroupGloo`, whose stub lacks it."""

    def allreduce(self, tensors: list[torch.Tensor], /) -> dist.Work: ...

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], /
    ) -> dist.Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int, /) -> dist.Work: ...

    def set_timeout(self, timeout: timedelta, /) -> None: ...


class RankComm:
    """The ranks of a trainer; every rank calls the same methods in the same order.

    `rank` and `size` are those of the trainer's process group; messages name a rank as the whole
    job knows it (`names`). `store` is for short notes, None where there is one rank.

    A call that ranks do not share raises ProtocolError on all of them. A rank that dies, or stays
    away for longer than the group's timeout, is a TransferError on all others that names it. The
    group is then broken: every further call raises TransferError.
    """

    def __init__(
        self,
        group: Gloo,
        check_in: StoreRendezvous,
        *,
        rank: int,
        names: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self.names = tuple(names)
        self.timeout_s = timeout_s
        self._notes = PrefixStore("notes", check_in.store)
        self.store: Store | None = self._notes
        self._group: Gloo | None = group
        self._check_in = check_in
        self._broken: str | None = None

    @property
    def broken(self) -> bool:
        """Whether a rank was lost, so that every further call raises."""
        return self._broken is not None

    def limit(self, timeout_s: float) -> None:
        """Wait for other ranks as long as this from now on. Not collective; each rank calls it."""
        self.timeout_s = timeout_s
        if self._group is not None:
            self._group.set_timeout(timedelta(seconds=timeout_s))

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order. Collective; payloads may differ in length."""
        self._meet("exchange")
        return self._gather(payload)

    def broadcast(self, payload: bytes | None = None) -> bytes:
        """Return the payload of rank 0, which alone gives one. Collective.

        The others wait for rank 0 as long as the group's timeout.
        """
        if self.rank == 0 and payload is None:
            raise ConfigError("rank 0 has to give the payload that it broadcasts")
        self._meet("broadcast")
        data = payload if self.rank == 0 and payload is not None else b""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._run(lambda group: group.broadcast(length, 0))
        buffer = _tensor_of(data, int(length.item()))
        if buffer.numel():
            self._run(lambda group: group.broadcast(buffer, 0))
        return _bytes_of(buffer)

    def agree(
        self, error: BaseException | None = None, *, look: Callable[[], None] | None = None
    ) -> None:
        """Raise on every rank if any rank brings an error: the same class, naming the rank.

        One small word where all is well. Ranks that are in another call raise too. A foreign
        exception becomes a RemoteError. Of several errors the one of the lowest rank is raised.
        `look` is called now and then during a long wait, and must not raise. Collective.
        """
        self._meet("agree" if error is None else "failed agree", error, look)

    def together(self, make: Callable[[], T]) -> T:
        """Return what `make` makes on this rank; what it raises on one is raised on all."""
        try:
            made = make()
        except BaseException as exc:
            self.agree(exc)
            raise
        self.agree()
        return made

    def attend(self) -> None:
        """Answer ranks that have lost one and ask who is left; for waits outside of these calls."""
        if self.size > 1 and self.is_losing():
            with suppress(RuntimeError):
                self._check_in.survive()

    def is_losing(self) -> bool:
        """Whether a rank has noticed that another one is gone."""
        with suppress(RuntimeError):
            return self.store is not None and self.store.check([_LOST])
        return False

    def close(self) -> None:
        """Leave the group; not collective, may be called twice."""
        self._group = None

    def _meet(
        self,
        call: str,
        error: BaseException | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Wait until every rank is here, in the same call; raise if any of them brings an error."""
        own = _CALLS.index(call)
        word = torch.tensor([1 << own * _FIELD_BITS], dtype=torch.int64)
        self._run(lambda group: group.allreduce([word]), look)
        total = int(word.item())
        counts = [total >> i * _FIELD_BITS & _MASK for i in range(len(_CALLS))]
        if counts[_CALLS.index("failed agree")]:
            raise self._first_error(error) from error
        if counts[own] != self.size:
            self._raise_parted(call)

    def _first_error(self, error: BaseException | None) -> WeightSyncError:
        told = self._gather(b"" if error is None else _encode(error))
        failed = [rank for rank, body in enumerate(told) if body]
        if error is not None and self.rank != failed[0]:
            logger.warning("rank %d failed too: %r", self.names[self.rank], error)
        problem = msgspec.json.decode(told[failed[0]], type=Problem)
        if len(failed) > 1:
            others = name_ranks(self.names[rank] for rank in failed[1:])
            problem = msgspec.structs.replace(problem, detail=f"{problem.detail} ({others} too)")
        return from_problem(problem, peer=f"rank {self.names[failed[0]]}")

    def _raise_parted(self, call: str) -> NoReturn:
        calls = [body.decode() for body in self._gather(call.encode())]
        where = (
            f"{name_ranks(n for n, at in zip(self.names, calls, strict=True) if at == there)} "
            f"in {there}()"
            for there in sorted(set(calls))
        )
        self._give_up(
            ProtocolError(
                f"the trainer's ranks are not in step: {', '.join(where)}; every rank has to make "
                "the same calls on its sender, in the same order"
            )
        )

    def _gather(self, payload: bytes) -> list[bytes]:
        own = torch.tensor([len(payload)], dtype=torch.int64)
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        self._run(lambda group: group.allgather([sizes], [own]))
        lengths = [int(size.item()) for size in sizes]
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        padded = _tensor_of(payload, longest)
        buffers = [torch.empty_like(padded) for _ in range(self.size)]
        self._run(lambda group: group.allgather([buffers], [padded]))
        pairs = zip(buffers, lengths, strict=True)
        return [_bytes_of(buffer[:length]) for buffer, length in pairs]

    def _run(
        self, start: Callable[[Gloo], dist.Work], look: Callable[[], None] | None = None
    ) -> None:
        if self._broken is not None:
            raise TransferError(f"{self._broken}; connect again")
        if self._group is None:
            raise ConfigError("the group of the trainer's ranks is closed")
        began = time.monotonic()
        failure = _outcome(start(self._group), look)
        if failure is not None:
            self._lose(failure, time.monotonic() - began)

    def _lose(self, cause: RuntimeError, waited_s: float) -> NoReturn:
        """Leave the broken group, so that all others notice too, and find out who is gone."""
        self._group = None
        with suppress(RuntimeError):
            self._notes.set(_LOST, "1")
        gone = who_is_gone(self._check_in, self.names)
        late = waited_s >= self.timeout_s * 0.9
        error = TransferTimeout if late else TransferError
        spent = f" within {self.timeout_s:g} s" if late else ""
        self._broken = f"{gone} did not answer the trainer's other ranks{spent}"
        raise error(f"{self._broken}; start what died again, and connect again") from cause

    def _give_up(self, error: ProtocolError) -> NoReturn:
        self._broken = str(error)
        self._group = None
        raise error


class SingleRank(RankComm):
    """A trainer of one rank: the same interface, and no torch.distributed."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.names = (0,)
        self.timeout_s = 0.0
        self.store: Store | None = None
        self._broken = None

    def limit(self, timeout_s: float) -> None:
        """Nobody is waited for."""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the own payload."""
        return [payload]

    def broadcast(self, payload: bytes | None = None) -> bytes:
        """Return the own payload."""
        if payload is None:
            raise ConfigError("rank 0 has to give the payload that it broadcasts")
        return payload

    def agree(
        self, error: BaseException | None = None, *, look: Callable[[], None] | None = None
    ) -> None:
        """Raise `error` as it is."""
        if error is not None:
            raise error

    def close(self) -> None:
        """Do nothing."""


def alone() -> RankComm:
    """Return the ranks of a trainer that is one process."""
    return SingleRank()


def name_ranks(names: Iterable[int]) -> str:
    """Return `rank 1` or `ranks 1, 2 and 3`."""
    listed = [str(name) for name in sorted(names)]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def who_is_gone(check_in: StoreRendezvous, names: Sequence[int]) -> str:
    """Ask through the store who is still there; return the others by name."""
    try:
        missing = check_in.survivors_miss(NAMING_TIMEOUT_S)
    except RuntimeError:
        return "the process that holds the trainer's store (rank 0, or torchrun's agent)"
    if not missing:
        return "a rank (all of them are still alive, so look at the network between them)"
    return f"{name_ranks(names[rank] for rank in missing)} of {len(names)}"


def _outcome(work: dist.Work, look: Callable[[], None] | None = None) -> RuntimeError | None:
    """Wait for a collective in slices, so that Ctrl-C is heard; return how it failed.

    Without a traceback, whose frames would keep the group's sockets open, and the others waiting.
    """
    while True:
        completed = work.is_completed()
        try:
            work.wait(_WAIT_SLICE)
        except RuntimeError as exc:
            if completed:
                return exc.with_traceback(None)
            if look is not None:
                look()
        else:
            return None


def _encode(error: BaseException) -> bytes:
    if not isinstance(error, WeightSyncError):
        kind, said = type(error).__name__, str(error)
        text = f"{kind}: {said}" if said else kind
        error = RemoteError(text, remote_type=kind, remote_message=said)
    return encode_problem(to_problem(error))


def _tensor_of(payload: bytes, length: int) -> torch.Tensor:
    buffer = bytearray(length)
    buffer[: len(payload)] = payload
    return torch.frombuffer(buffer, dtype=torch.uint8) if length else torch.empty(0)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes() if tensor.numel() else b""


def compare_manifests(manifest: Manifest, ranks: RankComm, *, advice: str) -> None:
    """Raise ManifestMismatchError on all ranks, naming the first tensor that differs. Collective.

    Every rank is compared with rank 0; `advice` ends the message.
    """
    digests = ranks.exchange(manifest.digest.encode())
    if len(set(digests)) == 1:
        return
    at = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    lines = [f"{spec.name} {spec}" for spec in manifest.specs]
    lines += [f"{alias} = {name}" for alias, name in sorted(manifest.aliases.items())]
    told = [body.decode().split("\n") for body in ranks.exchange("\n".join(lines).encode())]
    ours, theirs = told[0], told[at]
    shared = min(len(ours), len(theirs))
    i = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    first, other = ((side[i : i + 1] or [""])[0] or "nothing" for side in (ours, theirs))
    raise ManifestMismatchError(
        f"the trainer's ranks send different tensors: at position {i} rank {ranks.names[at]} has "
        f"{other}, rank {ranks.names[0]} has {first}; {advice}",
        mismatched=[f"{other} on rank {ranks.names[at]}, {first} on rank {ranks.names[0]}"],
    )


_INTERVAL_S = 0.2


class CancelledError(TransferError):
    """A step was called off, and the ranks found no reason together: look at their answers."""


class Cancellation(Exception):  # no error of its own: the ranks agree on the real one
    """Another rank failed in this step; meet the others to learn why."""


class CancelFlag:
    """One flag per step in the trainer's store, looked at now and then.

    A store that is gone says nothing: the ranks' group notices that its holder died.
    """

    def __init__(self, ranks: RankComm) -> None:
        self._ranks = ranks
        self._store = ranks.store
        self._turn = 0
        self._looked = 0.0

    def next_turn(self) -> None:
        """Another step begins, on every rank."""
        self._turn += 1
        self._looked = time.monotonic()

    def call(self) -> None:
        """Say that this rank leaves the step."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(self._key, "1")

    def look(self) -> None:
        """Raise CalledOff when a rank has left the step, or is gone."""
        now = time.monotonic()
        if self._store is None or now - self._looked < _INTERVAL_S:
            return
        self._looked = now
        called = self._ranks.is_losing()
        with suppress(RuntimeError):
            called = called or self._store.check([self._key])
        if called:
            raise Cancellation

    @property
    def _key(self) -> str:
        return f"called-off/{self._turn}"


JOIN_TIMEOUT_S = 300.0


def join_ranks(
    process_group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    call: str = "connect()",
) -> RankComm:
    """Make the private group over the ranks of `process_group`; each of them has to call this.

    None means the default group where there is one of more than one rank, else `alone()`.
    `timeout_s` bounds every later wait for another rank, so it has to cover the longest time that
    rank 0 may wait for receivers. Raises TransferTimeout naming the ranks that did not make the
    user's `call` within the shorter of the two times.
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
    check_in = _meet_at_store(names, rank, bound_s, call)
    group = _make_group(check_in, rank, names, bound_s)
    group.set_timeout(timedelta(seconds=timeout_s))
    return RankComm(group, check_in, rank=rank, names=names, timeout_s=timeout_s)


def _compare_timeouts(process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """A rank that dies inside a collective of the trainer's is noticed after that one's timeout."""
    group = process_group or dist.group.WORLD
    longest = 0.0
    with suppress(AttributeError, RuntimeError):  # a backend need not say
        backends = [group._get_backend(device) for device in group._device_types] if group else []
        longest = max((b.options._timeout.total_seconds() for b in backends), default=0.0)
    if longest > timeout_s:
        logger.warning(
            "a rank that dies while tensors are gathered is noticed after the process group's own "
            "timeout of %g s, later than timeout_s (%g s): init_process_group(timeout=…) sets it",
            longest,
            timeout_s,
        )


def _meet_at_store(names: Sequence[int], rank: int, timeout_s: float, call: str) -> StoreRendezvous:
    """Meet the other ranks in the trainer's store."""
    digest = hashlib.blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()
    store = PrefixStore(f"weightsync/{digest}", dist.distributed_c10d._get_default_store())
    try:
        check_in, missing = StoreRendezvous.arrive(
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
    return check_in


def _make_group(
    check_in: StoreRendezvous, rank: int, names: Sequence[int], timeout_s: float
) -> Gloo:
    # Not dist.new_group: its names depend on what this process made before, and ranks that
    # recover from an error at different times would wait for each other under different names.
    try:
        store = PrefixStore("gloo", check_in.store)
        group = dist.ProcessGroupGloo(store, rank, len(names), timedelta(seconds=timeout_s))
        return cast(Gloo, group)
    except RuntimeError as exc:
        gone = who_is_gone(check_in, names)
        raise TransferError(f"the trainer's ranks could not connect: {gone} stayed away") from exc
