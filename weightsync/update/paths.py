"""Which path reaches which receiver: the cheapest candidate that passes its probe."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from weightsync.backends.base import (
    Backend,
    Endpoint,
    Reach,
    Reader,
    Replies,
    Round,
    TrainerWeightTransferEngine,
    TransferOptions,
)
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    HandleError,
    ProtocolError,
    SegmentError,
    WeightSyncError,
    shorten,
)
from weightsync.ranks.group import RankGroup
from weightsync.ranks.worker import CommandResult, Connect, Open, Places, RankInfo, Withdraw
from weightsync.update.fleet import Fleet, Member, MemberReply, failures, raise_first
from weightsync.wire.codec import manifest_to_wire
from weightsync.wire.messages import PROTOCOL, InitReply, InitRequest, Request, ShutdownRequest
from weightsync.wire.offers import InitInfo, ProbeRequest

logger = logging.getLogger(__name__)

_PATH_ERRORS = (HandleError, SegmentError, BackendUnavailableError)
"""What says that a path cannot work, and not that the call was wrong."""
_GOODBYE_S = 10.0
_OFFER_NUMBERS = itertools.count(1)
"""Of the whole process: a sender keeps its id over the engines that it makes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The rank that feeds a receiver, the backend and the path."""

    rank: int
    backend: str
    path: str
    cost: float


def candidates(
    member: Member, ranks: Sequence[RankInfo], backends: Sequence[Backend], *, ordered: bool = False
) -> list[Candidate]:
    """Return the ways to a member, cheapest first; why one is not among them goes to `skipped`.

    With `ordered` the order of the backends counts more than the cost.
    """
    found: list[tuple[int, float, Candidate]] = []
    reasons: dict[str, dict[str, None]] = {}
    for place, backend in enumerate(backends):
        name = backend.name
        if name not in member.backends:
            why = member.unusable.get(name, "the receiver does not know this backend")
            reasons.setdefault(name, {})[why] = None
            continue
        theirs = Endpoint(keys=member.keys, facts=member.backends[name])
        best: dict[str, Candidate] = {}
        for rank, info in enumerate(ranks):
            if name in info.unusable:
                reasons.setdefault(name, {})[info.unusable[name]] = None
                continue
            ours = Endpoint(keys=info.keys, rank=rank, facts=info.backends.get(name))
            for reach in _reaches(backend, ours, theirs):
                if reach.why_not:
                    reasons.setdefault(reach.path, {})[reach.why_not] = None
                elif reach.path not in best or reach.cost < best[reach.path].cost:
                    best[reach.path] = Candidate(rank, name, reach.path, reach.cost)
        for way in best.values():
            reasons.pop(way.path, None)
            found.append((place if ordered else 0, way.cost, way))
    member.skipped.update({path: "; ".join(why) for path, why in reasons.items()})
    return [way for _, _, way in sorted(found, key=lambda entry: entry[:2])]


def _reaches(backend: Backend, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
    """Raise ConfigError, naming the method, where a backend returns something else.

    An error of the method itself is a reason: the facts come from another process.
    """
    try:
        reached = backend.reach(trainer, receiver)
    except Exception as exc:  # noqa: BLE001  # foreign code
        why_not = f"reach() failed: {type(exc).__name__}: {exc}"
        return [Reach(backend.name, why_not=why_not)]
    listed = [reached] if isinstance(reached, Reach) else reached
    if not isinstance(listed, list | tuple) or not all(isinstance(r, Reach) for r in listed):
        raise ConfigError(f"backend {backend.name!r}: reach() returned {reached!r}, not a Reach")
    return listed


def assign(
    wishes: Mapping[Member, Sequence[Candidate]],
    requires: Callable[[str], Mapping[str, str]],
) -> dict[Member, Candidate]:
    """Choose for every member the first of its ways that its rank can offer to all it feeds.

    A backend has one engine on a rank, and it takes one path. Where a backend that is built on it
    needs another path, or a receiver can be reached by no other, all of its receivers take that.
    """
    chosen = {member: ways[0] for member, ways in wishes.items()}
    path_of: dict[tuple[int, str], tuple[float, str]] = {}
    for way in chosen.values():
        engine = way.rank, way.backend
        path_of[engine] = max(path_of.get(engine, (way.cost, way.path)), (way.cost, way.path))
    for way in chosen.values():
        for base, path in requires(way.backend).items():
            path_of[way.rank, base] = math.inf, path
    for member, way in chosen.items():
        _, path = path_of[way.rank, way.backend]
        others = [w for w in wishes[member] if (w.backend, w.path) == (way.backend, path)]
        if way.path != path and others:
            member.skipped[way.path] = (
                f"rank {way.rank} feeds another receiver by {path}, and its engine takes one path "
                "for all"
            )
            chosen[member] = others[0]
    return chosen


class PathSelector:
    """The way to every member of a fleet, on rank 0.

    `take` finds it, `offer` gives members that do not know this sender what they need again,
    `withdraw` ends it. `seconds` is what finding it last took, by phase; `unreported` until a
    report has said so. `met` says that the fleet was connected once. `backends` are tried in their
    order where they are `ordered`, the cheapest path first otherwise; `unusable` says why others
    were left out.
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
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.unreported = False
        self.met = False
        self._group = group
        self._fleet = fleet
        self._given = self._options = options
        self._backends = backends
        self._ordered = ordered
        self._unusable = dict(unusable or {})
        self._paths: dict[str, dict[int, str]] = {}
        self._next_reader: dict[tuple[str, int], int] = {}
        self._heard: dict[tuple[str, int, int], int | None] = {}
        self._trusted = 0
        self._manifest = manifest_to_wire(group.manifest)

    @property
    def layout(self) -> str:
        """Names how the stream is cut: the same weights have the same table in one layout alone."""
        options = self._options
        cut = options.packed, options.bucket_nbytes, options.num_buckets
        return f"{sorted((name, sorted(by.items())) for name, by in self._paths.items())} {cut}"

    def take(self, fleet_version: int | None) -> None:
        """Connect every member by the cheapest path that works for it.

        Raises BackendUnavailableError with the reason of each path when none does, and what a
        member raised when the tensors do not fit it.
        """
        members = self._fleet.members
        wishes = {member: self._candidates(member) for member in members}
        while True:
            lost = [member for member, left in wishes.items() if not left]
            if lost:
                raise _unavailable(lost)
            chosen = assign(wishes, lambda name: self._backend(name).requires)
            try:
                failed = self._try(chosen, fleet_version)
            except BaseException:
                self.withdraw()
                raise
            if not failed:
                return
            self.withdraw()
            for answer in failed:
                way = chosen[answer.member]
                logger.warning("%s: path %s: %s", answer.member.target, way.path, answer.error)
                wishes[answer.member].remove(way)

    def offer(self, members: Sequence[Member], fleet_version: int | None) -> None:
        """Give members all they need, by the path that they have. Raises what the first raised."""
        raise_first(self._connect(members, fleet_version), "init")

    def extend(self, member: Member, fleet_version: int | None) -> bool:
        """Connect one member more, or again; False when that takes other engines than there are."""
        for way in self._candidates(member):
            if not self._serves(way):
                return False
            self._go(member, way)
            try:
                if self._backend(way.backend).collective and fleet_version:
                    # Alone: it is brought up to date before an update of everyone, if there is any.
                    answers = self._handshake(way.backend, [member], fleet_version)
                    raise_first(answers, "init")
                else:
                    self.offer([member], fleet_version)
            except _PATH_ERRORS as exc:
                logger.warning("%s: path %s: %s", member.target, way.path, exc)
                member.skipped[way.path] = str(exc)
            else:
                return True
        raise _unavailable([member])

    def is_collective(self, member: Member) -> bool:
        """Whether all receivers of its backend are connected together."""
        return bool(member.backend) and self._backend(member.backend).collective

    def unready(self, members: Sequence[Member]) -> list[Member]:
        """Return those that need another handshake, together, before an update of `members`."""
        return [
            member
            for name, own in self._by_backend(members).items()
            if self._backend(name).collective
            and not self._engine(name).is_ready([member.reader for member in own])
            for member in own
        ]

    def repair(self, fleet_version: int | None, members: Sequence[Member]) -> list[MemberReply]:
        """Connect these members anew, together; return what each of them answered."""
        answers: list[MemberReply] = []
        for name, own in self._by_backend(members).items():
            answers += self._handshake(name, own, fleet_version)
        return answers

    def forget(self, member: Member) -> None:
        """A member left the fleet."""
        engine = self._group.worker.engines.get(member.backend)
        if engine is not None and member.rank == 0:
            engine.forget(member.reader)

    def places(self, members: Sequence[Member]) -> Places:
        """Return the readers of an update of these members."""
        places: Places = {}
        for member in members:
            for base in self._backend(member.backend).requires:
                places.setdefault(base, {})
            by_rank = places.setdefault(member.backend, {})
            by_rank.setdefault(member.rank, []).append(member.reader)
        return places

    def beat(self, member: Member) -> Hashable | None:
        """Return what grows while a reader lives and works; None where it is not seen."""
        if member.rank:
            return self._trusted, self._heard.get((member.backend, member.rank, member.reader))
        engine = self._group.worker.engines.get(member.backend)
        return engine.signs(member.reader) if engine is not None else None

    def trust(self) -> None:
        """While ranks hand over, each bounds the waits for its own readers: none is silent here."""
        self._trusted += 1

    def heard(self, told: Sequence[CommandResult]) -> None:
        """Take in what the ranks see of their own readers."""
        for rank, answer in enumerate(told):
            for name, beats in answer.beats.items():
                self._heard.update({(name, rank, reader): n for reader, n in beats.items()})

    def late(self, members: Sequence[Member]) -> list[Member]:
        """Return those for which an engine of rank 0 waited in vain."""
        engines = self._group.worker.engines
        late = {(name, reader) for name, engine in engines.items() for reader in engine.late}
        return [m for m in members if m.rank == 0 and (m.backend, m.reader) in late]

    def unread(self, member: Member) -> bool:
        """Whether a reader of rank 0 that says it has everything cannot have it."""
        return not member.rank and self._engine(member.backend).unread(member.reader)

    def blamed(self, members: Sequence[Member], why: BaseException) -> list[Member]:
        """Return the members that an error of a transfer is about, as far as rank 0 can tell."""
        engines = self._group.worker.engines
        blamed = {(name, reader) for name, e in engines.items() for reader in e.blame(why)}
        return [m for m in members if m.rank == 0 and (m.backend, m.reader) in blamed]

    def withdraw(
        self, members: Sequence[Member] | None = None, *, leaves: bool | None = None
    ) -> None:
        """Have members (None: all) close what they opened; with all of them, free everything.

        `leaves` says that they belong to this fleet no more; None is no, once it was met. Who is
        gone is not missed.
        """
        parts = not self.met if leaves is None else leaves
        chosen = self._fleet.members if members is None else members
        leaving = [m for m in chosen if m.sender or (parts and m.released)]
        answers = self._fleet.ask(
            lambda member: ShutdownRequest(sender=member.sender or member.released, leaves=parts),
            timeout_s=min(self._options.timeout_s, _GOODBYE_S),
            members=leaving,
        )
        for answer in failures(answers):
            logger.debug("shutdown at %s: %s", answer.member.target, answer.error)
        for member in leaving:
            member.sender, member.released = "", "" if parts else member.sender
        if members is None:
            self._paths.clear()
            self._group.run_on_all(Withdraw())

    def _candidates(self, member: Member) -> list[Candidate]:
        member.skipped = dict(self._unusable)
        infos = self._group.rank_infos
        return candidates(member, infos, self._backends, ordered=self._ordered)

    def _backend(self, name: str) -> Backend:
        return self._group.worker.backend(name)

    def _engine(self, name: str) -> TrainerWeightTransferEngine:
        """Rank 0's engine of a backend."""
        return self._group.worker.engines[name]

    def _by_backend(self, members: Sequence[Member]) -> dict[str, list[Member]]:
        found: dict[str, list[Member]] = {}
        for member in members:
            found.setdefault(member.backend, []).append(member)
        return found

    def _go(self, member: Member, way: Candidate) -> None:
        member.rank, member.backend, member.path = way.rank, way.backend, way.path

    def _try(self, chosen: dict[Member, Candidate], fleet_version: int | None) -> list[MemberReply]:
        """Open what the chosen ways need, and offer it; return whose path does not work."""
        self._next_reader.clear()
        self._open(chosen)
        return _path_failures(self._connect(list(chosen), fleet_version))

    def _open(self, chosen: dict[Member, Candidate]) -> None:
        self._paths.clear()
        options = self._given
        for member, way in chosen.items():
            self._go(member, way)
            self._paths.setdefault(way.backend, {})[way.rank] = way.path
        for way in chosen.values():
            for base, path in self._backend(way.backend).requires.items():
                self._paths.setdefault(base, {})[way.rank] = path
        for name in self._paths:
            options = self._backend(name).adjust(options)
        self._options = options
        command = Open(
            paths=self._paths,
            packed=options.packed,
            bucket_nbytes=options.bucket_nbytes,
            num_buckets=options.num_buckets,
        )
        with self._timed("open"):
            self._group.run_on_all(command)

    def _connect(self, members: Sequence[Member], fleet_version: int | None) -> list[MemberReply]:
        """Give members all they need; of a collective backend, all of its members meet again.

        The backends whose readers fail each for itself come first; where some do, the rest waits.
        """
        answers: list[MemberReply] = []
        by_backend = self._by_backend(members)
        for name in sorted(by_backend, key=lambda name: self._backend(name).collective):
            if failures(answers):
                break
            own = by_backend[name]
            if self._backend(name).collective:
                own = [member for member in self._fleet.members if member.backend == name]
            answers += self._handshake(name, own, fleet_version)
        return answers

    def _handshake(
        self, name: str, members: Sequence[Member], fleet_version: int | None
    ) -> list[MemberReply]:
        """Lead a backend's engines through a handshake; return what each member answered last."""
        for member in members:
            self._give_place(member)
        answers: dict[Member, MemberReply] = {}
        number = next(_OFFER_NUMBERS)
        readers: dict[int, list[Reader]] = {}
        for member in members:
            readers.setdefault(member.rank, []).append(_reader(member))
        phase = "rendezvous" if self._backend(name).collective else "offer"
        with self._timed(phase):
            command = Connect(backend=name, number=number, readers=readers)
            while rounds := self._rounds(self._group.run_on_all(command), members):
                replies: dict[int, Replies] = {}
                failed: list[MemberReply] = []
                for rank, (step, asked) in rounds.items():
                    told = self._ask(name, step, asked, number, fleet_version)
                    answers.update((answer.member, answer) for answer in told)
                    failed += failures(told)
                    replies[rank] = _replies(told)
                command = Connect(backend=name, replies=replies)
                if failed:
                    over = self._group.run_on_all(command)
                    return _blamed(list(answers.values()), over)
        silent = [member.target for member in members if member not in answers]
        if silent:
            raise ConfigError(f"backend {name!r}: handshake() sent {shorten(silent)} nothing")
        return list(answers.values())

    def _rounds(
        self, told: Sequence[CommandResult], members: Sequence[Member]
    ) -> dict[int, tuple[Round, list[Member]]]:
        """What each rank's engine wants its readers to be sent next."""
        found: dict[int, tuple[Round, list[Member]]] = {}
        for rank, answer in enumerate(told):
            if answer.round is not None:
                wanted = answer.round.messages
                asked = [m for m in members if m.rank == rank and m.reader in wanted]
                found[rank] = answer.round, asked
        return found

    def _ask(
        self,
        name: str,
        step: Round,
        members: Sequence[Member],
        number: int,
        fleet_version: int | None,
    ) -> list[MemberReply]:
        def request(member: Member) -> Request:
            payload = step.messages[member.reader]
            if step.probe:
                return InitRequest(probe=ProbeRequest(backend=name, payload=payload))
            return InitRequest(
                init_info=InitInfo(
                    backend=name,
                    path=member.path,
                    protocol_min=PROTOCOL,
                    protocol_max=PROTOCOL,
                    sender=self._group.rank_infos[member.rank].sender_id,
                    manifest=self._manifest,
                    lease_s=self._options.timeout_s,
                    fleet_version=fleet_version,
                    number=number,
                    owner=self._fleet.owner(member),
                    payload=payload,
                )
            )

        timeout_s = step.patience * self._options.timeout_s
        answers = self._fleet.ask(request, timeout_s=timeout_s, members=members)
        if step.probe:
            return answers
        for i, answer in enumerate(answers):
            if answer.error is None:
                answers[i] = _same_instance(answer)
            if answers[i].error is None:
                answer.member.met(answer.status)
                answer.member.sender = self._group.rank_infos[answer.member.rank].sender_id
        return answers

    def _give_place(self, member: Member) -> None:
        """Places are never given twice: who held one before may not have noticed yet."""
        engine = member.backend, member.rank
        place = self._next_reader.get(engine, 0)
        most = self._backend(member.backend).max_readers
        if most is not None and place >= most:
            raise ConfigError(
                f"rank {member.rank} would feed more than the {most} receivers for which "
                f"its ring has places; {member.target} is one too many"
            )
        self._next_reader[engine] = place + 1
        member.reader = place

    def _serves(self, way: Candidate) -> bool:
        """Whether there is an engine for it, with a place: new ones have all their places again."""
        most = self._backend(way.backend).max_readers
        free = most is None or self._next_reader.get((way.backend, way.rank), 0) < most
        return self._paths.get(way.backend, {}).get(way.rank) == way.path and free

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        if not self.unreported:
            self.seconds.clear()
            self.unreported = True
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took


