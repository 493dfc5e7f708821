"""Selects the path to each receiver: the cheapest candidate that passes its probe."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weightsync.backends.base import (
    Backend,
    Endpoint,
    Reach,
    Reader,
    ReaderChanges,
    Replies,
    Round,
    TransferOptions,
    part,
)
from weightsync.backends.registry import adjusted, check_name
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    HandleError,
    ProtocolError,
    SegmentError,
    WeightSyncError,
    shorten,
)
from weightsync.ranks.commands import Connect, Open, RankInfo, Withdraw
from weightsync.specs import FLOATING
from weightsync.update.fleet import Fleet, Member, MemberReply, failures, raise_first
from weightsync.weights.copying.rank_streams import describe_stream
from weightsync.wire.codec import manifest_to_wire
from weightsync.wire.messages import InitReply, InitRequest, Protocols, Request, ShutdownRequest
from weightsync.wire.offers import InitInfo, ProbeRequest, StreamsInfo, WantsInfo

logger = logging.getLogger(__name__)

_PATH_ERRORS = (HandleError, SegmentError, BackendUnavailableError)
"""Errors that mean that a path does not work. Any other error is of the call."""
_GENERATIONS = itertools.count(1)
"""Generations of the init messages of this process: the engines of a sender share its id."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible path to a receiver: the trainer rank that sends, the backend and the cost.

    `gpus` as in Reach.
    """

    rank: int
    backend: str
    path: str
    cost: float
    gpus: tuple[str, str] | None = None


def candidates(
    member: Member, ranks: Sequence[RankInfo], backends: Sequence[Backend], *, ordered: bool = False
) -> list[Candidate]:
    """Return the candidates for a member, cheapest first; adds reasons to `member.skipped`.

    `skipped` then has the reason for every path that is no candidate. With `ordered` the order of
    the backends precedes the cost.
    """
    found: list[tuple[int, float, Candidate]] = []
    reasons: dict[str, dict[str, None]] = {}
    for place, backend in enumerate(backends):
        name, there = backend.name, member.status
        if name not in there.backends:
            why = there.unusable_backends.get(name, "the receiver does not know this backend")
            reasons.setdefault(name, {})[why] = None
            continue
        theirs = Endpoint(keys=there.device_keys, facts=there.backends[name])
        best: dict[str, Candidate] = {}
        for rank, info in enumerate(ranks):
            if name in info.unusable:
                reasons.setdefault(name, {})[info.unusable[name]] = None
                continue
            ours = Endpoint(keys=info.keys, rank=rank, facts=info.backends.get(name))
            for reach in reaches(backend, ours, theirs):
                why_not = member.why_refused(reach.path) or reach.why_not
                if why_not:
                    reasons.setdefault(reach.path, {})[why_not] = None
                elif reach.path not in best or reach.cost < best[reach.path].cost:
                    best[reach.path] = Candidate(rank, name, reach.path, reach.cost, reach.gpus)
        for candidate in best.values():
            reasons.pop(candidate.path, None)
            found.append((place if ordered else 0, candidate.cost, candidate))
    member.skipped.update({path: "; ".join(why) for path, why in reasons.items()})
    return [candidate for _, _, candidate in sorted(found, key=lambda entry: entry[:2])]


def reaches(backend: Backend, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
    """Return a backend's reaches. Raises ConfigError where it returns anything else.

    An error of the method itself is a reason: the facts come from another process.
    """
    try:
        reached = backend.reach(trainer, receiver)
    except Exception as exc:  # noqa: BLE001  # foreign code
        why_not = f"reach() failed: {type(exc).__name__}: {exc}"
        return [Reach(backend.name, why_not=why_not)]
    listed = [reached] if isinstance(reached, Reach) else reached
    whole = isinstance(listed, list | tuple) and listed
    if not whole or not all(isinstance(reach, Reach) for reach in listed):
        raise ConfigError(f"backend {backend.name!r}: reach() returned {reached!r}, not a Reach")
    for reach in listed:
        check_name(reach.path, f"backend {backend.name!r}: the path that reach() returned")
    return listed


def assign(
    candidates_of: Mapping[Member, Sequence[Candidate]],
    requires: Callable[[str], Mapping[str, str]],
) -> dict[Member, Candidate]:
    """Choose for every member its first candidate that fits the engine of its rank.

    A backend has one engine on a rank, which takes one path for all of its receivers. That is the
    path that a backend built on this engine requires, or else the most expensive one chosen.
    """
    chosen = {member: listed[0] for member, listed in candidates_of.items()}
    path_of: dict[tuple[int, str], tuple[float, str]] = {}
    for first in chosen.values():
        engine = first.rank, first.backend
        path_of[engine] = max(
            path_of.get(engine, (first.cost, first.path)), (first.cost, first.path)
        )
    for first in chosen.values():
        for base, path in requires(first.backend).items():
            path_of[first.rank, base] = math.inf, path
    for member, first in chosen.items():
        _, path = path_of[first.rank, first.backend]
        others = [c for c in candidates_of[member] if (c.backend, c.path) == (first.backend, path)]
        if first.path != path and others:
            member.skipped[first.path] = (
                f"rank {first.rank} sends to another receiver by {path}, and its engine takes one "
                "path for all"
            )
            chosen[member] = others[0]
    return chosen


class PathSelector:
    """Selects and connects the path to every member of a fleet. Used on rank 0.

    `connect_all` selects the paths, `offer` connects members again that do not know this sender,
    `withdraw` closes everything. `seconds` has the duration of the last selection, by phase, and is
    `unreported` until a report includes it. `connected_once` is True once the fleet was connected.
    `backends` are tried in their order with `ordered`, otherwise by the cost of their paths.
    `unusable` has the reasons against other backends. `why_gathered` is the reason, if there is
    one, why several ranks gather the tensors since the last connection.
    """

    def __init__(
        self,
        fleet: Fleet,
        options: TransferOptions,
        backends: Sequence[Backend],
        *,
        ordered: bool,
        unusable: Mapping[str, str],
    ) -> None:
        self._wants: list[WantsInfo] = []
        self._spanning: frozenset[str] = frozenset()
        self.why_gathered = ""
        self.seconds: dict[str, float] = {}
        self.unreported = False
        self.connected_once = False
        self._group = fleet.group
        self._fleet = fleet
        self._given = self._options = options
        self._backends = backends
        self._ordered = ordered
        self._unusable = unusable
        self._paths: dict[str, dict[int, str]] = {}
        self._next_reader: dict[tuple[str, int], int] = {}
        self._manifest = manifest_to_wire(fleet.group.manifest, fleet.group.worker.may_cast)
        self._warned: set[Member] = set()
        self._removed: dict[str, list[int]] = {}

    @property
    def layout(self) -> str:
        """Identifies the cut of the stream. Fingerprints are comparable within one layout only."""
        options = self._options
        cut = options.packed, options.bucket_nbytes, options.num_buckets
        if self._spanning:
            digest = self._group.worker.cut_plan(self._wants).digest
            return f"{digest} {self._listed_paths(self._spanning)} {cut}"
        return f"{self._listed_paths(self._paths)} {cut}"

    def _listed_paths(self, backends: Iterable[str]) -> str:
        return str([(name, sorted(self._paths[name].items())) for name in sorted(backends)])

    def connect_all(self) -> None:
        """Connect every member by the cheapest path that works for it.

        By a path that spans the ranks where one reaches all members: no rank gathers then. Raises
        BackendUnavailableError with the reason of each path when none works, and the error of a
        member that the tensors do not fit.
        """
        members = self._fleet.members
        if self._connect_spanning(members):
            return
        candidates_of = {member: self._candidates(member) for member in members}
        while True:
            unreachable = [member for member, left in candidates_of.items() if not left]
            if unreachable:
                raise _unavailable(unreachable)
            chosen = assign(candidates_of, lambda name: self._backend(name).requires)
            try:
                self._open(chosen)
            except BackendUnavailableError as exc:
                self.withdraw()
                failed = _of_gpus(chosen, exc)
                if not failed:
                    raise
            except BaseException:
                self.withdraw()
                raise
            else:
                failed = self._connected(list(chosen))
            if not failed:
                return
            self.withdraw()
            for answer in failed:
                tried = chosen[answer.member]
                logger.warning("%s: path %s: %s", answer.member.target, tried.path, answer.error)
                candidates_of[answer.member].remove(tried)

    def _connected(self, members: Sequence[Member]) -> list[MemberReply]:
        """Connect members whose engines are open; return the results of paths that do not work."""
        try:
            return _path_failures(self._connect(members))
        except BaseException:
            self.withdraw()
            raise

    def _connect_spanning(self, members: Sequence[Member]) -> bool:
        """Connect all members so that each rank sends what it holds; False where that fails.

        `why_gathered` then has the reason.
        """
        group = self._group
        self.why_gathered = ""
        if group.comm.size == 1:
            return False
        self.why_gathered = group.worker.plan.why_not
        if self.why_gathered:
            return False
        refused: dict[tuple[Member, str], str] = {}
        while True:
            found = span_ranks(
                members, group.rank_infos, self._backends, refused, ordered=self._ordered
            )
            if not isinstance(found, str) and self._is_nearer(members, found):
                found = "each rank has all tensors, and one on the host of each receiver sends them"
            if isinstance(found, str):
                self.why_gathered = self.why_gathered or found
                break
            try:
                failed = self._open_spanning(found, refused)
                if not failed and self._note_wants(members):
                    self.withdraw()
                    failed = self._open_spanning(found, refused)
            except BackendUnavailableError as exc:  # of a rank, when it makes its engines
                logger.warning("the ranks gather all tensors: %s", exc)
                self.why_gathered = str(exc)
                break
            if not failed:
                group.sends_streams, self._spanning = True, frozenset(found)
                self.why_gathered = ""
                return True
            self.withdraw()
            refused.update(_refusals(failed))
            self.why_gathered = f"{failed[0].member.target}: {failed[0].error}"
            logger.warning("the ranks do not send their own parts so: %s", self.why_gathered)
        for member in members:
            member.ranks = ()
        return False

    def _is_nearer(self, members: Sequence[Member], found: Mapping[str, Spanning]) -> bool:
        """Whether single ranks, which hold all tensors, reach all members by cheaper paths."""
        if not self._group.worker.plan.is_replicated:
            return False
        listed = [self._candidates(member) for member in members]
        single = max((min(c.cost for c in each) for each in listed if each), default=math.inf)
        costs = [reach.cost for spanning in found.values() for reach in spanning.paths.values()]
        return all(listed) and single < max(costs, default=0.0)

    def _open_spanning(
        self, found: Mapping[str, Spanning], refused: Mapping[tuple[Member, str], str]
    ) -> list[MemberReply]:
        """Connect all members to the streams of all ranks; return the results that failed."""
        members: list[Member] = []
        for backend, spanning in found.items():
            for member in spanning.members:
                self._candidates(member)  # for the reasons against other paths
                self._set_spanning(member, backend, spanning.paths, refused)
            members += spanning.members
        try:
            self._open({}, streams={name: spanning.paths for name, spanning in found.items()})
        except BackendUnavailableError as exc:
            self.withdraw()
            failed = _of_gpus(members, exc)
            if not failed:
                raise
            return failed
        except BaseException:
            self.withdraw()
            raise
        return self._connected(members)

    def _note_wants(self, members: Sequence[Member]) -> bool:
        """Note the boxes that members load; whether these are others than were known before.

        Then the boxes of the ranks are cut otherwise, and the engines get to know what each reader
        wants. Receivers of whole tensors have no part in that.
        """
        listed: list[WantsInfo] = []
        for member in members:
            if member.wants is not None and member.wants not in listed:
                listed.append(member.wants)
        self._group.worker.cut_plan(listed)  # raises unless they are boxes of these tensors
        before, self._wants = self._wants, listed
        return before != listed

    def _set_spanning(
        self,
        member: Member,
        backend: str,
        paths: Mapping[int, Reach],
        refused: Mapping[tuple[Member, str], str],
    ) -> None:
        """Have every rank send to a member. Its path is the most expensive one of all ranks."""
        worst = max(paths.values(), key=lambda reach: reach.cost)
        member.rank, member.ranks = 0, tuple(paths)
        member.backend, member.path, member.cost = backend, worst.path, worst.cost
        member.gpus = {}
        for rank, taken in paths.items():
            for reach in self._reaches_of(member, rank, backend):
                if reach.path == taken.path:
                    member.note_gpus(rank, reach.path, reach.gpus)
                    continue
                why_not = (
                    refused.get((member, reach.path))
                    or member.why_refused(reach.path)
                    or (reach.why_not and f"rank {rank}: {reach.why_not}")
                )
                if not why_not and reach.cost < taken.cost:
                    why_not = f"rank {rank}: its engine takes one path for all receivers"
                if why_not:
                    member.skipped.setdefault(reach.path, why_not)

    def _reaches_of(self, member: Member, rank: int, backend: str) -> Sequence[Reach]:
        """Return the paths of a backend from a rank to a member."""
        info, there = self._group.rank_infos[rank], member.status
        ours = Endpoint(keys=info.keys, rank=rank, facts=info.backends.get(backend))
        theirs = Endpoint(keys=there.device_keys, facts=there.backends[backend])
        return reaches(self._backend(backend), ours, theirs)

    def offer(self, members: Sequence[Member]) -> None:
        """Connect members by the path that they have. Raises the first error."""
        raise_first(self._connect(members))

    def extend(self, member: Member) -> bool:
        """Connect a new member, or a member again; False where that needs other engines.

        Raises BackendUnavailableError where no path works.
        """
        if self._spanning:
            return self._extend_spanning(member)
        for candidate in self._candidates(member):
            if not self._has_engine(candidate):
                return False
            self._set_path(member, candidate)
            try:
                self.offer([member])
            except _PATH_ERRORS as exc:
                logger.warning("%s: path %s: %s", member.target, candidate.path, exc)
                member.skipped[candidate.path] = str(exc)
            else:
                return True
        raise _unavailable([member])

    def _extend_spanning(self, member: Member) -> bool:
        """Connect a member to the streams of all ranks; False where that needs other engines."""
        found = span_ranks(
            [member], self._group.rank_infos, self._backends, set(), ordered=self._ordered
        )
        if isinstance(found, str):
            return False
        ((name, spanning),) = found.items()
        if name not in self._spanning or self._is_full(name, 0):
            return False
        if {rank: reach.path for rank, reach in spanning.paths.items()} != self._paths[name]:
            return False
        self._candidates(member)  # for the reasons against other paths
        self._set_spanning(member, name, spanning.paths, {})
        try:
            self.offer([member])
        except _PATH_ERRORS as exc:
            logger.warning("%s: path %s: %s", member.target, member.path, exc)
            return False
        return member.wants is None or member.wants in self._wants

    def repair(self, members: Sequence[Member]) -> list[MemberReply]:
        """Connect again the members whose engine is not ready for them; return their results."""
        answers: list[MemberReply] = []
        for name, own in _by_backend(members).items():
            engine = self._group.worker.engines.get(name)
            if engine is None:
                continue
            of_rank = [member for member in own if member.rank == 0]
            lost = part(engine, ReaderChanges).unready([member.reader for member in of_rank])
            unready = [member for member in of_rank if member.reader in lost]
            if unready:
                answers += self._handshake(name, unready, [member.reader for member in of_rank])
        return answers

    def remove(self, member: Member) -> None:
        """Remove a former member from its trainer engine."""
        engine = self._group.worker.engines.get(member.backend)
        if engine is not None and member.rank == 0:
            part(engine, ReaderChanges).remove_reader(member.reader)
            if member.ranks:  # the other ranks do so before their next handshake
                self._removed.setdefault(member.backend, []).append(member.reader)

    def withdraw(
        self, members: Sequence[Member] | None = None, *, leaves: bool | None = None
    ) -> None:
        """Shut down the engines of members; with None, of all members, and free all memory.

        With `leaves` they do not belong to this fleet any more; None means True until the fleet was
        connected once. Errors of members are only logged.
        """
        parts = not self.connected_once if leaves is None else leaves
        chosen = self._fleet.members if members is None else members
        leaving = [m for m in chosen if m.sender or (parts and m.released)]
        answers = self._fleet.call(
            lambda member: ShutdownRequest(sender=member.sender or member.released, leaves=parts),
            leaving,
            timeout_s=self._fleet.brief_s,
        )
        for answer in failures(answers):
            logger.debug("shutdown at %s: %s", answer.member.target, answer.error)
        for member in leaving:
            member.sender, member.released = "", "" if parts else member.sender
        if members is None:
            self._paths.clear()
            self._spanning, self._group.sends_streams = frozenset(), False
            self._removed.clear()
            self._group.run_on_all(Withdraw())

    @property
    def sends_streams(self) -> bool:
        """Whether each rank sends what it holds, or did when the fleet was connected last."""
        return self._group.comm.size > 1 and not self.why_gathered

    def _candidates(self, member: Member) -> list[Candidate]:
        member.skipped = dict(self._unusable)
        infos = self._group.rank_infos
        return candidates(member, infos, self._backends, ordered=self._ordered)

    def _backend(self, name: str) -> Backend:
        return self._group.worker.backend(name)

    def _set_path(self, member: Member, chosen: Candidate) -> None:
        member.ranks = ()
        member.rank, member.backend, member.path = chosen.rank, chosen.backend, chosen.path
        member.cost = chosen.cost
        member.gpus = {}
        member.note_gpus(chosen.rank, chosen.path, chosen.gpus)

    def _open(
        self,
        chosen: dict[Member, Candidate],
        *,
        streams: Mapping[str, Mapping[int, Reach]] | None = None,
    ) -> None:
        """Have every rank open the engines for the chosen paths, or for those of its stream."""
        self._next_reader.clear()
        self._paths.clear()
        options = self._given
        for member, candidate in chosen.items():
            self._set_path(member, candidate)
            self._paths.setdefault(candidate.backend, {})[candidate.rank] = candidate.path
        for candidate in chosen.values():
            for base, path in self._backend(candidate.backend).requires.items():
                self._paths.setdefault(base, {})[candidate.rank] = path
        for name, reaches_of in (streams or {}).items():
            self._paths[name] = {rank: reach.path for rank, reach in reaches_of.items()}
            for base, path in self._backend(name).requires.items():
                self._paths[base] = dict.fromkeys(reaches_of, path)
        options = replace(options, streams=self._group.comm.size if streams else 1)
        for name in self._paths:
            options = adjusted(self._backend(name), options)
        self._options = options
        command = Open(
            streams=self._group.worker.cut_plan(self._wants).digest if streams else "",
            wants=self._wants if streams else [],
            paths=self._paths,
            packed=options.packed,
            bucket_nbytes=options.bucket_nbytes,
            num_buckets=options.num_buckets,
        )
        with self._timed("open"):
            self._group.run_on_all(command)

    def _connect(self, members: Sequence[Member]) -> list[MemberReply]:
        """Connect members. Where one fails, the remaining backends are not connected.

        All members of a backend fail where a rank cannot use it.
        """
        answers: list[MemberReply] = []
        by_backend = _by_backend(members)
        for name, own in by_backend.items():
            if failures(answers):
                break
            try:
                answers += self._handshake(name, own)
            except BackendUnavailableError as exc:
                answers += [MemberReply(member, error=exc) for member in own]
        return answers

    def _handshake(
        self, name: str, members: Sequence[Member], using: Sequence[int] = ()
    ) -> list[MemberReply]:
        """Run the handshake of a backend's engines; return the last result of each member.

        A rank whose probes are answered waits for the others: one init message of a member has
        what all ranks offer to it. `using` are the readers of the next update, where rank 0's
        engine found `members` unready among them.
        """
        readers: dict[int, list[Reader]] = {}
        infos = self._group.rank_infos
        for member in members:
            self._assign_index(member)
            for rank in member.sending:
                here = infos[rank].keys[-1] == infos[0].keys[-1]
                readers.setdefault(rank, []).append(_reader(member, same_host=here))
        answers: dict[Member, MemberReply] = {}
        waiting: dict[int, Round] = {}
        generation = next(_GENERATIONS)
        command = Connect(
            backend=name,
            generation=generation,
            readers=readers,
            removed=self._removed.pop(name, []),
            using=list(using),
            wants={
                member.reader: self._wants.index(member.wants)
                for member in members
                if member.ranks and member.wants is not None and member.wants in self._wants
            },
        )
        with self._timed("offer"), ExitStack() as stack:
            # Where this raises, an interrupt included. The handshakes of other ranks end with the
            # next one, or when their engines are closed.
            stack.callback(self._group.worker.end_handshake, name)
            while True:
                results = self._group.run_on_all(command)
                if command.over:
                    return list(answers.values())
                waiting.update(
                    (rank, result.round)
                    for rank, result in enumerate(results)
                    if result.round is not None
                )
                if not waiting:
                    break
                replies = self._send_rounds(name, waiting, members, generation, answers)
                failed = {rank: reply for rank, reply in replies.items() if reply.failed}
                command = Connect(backend=name, replies=failed or replies, over=bool(failed))
        silent = [member.target for member in members if member not in answers]
        if silent:
            raise ConfigError(f"backend {name!r}: handshake() sent {shorten(silent)} nothing")
        return list(answers.values())

    def _send_rounds(
        self,
        name: str,
        waiting: dict[int, Round],
        members: Sequence[Member],
        generation: int,
        answers: dict[Member, MemberReply],
    ) -> dict[int, Replies]:
        """Send the probes that wait, or else the init messages; return the replies by rank."""
        replies: dict[int, Replies] = {}
        probing = [rank for rank, step in waiting.items() if step.probe]
        for rank in probing:
            step = waiting.pop(rank)
            own = [m for m in members if rank in m.sending and m.reader in step.messages]
            received = self._fleet.call(partial(_probe, name, step), own)
            answers.update((answer.member, answer) for answer in received)
            replies[rank] = _replies(received, rank)
        if not probing:
            received = self._send_init(name, waiting, members, generation)
            answers.update((answer.member, answer) for answer in received)
            for rank in waiting:
                own_replies = [a for a in received if rank in a.member.sending]
                replies[rank] = _replies(own_replies, rank)
            waiting.clear()
        return replies

    def _send_init(
        self, name: str, steps: Mapping[int, Round], members: Sequence[Member], generation: int
    ) -> list[MemberReply]:
        """Send one init message to each member that all of its ranks have a payload for."""
        group, fleet = self._group, self._fleet

        def request(member: Member) -> Request:
            payloads = {rank: steps[rank].messages[member.reader] for rank in member.sending}
            return InitRequest(
                init_info=InitInfo(
                    backend=name,
                    path=member.path,
                    protocol_min=fleet.protocols.oldest,
                    protocol_max=fleet.protocols.newest,
                    sender=group.rank_infos[member.rank].sender_id,
                    manifest=self._manifest,
                    lease_s=fleet.timeout_s,
                    fleet_version=fleet.version,
                    generation=generation,
                    owner=fleet.owner(member),
                    payload=(
                        self._streams(name, payloads) if member.ranks else payloads[member.rank]
                    ),
                )
            )

        called = [
            member
            for member in members
            if all(
                rank in steps and member.reader in steps[rank].messages for rank in member.sending
            )
        ]
        answers = fleet.call(request, called)
        for i, answer in enumerate(answers):
            if answer.error is None:
                answers[i] = _checked(answer, fleet.protocols)
            if answers[i].error is None:
                answer.member.status = answer.status
                reply = answer.reply
                answer.member.wants = reply.wants if isinstance(reply, InitReply) else None
                answer.member.whole = reply.whole if isinstance(reply, InitReply) else {}
                answer.member.casts = reply.casts if isinstance(reply, InitReply) else {}
                answer.member.sender = group.rank_infos[answer.member.rank].sender_id
                self._warn_of_rounding(answer)
                answer.member.owned = True
        return answers

    def _streams(self, name: str, payloads: Mapping[int, Any]) -> StreamsInfo:
        """Return the streams of all ranks, as an init message has them."""
        return StreamsInfo(
            streams=[
                describe_stream(stream, self._paths[name][stream.rank], payloads[stream.rank])
                for stream in self._group.worker.cut_plan(self._wants).streams
            ]
        )

    def _warn_of_rounding(self, answer: MemberReply) -> None:
        """Log a warning, once a member, of tensors that are rounded and then kept in more digits.

        Of a receiver that does not know its dtypes, it names the rounded tensors among others that
        have the dtype already: a trainer that keeps some tensors in more digits needs these.
        """
        rounded, reply = self._group.worker.rounded, answer.reply
        if not rounded or not isinstance(reply, InitReply) or answer.member in self._warned:
            return
        if reply.widened is not None:
            names = [name for name in reply.widened if name in rounded]
            seen = "keeps in more digits"
        else:
            floating = sum(spec.dtype in FLOATING for spec in self._group.manifest.specs)
            names = list(rounded) if len(rounded) < floating else []
            seen = "may keep in more digits (the others have that dtype already)"
        if not names:
            return
        self._warned.add(answer.member)
        logger.warning(
            'dtype= rounds %d tensors that %s %s: %s; dtype="receiver" casts each tensor to what '
            "receivers keep, and without dtype a ModuleSink(module, cast=True) casts them",
            len(names),
            answer.member.target,
            seen,
            shorten(f"{name} ({rounded[name]})" for name in names),
        )

    def _assign_index(self, member: Member) -> None:
        """Give a member a new reader index. No index is used twice: an old reader may still read.

        Raises ConfigError where the engine has no index left.
        """
        engine = member.backend, member.rank
        index = self._next_reader.get(engine, 0)
        most = self._backend(member.backend).max_readers
        if most is not None and index >= most:
            raise ConfigError(
                f"rank {member.rank} would send to more than the {most} receivers that "
                f"its ring has room for; {member.target} is one too many"
            )
        self._next_reader[engine] = index + 1
        member.reader = index

    def _has_engine(self, candidate: Candidate) -> bool:
        """Whether an engine for a candidate is open, and has a reader index left."""
        opened = self._paths.get(candidate.backend, {}).get(candidate.rank)
        return opened == candidate.path and not self._is_full(candidate.backend, candidate.rank)

    def _is_full(self, backend: str, rank: int) -> bool:
        """Whether the engine of a rank has no reader index left."""
        most = self._backend(backend).max_readers
        return most is not None and self._next_reader.get((backend, rank), 0) >= most

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


def _by_backend(members: Sequence[Member]) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for member in members:
        found.setdefault(member.backend, []).append(member)
    return found


def _reader(member: Member, *, same_host: bool) -> Reader:
    """Return a member as a rank sees it, on the host of rank 0 or on another one."""
    return Reader(
        index=member.reader,
        target=member.target,
        keys=list(member.status.device_keys),
        route=member.transport.target,
        local_address=member.transport.local_address if same_host else None,
        facts=member.status.backends.get(member.backend),
    )


def _probe(name: str, step: Round, member: Member) -> Request:
    return InitRequest(probe=ProbeRequest(backend=name, payload=step.messages[member.reader]))


@dataclass(frozen=True, slots=True)
class Spanning:
    """Members that every rank reaches by one backend, and the path from each rank."""

    members: Sequence[Member]
    paths: Mapping[int, Reach]


def span_ranks(
    members: Sequence[Member],
    ranks: Sequence[RankInfo],
    backends: Sequence[Backend],
    refused: Container[tuple[Member, str]],
    *,
    ordered: bool,
) -> dict[str, Spanning] | str:
    """Return how all ranks reach each member, by backend; or why some rank does not reach one.

    A member gets the backend whose path from the rank that is furthest is the cheapest; with
    `ordered` the first one that reaches it. Not a backend or a path by which it was `refused`.
    """
    chosen: dict[str, list[Member]] = {}
    for member in members:
        left = [backend for backend in backends if (member, backend.name) not in refused]
        found = _cheapest_spanning(member, ranks, left, refused, ordered=ordered)
        if isinstance(found, str):
            return found or f"no path is left to {member.target}"
        chosen.setdefault(found.name, []).append(member)
    own_of = [(backend, chosen.get(backend.name, [])) for backend in backends]
    required = {base: path for each, own in own_of if own for base, path in each.requires.items()}
    spanning: dict[str, Spanning] = {}
    for backend, own in own_of:
        paths = spanning_paths(own, ranks, backend, refused, only=required.get(backend.name))
        if own and isinstance(paths, str):
            return paths
        if own and not isinstance(paths, str):
            spanning[backend.name] = Spanning(own, paths)
    return spanning


def _cheapest_spanning(
    member: Member,
    ranks: Sequence[RankInfo],
    backends: Sequence[Backend],
    refused: Container[tuple[Member, str]],
    *,
    ordered: bool,
) -> Backend | str:
    """Return the backend by which all ranks reach a member best; or why there is none."""
    best: tuple[float, Backend] | None = None
    reasons: dict[str, None] = {}
    for backend in backends:
        found = spanning_paths([member], ranks, backend, refused)
        if isinstance(found, str):
            reasons[found] = None
            continue
        worst = max(reach.cost for reach in found.values())
        if best is None or (worst < best[0] and not ordered):
            best = worst, backend
    return "; ".join(reasons) if best is None else best[1]


def spanning_paths(
    members: Sequence[Member],
    ranks: Sequence[RankInfo],
    backend: Backend,
    refused: Container[tuple[Member, str]] = (),
    *,
    only: str | None = None,
) -> dict[int, Reach] | str:
    """Return the cheapest path from each rank that reaches all members; or why there is none.

    Not a path by which a member was `refused`. `only`: the path that another backend requires of
    this one.
    """
    name = backend.name
    for member in members:
        if name not in member.status.backends:
            return f"{member.target} does not know {name}"
        facts = member.status.backends[name]
        if not backend.takes_streams(Endpoint(keys=member.status.device_keys, facts=facts)):
            return f"{member.target} reads from one rank by {name}"
    found: dict[int, Reach] = {}
    for rank, info in enumerate(ranks):
        if name in info.unusable:
            return f"rank {rank}: {info.unusable[name]}"
        ours = Endpoint(keys=info.keys, rank=rank, facts=info.backends.get(name))
        shared = _shared_path(members, ours, backend, refused, only)
        if isinstance(shared, str):
            return shared
        found[rank] = shared
    return found


def _shared_path(
    members: Sequence[Member],
    ours: Endpoint,
    backend: Backend,
    refused: Container[tuple[Member, str]],
    only: str | None,
) -> Reach | str:
    """Return the cheapest path from a rank that reaches all members; or why there is none."""
    usable: dict[str, list[Reach]] = {}
    why_not = f"rank {ours.rank} reaches the receivers by unlike paths"
    for member in members:
        there = member.status
        theirs = Endpoint(keys=there.device_keys, facts=there.backends[backend.name])
        for reach in reaches(backend, ours, theirs):
            if only not in (None, reach.path) or (member, reach.path) in refused:
                continue
            reason = member.why_refused(reach.path) or reach.why_not
            if reason:
                why_not = f"rank {ours.rank} does not reach {member.target}: {reason}"
            else:
                usable.setdefault(reach.path, []).append(reach)
    shared = [each for each in usable.values() if len(each) == len(members)]
    if not shared:
        return why_not
    worst = [max(each, key=lambda reach: reach.cost) for each in shared]
    return min(worst, key=lambda reach: reach.cost)


def _refusals(failed: Iterable[MemberReply]) -> dict[tuple[Member, str], str]:
    """Return the path that members leave, or the backend, with the reasons.

    Where one rank's GPU cannot be read, all ranks take another path of the backend.
    """
    members = {answer.member: str(answer.error) for answer in failed}
    return {(m, m.gpu_path if m.gpus else m.backend): why for m, why in members.items()}


def _of_gpus(members: Iterable[Member], error: BackendUnavailableError) -> list[MemberReply]:
    """Return an engine's error as that of the members that were to read the memory of a GPU."""
    failed = [member for member in members if member.gpus]
    for member in failed:
        member.skipped[member.gpu_path] = str(error)
    return [MemberReply(member, error=error) for member in failed]


