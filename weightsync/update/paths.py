"""Which path reaches which receiver: the fastest candidate that passes its probe."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

from msgspec.structs import replace

from weightsync.backends.ipc.sender import IpcOptions
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    HandleError,
    ProtocolError,
    SegmentError,
    WeightSyncError,
)
from weightsync.ranks.group import RankGroup
from weightsync.ranks.worker import (
    RELAY_READER,
    CommandResult,
    Export,
    Open,
    Places,
    Probe,
    RankInfo,
    Withdraw,
)
from weightsync.update.fleet import Fleet, Member, MemberReply, failures, raise_first
from weightsync.update.rendezvous import Rendezvous, host_of
from weightsync.wire.messages import InitRequest, ShutdownRequest
from weightsync.wire.offers import IpcInit, ProbeInfo

Backend = Literal["auto", "ipc", "distributed"]
PathName = Literal["cuda_ipc", "shared_memory", "distributed"]
BACKENDS: tuple[Backend, ...] = ("auto", "ipc", "distributed")


@dataclass(frozen=True, slots=True)
class Candidate:
    """The rank that feeds a receiver, and the path."""

    rank: int
    path: PathName


def check_backend(backend: str, *, packed: bool | None = None) -> None:
    """Raise ConfigError for a backend that there is not, or that cannot send so."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "distributed" and packed is False:
        raise ConfigError("the distributed backend streams: leave packed out, or say True")


def candidates(member: Member, cards: Sequence[RankInfo], backend: str) -> list[Candidate]:
    """Return the ways to a member, fastest first; why one is not among them goes to `skipped`.

    The keys are hints: a probe decides.
    """
    found: list[Candidate] = []
    if backend != "distributed":
        found += _cuda_ipc(member, cards)
        found += _shared_memory(member, cards)
    if backend != "ipc":
        found.append(Candidate(0, "distributed"))
    return found


def _cuda_ipc(member: Member, cards: Sequence[RankInfo]) -> list[Candidate]:
    on_gpu = [rank for rank, card in enumerate(cards) if card.on_gpu]
    if not on_gpu:
        return []
    same = [rank for rank in on_gpu if cards[rank].keys[0] in member.keys]
    if not same:
        member.skipped["cuda_ipc"] = (
            f"the receiver is on {', '.join(member.keys)}, the trainer's GPUs are "
            f"{', '.join(cards[rank].keys[0] for rank in on_gpu)}"
        )
        return []
    refused = cards[same[0]].no_cuda_ipc
    if refused is not None:
        member.skipped["cuda_ipc"] = refused
        return []
    return [Candidate(same[0], "cuda_ipc")]


def _shared_memory(member: Member, cards: Sequence[RankInfo]) -> list[Candidate]:
    same_host = [rank for rank, card in enumerate(cards) if card.keys[-1] in member.keys]
    if not same_host:
        hosts = sorted({card.keys[-1] for card in cards})
        member.skipped["shared_memory"] = (
            f"the receiver is on host {member.host or 'unknown'}, the trainer on {', '.join(hosts)}"
        )
        return []
    same_gpu = [rank for rank in same_host if cards[rank].keys[0] in member.keys]
    return [Candidate((same_gpu or same_host)[0], "shared_memory")]


def assign(wishes: dict[Member, list[Candidate]]) -> dict[Member, Candidate]:
    """Choose for every member the first of its ways that its rank can offer to all it feeds.

    A rank has one ring: on the GPU for `cuda_ipc`, on the host for the other two.
    """
    chosen = {member: left[0] for member, left in wishes.items()}
    on_host = {way.rank for way in chosen.values() if way.path != "cuda_ipc"}
    for member, way in chosen.items():
        others = [other for other in wishes[member] if other.path == "shared_memory"]
        if way.path == "cuda_ipc" and way.rank in on_host and others:
            member.skipped["cuda_ipc"] = (
                f"rank {way.rank} feeds another receiver from host memory, and one ring serves all"
            )
            chosen[member] = others[0]
    return chosen