def _reader(member: Member) -> Reader:
    return Reader(
        index=member.reader,
        target=member.target,
        keys=list(member.keys),
        route=member.transport.target,
        local_address=getattr(member.transport, "local_address", None),
        facts=member.backends.get(member.backend),
    )


def _replies(answers: Sequence[MemberReply]) -> Replies:
    """What an engine is told of a round."""
    payloads = {
        answer.member.reader: answer.reply.payload
        for answer in answers
        if isinstance(answer.reply, InitReply)
    }
    return Replies(payloads=payloads, failed=[answer.member.reader for answer in failures(answers)])


def _blamed(answers: list[MemberReply], over: Sequence[CommandResult]) -> list[MemberReply]:
    """Leave out those who failed only because others did."""
    excused = {(rank, reader) for rank, told in enumerate(over) for reader in told.excused}
    return [a for a in answers if (a.member.rank, a.member.reader) not in excused]


def _path_failures(answers: Sequence[MemberReply]) -> list[MemberReply]:
    """Return the answers that say that a path cannot work; raise any other error."""
    failed = failures(answers)
    others = [answer for answer in failed if not isinstance(answer.error, _PATH_ERRORS)]
    raise_first(others, "init")
    for answer in failed:
        answer.member.skipped[answer.member.path] = str(answer.error)
    return failed


def _same_instance(answer: MemberReply) -> MemberReply:
    """An error where somebody else answered than the one who was asked who it is."""
    asked, told = answer.member.instance, answer.status.instance
    if asked == told:
        return answer
    error = ProtocolError(
        f"{answer.member.target} answered as instance {asked} and then as {told}: it was restarted "
        "in between, or several receivers stand behind it; name each of them by itself"
    )
    return MemberReply(answer.member, error=error)


def _unavailable(members: Sequence[Member]) -> WeightSyncError:
    reasons = "; ".join(
        f"{member.target}: {path}: {reason}"
        for member in members
        for path, reason in member.skipped.items()
    )
    return BackendUnavailableError(f"no path works to {reasons or 'anyone'}")