def _replies(answers: Sequence[MemberReply], rank: int) -> Replies:
    """Return the results of a round, as the engine of a rank receives them."""
    payloads = {
        answer.member.reader: _of_rank(answer.reply.payload, answer.member, rank)
        for answer in answers
        if isinstance(answer.reply, InitReply)
    }
    return Replies(payloads=payloads, failed=[answer.member.reader for answer in failures(answers)])


def _of_rank(payload: Any, member: Member, rank: int) -> Any:
    """Return what a member replied to one of the ranks that send to it."""
    if member.ranks and isinstance(payload, list) and len(payload) == len(member.ranks):
        return payload[member.ranks.index(rank)]
    return payload


def _path_failures(answers: Sequence[MemberReply]) -> list[MemberReply]:
    """Return the results of paths that do not work; raise any other error."""
    failed = failures(answers)
    others = [answer for answer in failed if not isinstance(answer.error, _PATH_ERRORS)]
    raise_first(others)
    for answer in failed:
        answer.member.skipped[answer.member.path] = str(answer.error)
    return failed


def _checked(answer: MemberReply, protocols: Protocols) -> MemberReply:
    """Return the result, or an error where it is not that of an init which this sender can use.

    It is none where another instance replied than to the status request, and where the receiver
    chose a protocol that this sender does not have.
    """
    before, now = answer.member.status.instance, answer.status.instance
    chosen = answer.reply.protocol if isinstance(answer.reply, InitReply) else 0
    target = answer.member.target
    if before != now:
        text = (
            f"{target} answered as instance {before} and then as {now}: it was restarted in "
            "between, or several receivers share this target; name each of them by itself"
        )
    elif not protocols.oldest <= chosen <= protocols.newest:
        text = f"{target} chose protocol {chosen}; this sender has {protocols}"
    else:
        return answer
    return MemberReply(answer.member, error=ProtocolError(text))


def _unavailable(members: Sequence[Member]) -> WeightSyncError:
    reasons = "; ".join(
        f"{member.target}: {path}: {reason}"
        for member in members
        for path, reason in member.skipped.items()
    )
    return BackendUnavailableError(f"no path works to {reasons or 'any receiver'}")