logger = logging.getLogger(__name__)

_PATH_ERRORS = (HandleError, SegmentError, BackendUnavailableError)
"""What says that a path cannot work, and not that the call was wrong."""
_GOODBYE_S = 10.0


class PathSelector:
    """The way to every member of a fleet, on rank 0.

    `take` finds it, `offer` gives members that do not know this sender what they need again,
    `withdraw` ends it. `seconds` is what finding it last took, by phase;
    `unreported` until a report has said so. `met` says that the fleet was connected once.
    """

    def __init__(
        self, group: RankGroup, fleet: Fleet, options: IpcOptions, *, backend: str
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.unreported = False
        self.met = False
        self.packed = False
        self._group = group
        self._fleet = fleet
        self._options = options
        self._backend = backend
        self._rendezvous = Rendezvous(group.worker, fleet, options)
        self._rings: dict[int, Literal["cuda_ipc", "shared_memory"]] = {}
        self._next_reader: dict[int, int] = {}
        self._relayed = False
        self._joined: set[Member] = set()
        self._heard: dict[tuple[int, int], int] = {}
        self._trusted = 0

    @property
    def layout(self) -> str:
        """Names how the stream is cut: the same weights have the same table in one layout alone."""
        return f"packed={self.packed} relayed={self._relayed}"

    def take(self, fleet_version: int | None) -> None:
        """Connect every member by the fastest path that works for it.

        Raises BackendUnavailableError with the reason of each path when none does, and what a
        member raised when the tensors do not fit it.
        """
        members = self._fleet.members
        wishes: dict[Member, list[Candidate]] = {}
        for member in members:
            member.skipped = {}
            wishes[member] = candidates(member, self._group.rank_infos, self._backend)
        while True:
            self._refuse_lost(wishes)
            chosen = assign(wishes)
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
        """Give members all they need, by the path that they have. Raises what the first raised.

        One member of the private group more or less is another group, so all of it meets again.
        """
        local = [member for member in members if member.path != "distributed"]
        for member in local:
            self._give_place(member)
        answers = self._offer_local(local, fleet_version)
        if len(local) != len(members):
            answers += self._meet(fleet_version)
        raise_first(answers, "init")

    def extend(self, member: Member, fleet_version: int | None) -> bool:
        """Connect one member more, or again; False when that takes other rings than there are."""
        member.skipped = {}
        for way in candidates(member, self._group.rank_infos, self._backend):
            if not self._serves(way):
                return False
            member.rank, member.path = way.rank, way.path
            try:
                if way.path == "distributed" and fleet_version:
                    # Alone: it is brought up to date before an update of everyone, if there is any.
                    raise_first(self._meet(fleet_version, [member]), "init")
                else:
                    self.offer([member], fleet_version)
            except _PATH_ERRORS as exc:
                logger.warning("%s: path %s: %s", member.target, way.path, exc)
                member.skipped[way.path] = str(exc)
            else:
                return True
        raise _unavailable([member])

    def apart(self, members: Sequence[Member]) -> bool:
        """Whether the private group has to be made anew before an update of these members.

        A group of others too would wait for them: all of it takes part in every update.
        """
        remote = {member for member in members if member.path == "distributed"}
        return bool(remote) and (self._rendezvous.broken or remote != self._joined)

    def repair(
        self, fleet_version: int | None, members: Sequence[Member] | None = None
    ) -> list[MemberReply]:
        """Make the private group anew, of these members; return what each of them answered."""
        return self._meet(fleet_version, members)

    def forget(self, member: Member) -> None:
        """A member left the fleet; without it the private group is another one."""
        self._joined.discard(member)
        if member.path != "distributed":
            return
        self._rendezvous.parted = True
        if not any(m.path == "distributed" for m in self._fleet.members if m is not member):
            self._rendezvous.leave()

    def places(self, members: Sequence[Member]) -> Places:
        """Return the reader places of an update of these members."""
        places: Places = {}
        for member in members:
            if member.path == "distributed":
                if RELAY_READER not in places.setdefault(0, []):
                    places[0].append(RELAY_READER)
            else:
                places.setdefault(member.rank, []).append(member.reader)
        return places

    def feeds(self, member: Member, members: Sequence[Member]) -> list[int] | None:
        """Return the places that a member of the private group feeds on its host, of `members`."""
        if member.path != "distributed" or member.reader != 0:
            return None
        return [other.reader for other in members if other.group_rank == member.group_rank]

    def beat(self, member: Member) -> Hashable | None:
        """Return what grows while a reader lives and works; None where it is not seen."""
        worker = self._group.worker
        if member.path == "distributed":
            relay, rank = worker.relay, member.group_rank
            return relay.signs(rank, member.reader) if relay is not None and rank else None
        if member.rank:
            return self._trusted, self._heard.get((member.rank, member.reader))
        return worker.engine.signs(member.reader) if worker.engine is not None else None

    def trust(self) -> None:
        """While ranks hand over, each bounds the waits for its own readers: none is silent here."""
        self._trusted += 1

    def heard(self, told: Sequence[CommandResult]) -> None:
        """Take in what the ranks see of their own readers."""
        for rank, answer in enumerate(told):
            self._heard.update({(rank, reader): n for reader, n in answer.beats.items()})

    def late(self, members: Sequence[Member]) -> list[Member]:
        """Return those for which rank 0's ring waited in vain."""
        engine = self._group.worker.engine
        late = engine.late if engine is not None else ()
        return [m for m in members if m.rank == 0 and m.path != "distributed" and m.reader in late]

    def unread(self, member: Member) -> bool:
        """Whether a reader of rank 0's own ring has not released all chunks of this update."""
        engine = self._group.worker.engine
        if engine is None or not self.packed or member.rank or member.path == "distributed":
            return False
        stream = engine.stream
        return stream.control.released(member.reader) < stream.base + len(stream.plan.chunks)

    def lost(self, members: Sequence[Member], why: BaseException) -> list[Member]:
        """Return the members of the private group whose hosts it names as the reason."""
        said = f"{why} {self._rendezvous.failure}"
        return [m for m in members if m.path == "distributed" and host_of(m.target) in said]

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
            self._rings.clear()
            self._joined.clear()
            self._group.run_on_all(Withdraw())

    def _try(self, chosen: dict[Member, Candidate], fleet_version: int | None) -> list[MemberReply]:
        """Open what the chosen ways need, and offer it; return whose path does not work."""
        self._next_reader.clear()
        self._open(chosen)
        with self._timed("offer"):
            local = [member for member in chosen if member.path != "distributed"]
            for member in local:
                self._give_place(member)
            answers = self._offer_local(local, fleet_version)
        failed = _path_failures(answers)
        if not failed and len(local) != len(chosen):
            failed = _path_failures(self._meet(fleet_version))
        return failed

    def _open(self, chosen: dict[Member, Candidate]) -> None:
        self._rings.clear()
        for member, way in chosen.items():
            member.rank, member.path = way.rank, way.path
            ring = "cuda_ipc" if way.path == "cuda_ipc" else "shared_memory"
            self._rings[way.rank] = cast(Literal["cuda_ipc", "shared_memory"], ring)
        relayed = any(way.path == "distributed" for way in chosen.values())
        self._relayed = relayed
        wanted = self._options.packed
        self.packed = relayed or (self._flows() if wanted is None else wanted)
        with self._timed("open"):
            self._group.run_on_all(Open(paths=self._rings, packed=self.packed, relayed=relayed))

    def _flows(self) -> bool:
        """Whether tensors cannot be read where they are: made on the way, or on a GPU.

        Those of a GPU that nobody can open pass through the host, chunk by chunk.
        """
        cards = self._group.rank_infos
        crossing = any(
            cards[rank].on_gpu and ring == "shared_memory" for rank, ring in self._rings.items()
        )
        return crossing or not cards[0].stable or not self._options.adopt

    def _offer_local(
        self, members: Sequence[Member], fleet_version: int | None
    ) -> list[MemberReply]:
        """Probe where an export that nobody opens would never be freed, then offer everything."""
        if not members:
            return []
        refused = self._probe([member for member in members if member.path == "cuda_ipc"])
        if refused:
            return refused
        places = _places_of(members)
        told = self._group.run_on_all(Export(places=places, fleet_version=fleet_version))
        inits: dict[Member, IpcInit] = {}
        for rank, answer in enumerate(told):
            there = [member for member in members if member.rank == rank]
            inits.update(zip(there, answer.inits, strict=True))
        owner = self._fleet.owner
        return self._init({m: replace(inits[m], owner=owner(m)) for m in members})

    def _probe(self, members: Sequence[Member]) -> list[MemberReply]:
        if not members:
            return []
        told = self._group.run_on_all(Probe(places=_places_of(members)))
        probes: dict[Member, ProbeInfo] = {}
        for rank, answer in enumerate(told):
            there = [member for member in members if member.rank == rank]
            probes.update(zip(there, answer.probes, strict=True))
        return failures(
            self._fleet.ask(
                lambda member: InitRequest(probe=probes[member]),
                timeout_s=self._options.timeout_s,
                members=members,
            )
        )

    def _init(self, inits: dict[Member, IpcInit]) -> list[MemberReply]:
        answers = self._fleet.ask(
            lambda member: InitRequest(init_info=inits[member]),
            timeout_s=self._options.timeout_s,
            members=list(inits),
        )
        for i, answer in enumerate(answers):
            if answer.error is None:
                answers[i] = _same_instance(answer)
            if answers[i].error is None:
                answer.member.met(answer.status)
                answer.member.sender = inits[answer.member].sender
        return answers

    def _meet(
        self, fleet_version: int | None, among: Sequence[Member] | None = None
    ) -> list[MemberReply]:
        engine = self._group.worker.engine
        chosen = self._fleet.members if among is None else among
        members = [member for member in chosen if member.path == "distributed"]
        self._joined.clear()
        for member in self._fleet.members:
            member.group_rank = 0  # of a group that ends now
        if not members:
            self._rendezvous.leave()
            return []
        with self._timed("rendezvous"):
            answers = self._rendezvous.meet(members, fleet_version)
        for answer in answers:
            if answer.error is None and engine is not None:
                answer.member.met(answer.status)
                answer.member.sender = engine.sender_id
        if not failures(answers):
            self._joined.update(members)
        return answers

    def _give_place(self, member: Member) -> None:
        """Places are never given twice: who held one before may not have noticed yet."""
        place = self._next_reader.get(member.rank, 0)
        if place >= RELAY_READER:
            raise ConfigError(
                f"rank {member.rank} would feed more than the {RELAY_READER} receivers for which "
                f"its ring has places; {member.target} is one too many"
            )
        self._next_reader[member.rank] = place + 1
        member.reader = place
        member.group_rank = 0

    def _serves(self, way: Candidate) -> bool:
        """Whether there is a ring for it, with a place: new rings have all their places again."""
        ring = self._rings.get(way.rank)
        if way.path == "distributed":
            return self._group.worker.relay is not None and ring == "shared_memory"
        return ring == way.path and self._next_reader.get(way.rank, 0) < RELAY_READER

    def _refuse_lost(self, wishes: dict[Member, list[Candidate]]) -> None:
        lost = [member for member, left in wishes.items() if not left]
        if lost:
            raise _unavailable(lost)

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


def _places_of(members: Sequence[Member]) -> Places:
    places: Places = {}
    for member in members:
        places.setdefault(member.rank, []).append(member.reader)
    return places


def _unavailable(members: Sequence[Member]) -> WeightSyncError:
    reasons = "; ".join(
        f"{member.target}: {path}: {reason}"
        for member in members
        for path, reason in member.skipped.items()
    )
    return BackendUnavailableError(f"no path works to {reasons or 'anyone'}")
