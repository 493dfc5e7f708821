"""One update on a receiver: what it received, and the load targets that it writes to."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from weightsync.backends.base import Received, WeightTransferEngine, expect
from weightsync.errors import (
    ConfigError,
    DeltaError,
    ManifestMismatchError,
    ProtocolError,
    TransferError,
    VerificationError,
    shorten,
)
from weightsync.specs import Manifest, union
from weightsync.tensors import from_bytes
from weightsync.update.lifecycle import ApplyChoice, State
from weightsync.weights.copying import arena
from weightsync.weights.copying.checksums import to_hex
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.fingerprint import joined_totals, table_digest
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.shards import Slice
from weightsync.weights.deltas.change_log import DeltaTarget, StreamDeltas
from weightsync.weights.deltas.coding import zstd
from weightsync.weights.lines.memory import LineMemory, may_have_kernels
from weightsync.weights.lines.spot_check import Look, SpotCheck, TensorPlaces
from weightsync.weights.lines.stream_lines import PlacedStreams, StreamLines
from weightsync.weights.sinks.asleep import give_back
from weightsync.weights.sinks.base import Apply, LoadTarget, Verification, WeightSink, write_counts
from weightsync.weights.tensor_kinds import check_agreement
from weightsync.wire.messages import DeltaForm, FinishRequest, StepReply, TensorPart

logger = logging.getLogger(__name__)

_STRENGTH: tuple[Verification, ...] = ("none", "arrived", "held")


@dataclass(slots=True)
class IncomingUpdate:
    """The received part of one update, which started at `since` (Unix time).

    `finish` is the request of a part of a set that another part's is to be committed with.
    """

    update_id: str
    sender: str | None
    partial: bool
    anonymous: bool = False
    manifest_digest: str | None = None
    committing: bool = False
    finish: FinishRequest | None = None
    load_targets: list[LoadTarget] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    levels: set[Verification] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    lines_total: int | None = None
    stream_totals: tuple[str, Sequence[int | None]] | None = None
    sources: dict[int, int] = field(default_factory=dict)
    extra_nbytes: int = 0
    parts: Mapping[str, list[TensorPart]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    since: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)

    def use(self, load_target: LoadTarget, layout: StreamLayout) -> LoadTarget:
        """Add a load target to this update and return it; begin it the first time."""
        self.opened.add(layout.manifest.digest)
        if load_target in self.load_targets:
            self.load_targets.remove(load_target)  # the last one used is committed last
        else:
            load_target.begin()
        self.load_targets.append(load_target)
        return load_target

    def check_received(self, received: Received, method: str, verify: bool) -> None:
        """Raise ConfigError naming `method` unless its result is that of a transfer of this update.

        A fingerprint is not computed again: `testing.BackendContract` shows an engine whose
        fingerprints are not those of the bytes it wrote.
        """
        expect(received, Received, f"{method} returned")
        specs = received.manifest.specs
        if specs and received.manifest.digest not in self.opened:
            raise ConfigError(
                f"{method} reports {received.manifest.nbytes} bytes for which it opened no load "
                "target"
            )
        if received.verified not in _STRENGTH:
            raise ConfigError(
                f"{method} returned verified={received.verified!r}, not one of "
                f"{', '.join(_STRENGTH)}"
            )
        if verify and received.manifest.nbytes:
            if received.verified == "none":
                raise ConfigError(f"{method} verified nothing of an update that is to be verified")
            if not received.fingerprints:
                raise ConfigError(f"{method} returned no fingerprints of a verified update")

    def note(self, received: Received) -> None:
        """Add the result of one message."""
        self.manifests.append(received.manifest)
        self.fingerprints += received.fingerprints
        self.levels.add(received.verified)
        self.tied.update(received.tied)
        for rank, nbytes in received.sources.items():
            self.sources[rank] = self.sources.get(rank, 0) + nbytes
        self.extra_nbytes = max(self.extra_nbytes, received.extra_nbytes)
        self.parts = received.parts
        if received.waited_s:
            self.seconds["wait"] = self.seconds.get("wait", 0.0) + received.waited_s
        # Of one message: several are of no stream whose lines could be added up.
        alone = len(self.manifests) == 1
        self.lines_total = received.lines_total if alone else None
        self.stream_totals = received.stream_totals if alone else None

    @property
    def table_digest(self) -> str | None:
        """The digest of all received fingerprints, in order; None without any."""
        return table_digest(self.fingerprints) if self.fingerprints else None

    def validate(self, sink: WeightSink, offered: Manifest | None) -> None:
        """Check that the update is complete. Called when all messages were received.

        Raises ManifestMismatchError for tensors that are missing, and ProtocolError where the
        manifest is not the announced one or no tensors were received.
        """
        for load_target in self.load_targets:
            load_target.validate()
        # Of all messages together: one may overwrite what another one wrote.
        check_agreement([each for target in self.load_targets for each in target.shared()])
        self._check_ties(sink)
        announced = self.manifest_digest
        if announced is not None and len(self.manifests) == 1 and not self.partial:
            digest = self.manifests[0].digest
            if digest != announced:
                raise ProtocolError(
                    f"update {self.update_id} was announced with manifest {announced}, but has "
                    f"manifest {digest}; send what was announced"
                )
        wanted = sink.manifest or offered
        if self.partial:
            return
        if wanted is None:
            if not any(manifest.specs for manifest in self.manifests):
                raise ProtocolError(
                    f"update {self.update_id} has no tensors; send them with update_weights "
                    "before it is finished"
                )
            sink.difference(union(self.manifests, sink.ties)).check(partial=False)
            return
        if sink.manifest is not None and any(
            not sink.difference(manifest).missing for manifest in self.manifests
        ):
            return
        arrived = {name for manifest in self.manifests for name in manifest.index}
        missing = [name for name, names in wanted.places().items() if arrived.isdisjoint(names)]
        if missing:
            raise ManifestMismatchError(missing=missing)

    def _check_ties(self, sink: WeightSink) -> None:
        """Raise ManifestMismatchError where tied tensors of several messages differ."""
        wrong = [
            f"{name}: offered as {name} and {alias} with other bytes, wanted as one tied tensor"
            for alias, name in sink.ties.items()
            if alias in self.tied and self.tied.get(name, self.tied[alias]) != self.tied[alias]
        ]
        if wrong:
            raise ManifestMismatchError(mismatched=wrong)

    def check_digest(self, expected: str | None) -> None:
        """Raise VerificationError unless the sender's table of fingerprints is the received one."""
        if expected is not None and self.table_digest not in (None, expected):
            raise VerificationError(
                f"the sender's table of fingerprints has digest {expected}, the received table "
                f"{self.table_digest}: the table was changed in transit; send the update again"
            )

    def reply(self, state: State, version: int, apply: Apply, stall_s: float = 0.0) -> StepReply:
        """Return a reply with the received part of the update. `apply` is used without targets."""
        targets = self.load_targets
        if targets:
            apply = "in_place" if any(target.in_place for target in targets) else "staged"
        return StepReply(
            state=state.value,
            version=version,
            update_id=self.update_id,
            apply=apply,
            verified=min(self.levels, key=_STRENGTH.index, default="none"),  # the weakest
            nbytes=sum(manifest.nbytes for manifest in self.manifests),
            stall_s=stall_s,
            peak_extra_nbytes=sum(target.peak_extra_nbytes for target in targets)
            + self.extra_nbytes,
            seconds=dict(self.seconds),
            table_digest=self.table_digest,
            delta=any(isinstance(target, DeltaTarget) for target in targets),
            names_nothing=any(target.named is False for target in targets),
            sources=self.sources,
            # Compared before the commit; a reply that stays in memory needs them no more.
            parts=dict(self.parts) if state is State.PREPARED else {},
        )

    def timed(self, phase: str, started: float) -> None:
        """Add the seconds since `started` to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class InUse:
    """The weights in use, in the order of the last whole model that was sent.

    `stays`: they keep their bytes until a commit; else the next update overwrites them as it comes.
    `as_sent`: they are those of the last update, not cast, and nothing else has changed them.
    `token` is the same as long as nothing is seen to write to them: torch counts no write, and one
    line of each holds what it did. `is_copy`: they are not the tensors of a module, but those that
    a hook was given, and nothing but an update may write there. `places` are the positions and the
    boxes of parts of tensors; None for whole ones.
    """

    manifest: Manifest
    tensors: list[torch.Tensor]
    stays: bool
    as_sent: bool
    token: str = ""
    is_copy: bool = False
    places: Sequence[tuple[int, Slice]] | None = None


@dataclass(frozen=True, slots=True)
class Base:
    """The weights in use, as what a delta changes: a load target with its layout and memory.

    `totals` has the sum of all lines, as this receiver found it itself: in that memory, in what
    arrived for shards, or in those and the deltas that it applied since. None where not known. Of
    several ranks it has one for each of their `streams`.
    """

    target: LoadTarget
    layout: StreamLayout
    memory: LineMemory
    totals: Sequence[int | None]
    streams: Sequence[StreamLines] = ()

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint that a sender announces for these weights; None where it is not known."""
        known = [total for total in self.totals if total is not None]
        if len(known) < len(self.totals):
            return None
        return joined_totals(known) if self.streams else to_hex(known[0])

    def delta(self) -> DeltaTarget:
        """Return what writes a delta to these weights. Their fingerprint is known."""
        totals = [total or 0 for total in self.totals]
        if self.streams:
            return StreamDeltas(self.target, self.memory, self.streams, totals)
        return DeltaTarget(self.target, self.memory, to_hex(totals[0]))


_KEPT_SUBSETS = 2


class LoadTargets:
    """The load targets of one sink, by manifest: of the last whole model, and of a few subsets."""

    def __init__(self, sink: WeightSink, choice: ApplyChoice) -> None:
        if choice not in ("auto", "staged", "in_place"):
            raise ConfigError(f"apply must be auto, staged or in_place, not {choice!r}")
        self._sink = sink
        self._choice = choice
        self._whole: tuple[str, LoadTarget] | None = None
        self._layout: StreamLayout | None = None
        self._subsets: OrderedDict[str, LoadTarget] = OrderedDict()
        self._held_id: str | None = None
        self._checks: tuple[SpotCheck | None, SpotCheck | None] = (None, None)
        self._last_look: tuple[list[int], Look, str] | None = None
        self._looked = threading.Lock()
        self._places: WeakKeyDictionary[Memory, TensorPlaces] = WeakKeyDictionary()
        self._total: int | None = None
        self._stream_totals: tuple[str, Sequence[int | None]] | None = None
        self._stream_lines: WeakKeyDictionary[Memory, tuple[PlacedStreams, list[StreamLines]]] = (
            WeakKeyDictionary()
        )
        self._generation = 0
        self.apply: Apply = "in_place" if choice == "in_place" else "staged"

    def find(self, layout: StreamLayout) -> LoadTarget | None:
        """Return the load target of a layout, None where there is none that still fits the sink.

        The sink is not inspected before a staged update of the whole model: a look at every place
        of a model with 25,000 modules takes longer than many copies, and `validate` looks again.
        """
        known = self._whole
        if known and known[0] == layout.manifest.digest and known[1].is_unused():
            return known[1]
        generation = self._sink.refresh()
        if generation != self._generation:
            self._generation, self._whole = generation, None
            self._checks = None, None
            self._subsets.clear()
        digest = layout.manifest.digest
        if self._whole and self._whole[0] == digest and self._whole[1].is_current:
            return self._whole[1]
        subset = self._subsets.pop(digest, None)
        if subset is None or not subset.is_current:
            return None
        self._subsets[digest] = subset  # as the last one that was used
        return subset

    @property
    def delta_forms(self) -> list[DeltaForm]:
        """The forms of deltas that the load target of the whole model takes."""
        if not self._takes_deltas:
            return []
        if self._holds_shards:
            return ["shards"]
        return ["lines", "values"] if zstd() is not None else ["lines"]

    @property
    def _takes_deltas(self) -> bool:
        """Whether deltas of the whole model can be applied; numba may turn out to be unusable."""
        return self._whole is not None and self._whole[1].takes_deltas and may_have_kernels()

    @property
    def _holds_shards(self) -> bool:
        memory = self._whole[1].memory if self._whole is not None else None
        return memory is not None and memory.shares is not None

    @property
    def takes_stream_deltas(self) -> bool:
        """Whether the load target of the whole model takes lines of several ranks' streams."""
        memory = self._whole[1].memory if self._whole is not None else None
        return self._takes_deltas and memory is not None and memory.on_host()

    @property
    def takes_next_delta(self) -> bool:
        """Whether a delta can be applied to the weights of the last commit."""
        unknown = self._total is None and self._stream_totals is None
        return bool(self.delta_forms) and not (self._holds_shards and unknown)

    def catch_up(self, engine: WeightTransferEngine | None = None) -> None:
        """Prepare for a delta of the whole model: its memory, and the fingerprint of the base.

        `of_delta` would do that otherwise. Not memory of which a user keeps views: only an update
        overwrites that. `engine` is that of the sender.
        """
        whole, layout = self._whole, self._layout
        if whole is None or layout is None or not self._takes_deltas:
            return
        if whole[1].is_unused():
            memory = whole[1].catch_up(layout)
            if memory is not None:
                self._find_totals(memory, self._streams_in(memory, layout, engine))

    def of_delta(self, digest: str, engine: WeightTransferEngine | None = None) -> Base:
        """Return the base of a delta of a whole model, by its manifest's digest.

        Its memory holds the weights in use. `engine` is that of the sender, of one rank or several.
        Raises DeltaError where these are not those of the last commit, as far as can be seen: torch
        has counted writes, or one line of each tensor shows it.
        """
        whole, layout, check = self._whole, self._layout, self._checks[0]
        found = whole is not None and whole[0] == digest and self._takes_deltas
        if whole is None or layout is None or check is None or not found:
            raise DeltaError(
                "the weights in use are kept in a form that takes no deltas, or were not those of "
                "a whole model; send the whole model"
            )
        memory = whole[1].catch_up(layout)
        if memory is None:
            raise DeltaError(
                "other code has changed the weights in use since the last update, or they are kept "
                "in a form that takes no deltas; send the whole model"
            )
        # Only now, since their memory is known to be there.
        changed = self._names_of(check.changed(), check.memory, layout)
        if changed:
            self.discarded()
            raise DeltaError(
                f"other code has changed or discarded {len(changed)} tensors of the weights in use "
                f"since the last update: {shorten(changed)}; send the whole model"
            )
        streams = self._streams_in(memory, layout, engine)
        totals = self._find_totals(memory, streams)
        return Base(whole[1], layout, memory, totals, () if streams is None else streams[1])

    def _find_totals(
        self, memory: LineMemory, streams: tuple[str, list[StreamLines]] | None
    ) -> Sequence[int | None]:
        """Return the sum of all lines of the weights in use; added up once for each whole update.

        Of several ranks the sum of each stream. None for shards, unless their stream was added up
        when it arrived.
        """
        if streams is None:
            if self._total is None and memory.proves_base:
                self._total = memory.total()
            return [self._total]
        digest, lines = streams
        known = self._stream_totals
        if known is None or known[0] != digest or len(known[1]) != len(lines):
            known = digest, [None] * len(lines)
        totals = [
            each.total() if total is None and each.proves_base else total
            for total, each in zip(known[1], lines, strict=True)
        ]
        self._stream_totals = digest, totals
        return totals

    def _streams_in(
        self, memory: LineMemory, layout: StreamLayout, engine: WeightTransferEngine | None
    ) -> tuple[str, list[StreamLines]] | None:
        """Return the lines of the streams of several ranks, and their digest; None of one rank.

        Raises DeltaError for memory to which no lines of several streams can be written.
        """
        placed = None if engine is None else engine.streams_in(memory.memory)
        if placed is None:
            return None
        known = self._stream_lines.get(memory.memory)
        if known is None or known[0] is not placed:
            pairs = zip(placed.streams, placed.places, strict=True)
            try:
                lines = [StreamLines(*pair, layout, memory.memory) for pair in pairs]
            except ValueError as exc:
                raise DeltaError(f"{exc}; send the whole model") from exc
            known = self._stream_lines[memory.memory] = placed, lines
        return placed.digest, known[1]

    def check_follows(self, targets: Sequence[LoadTarget]) -> None:
        """Read a line of each tensor of these targets. Called before the commit.

        For `of_delta` and `in_use`, which look at the lines again.
        """
        whole = self._whole if self._is_whole(targets) else None
        memory = None if whole is None else whole[1].memory
        self._checks = self._checks[0], None
        if memory is None:
            return
        check = SpotCheck(memory, self._places.get(memory))
        self._places[memory] = check.places
        self._checks = self._checks[0], check

    def committed(
        self, targets: Sequence[LoadTarget], weights_id: str, incoming: IncomingUpdate
    ) -> None:
        """Note which weights are in use now, and which targets were written for them.

        The sums of all lines of what arrived are those of `incoming`, where they are known.
        """
        whole = self._is_whole(targets)
        self._held_id = weights_id if whole else None
        self._total = incoming.lines_total if whole else None
        self._stream_totals = incoming.stream_totals if whole else None
        if whole and isinstance(targets[0], DeltaTarget):
            self._total = targets[0].fingerprint
        self._checks = self._checks[1], None

    def discarded(self) -> None:
        """Note that the weights in use are gone, or are not those of the last commit."""
        self._held_id, self._checks = None, (None, None)
        self._total = self._stream_totals = None
        for target in self._all():
            target.forget()

    def fall_asleep(self, level: int) -> None:
        """Give the memory of the load targets back, where that loses nothing of this level.

        On a GPU they are opened again after the sleep. Called after `discarded` of level 2.
        """
        if self._sink.gpus:
            self._whole = self._held_id = None
            self._subsets.clear()
        elif level > 1:
            for target in self._all():
                give_back(target.staged())

    def _all(self) -> list[LoadTarget]:
        whole = [] if self._whole is None else [self._whole[1]]
        return [*whole, *self._subsets.values()]

    def _is_whole(self, targets: Sequence[LoadTarget]) -> bool:
        """Whether the whole model was written by these targets: all of it, or a delta."""
        written = [t.target if isinstance(t, DeltaTarget) else t for t in targets]
        return self._whole is not None and written == [self._whole[1]]

    @staticmethod
    def _names_of(positions: Sequence[int], memory: Memory, layout: StreamLayout) -> list[str]:
        """Return the names of these tensors of a memory."""
        shares = memory.shares
        indices = [i if shares is None else shares[i].index for i in positions]
        return list(dict.fromkeys(layout.manifest.specs[i].name for i in indices))

    def fetchable(self, weights_id: str) -> bool:
        """Whether `in_use` finds weights, as far as it is known without an inspection."""
        if type(self._sink).in_use is not WeightSink.in_use:
            return self._sink.fetchable
        return self._sink.fetchable and self._copy_of(weights_id) is not None

    def _copy_of(self, weights_id: str) -> Sequence[torch.Tensor] | None:
        return self._whole[1].in_use() if self._whole and self._held_id == weights_id else None

    def in_use(self, weights_id: str) -> InUse:
        """Return the weights in use, whose id is `weights_id`.

        Raises ConfigError where the sink keeps no whole model.
        """
        layout, manifest, copy = self._layout, self._sink.manifest, None
        same = layout is not None and (manifest is None or _are_same(layout.manifest, manifest))
        if layout is not None and same:
            manifest = layout.manifest
        if self._sink.fetchable and manifest is not None:
            tensors = self._sink.in_use(manifest)
            if tensors is not None:
                as_sent = same and self._are_as_sent(tensors, weights_id)
                return InUse(
                    manifest,
                    tensors,
                    stays=self.apply == "staged",
                    as_sent=as_sent,
                    token="" if as_sent else self._token_of(tensors),
                )
            copy = self._copy_of(weights_id)
        if layout is None or copy is None:
            raise ConfigError(
                "this receiver keeps no whole copy of its weights that others could fetch; fetch "
                "from one that was made with an nn.Module, or with a hook that is staged"
            )
        specs = layout.manifest.specs
        tensors = [from_bytes(flat, spec) for flat, spec in zip(copy, specs, strict=True)]
        as_sent = self._are_as_sent(copy, weights_id)
        return InUse(layout.manifest, tensors, stays=False, as_sent=as_sent, is_copy=True)

    def lends(self, weights_id: str) -> bool:
        """Whether `parts_in_use` finds weights, as far as it is known without an inspection."""
        return self._sink.holds_parts and self._whole is not None and self._held_id == weights_id

    def parts_in_use(self, weights_id: str) -> InUse:
        """Return the parts in use of the tensors of the update `weights_id`, as they were sent.

        Raises ConfigError for a sink that holds no parts, and where other code has changed them, or
        no update has sent them: nothing else says that the parts of several receivers belong to
        each other.
        """
        layout = self._layout
        if not self._sink.holds_parts or layout is None:
            raise ConfigError(
                "this receiver holds no parts of an update that others could fetch; fetch after "
                "the next update"
            )
        parts = self._sink.parts_in_use(layout.manifest)
        tensors = [tensor for _, _, tensor in parts]
        memory = self._whole[1].memory if self._whole is not None else None
        shares = None if memory is None else memory.shares
        # The update was verified in these boxes, and others may have other bytes.
        same = [(s.index, s.box) for s in shares or ()] == [(i, box) for i, box, _ in parts]
        if not same or not self._are_as_sent(tensors, weights_id):
            raise ConfigError(
                "the parts of tensors that this receiver holds are not, or not any more, those of "
                "one update; fetch after the next update of the whole model"
            )
        return InUse(
            layout.manifest,
            tensors,
            stays=self.apply == "staged",
            as_sent=True,
            places=[(index, box) for index, box, _ in parts],
        )

    def _are_as_sent(self, tensors: Sequence[torch.Tensor], weights_id: str) -> bool:
        """Whether the tensors of the layout are those of the update `weights_id`.

        As far as can be seen: torch has counted no write, and one line of each holds what it did.
        """
        if self._whole is None or self._held_id != weights_id or not self._whole[1].is_in_use():
            return False
        check = self._checks[0]
        if check is None:
            return True
        # Not of the memory that was written to, which an update in progress may overwrite.
        return not check.changed_in(tensors)

    def _token_of(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the `InUse.token` of tensors that are not as they were sent."""
        with self._looked:
            counts = write_counts(tensors)
            if self._last_look is not None and counts is not None:
                before, look, token = self._last_look
                if before == counts and look.finds(tensors):
                    return token
            token = secrets.token_hex(8)
            self._last_look = None if counts is None else (counts, Look(tensors), token)
            return token

    def get(self, layout: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return the load target of a layout; open it where there is none.

        It is in place where "auto" finds no memory for a staged one.
        """
        known = self.find(layout)
        if known is not None:
            return known
        digest = layout.manifest.digest
        if whole:
            self.apply = self._choose(layout)
        try:
            load_target = self._sink.open_target(layout, self.apply)
        except TransferError:
            if self._choice != "auto" or self.apply == "in_place":
                raise
            self._warn(layout)
            self.apply = "in_place"
            load_target = self._sink.open_target(layout, self.apply)
        if whole:
            self._whole, self._layout, self._total = (digest, load_target), layout, None
            self._stream_totals = None
        else:
            self._subsets[digest] = load_target
            while len(self._subsets) > _KEPT_SUBSETS:
                self._subsets.popitem(last=False)
        return load_target

    def _choose(self, layout: StreamLayout) -> Apply:
        if self._choice != "auto":
            return self._choice
        if arena.fits(self._sink.staged_nbytes(layout), self._sink.device):
            return "staged"
        self._warn(layout)
        return "in_place"

    def _warn(self, layout: StreamLayout) -> None:
        device = self._sink.device
        logger.warning(
            "no room on %s to stage %d bytes (%d are free): weights in use are written in place, "
            "and an update that fails half way leaves the receiver TORN",
            device,
            self._sink.staged_nbytes(layout),
            arena.available(device),
        )


def _are_same(sent: Manifest, held: Manifest) -> bool:
    """Whether the tensors that were sent are those that are held, in any order."""
    places = sent.index
    return len(sent.specs) == len(held.specs) and all(
        spec.name in places
        and (sent.specs[places[spec.name]].dtype, sent.specs[places[spec.name]].shape)
        == (spec.dtype, spec.shape)
        for spec in held.specs
    )
