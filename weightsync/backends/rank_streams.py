"""The receiving half of a path that spans the ranks of a trainer, for any backend.

Each rank sends the boxes that it owns as a stream of its own, through an engine of its own. The
receiver has an engine for each stream, and writes all of them to one load target.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from msgspec import structs

from weightsync.backends.assembly import Assembly, GroupPlan
from weightsync.backends.base import LoadContext, Received, Steps, WeightTransferEngine
from weightsync.errors import (
    BackendUnavailableError,
    ConnectError,
    ProtocolError,
    SourceLostError,
    TransferTimeout,
    VerificationError,
    WeightSyncError,
    shorten,
)
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.fingerprint import as_words, parts_of, table_digest
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.rank_streams import (
    RankStream,
    StreamPlaces,
    check_coverage,
    stream_of,
)
from weightsync.weights.copying.shards import Slice
from weightsync.weights.deltas.change_log import StreamDeltas
from weightsync.weights.lines.stream_lines import PlacedStreams
from weightsync.weights.sinks.base import LoadTarget, PartTarget, Together, Verification
from weightsync.wire.codec import decode_payload, manifest_from_wire, manifest_to_wire
from weightsync.wire.messages import RegisteredUpdate, SharedMemoryUsage, TensorPart
from weightsync.wire.offers import InitInfo, StreamPackets, StreamsInfo, StreamsUpdate
from weightsync.wire.struct_types import prepare

prepare(StreamsInfo, StreamsUpdate, StreamPackets)

_STRENGTH: tuple[Verification, ...] = ("none", "arrived", "held")


class _StreamTarget(PartTarget):
    """The places of one stream's boxes in the memory of a load target."""

    def __init__(self, places: StreamPlaces, target: LoadTarget) -> None:
        self.memory = places.memory
        self.in_place = target.in_place
        # Lines of shards are added up as they arrive, if a delta may follow.
        is_sharded = target.memory is not None and target.memory.shares is not None
        self.takes_deltas = target.takes_deltas and is_sharded


def parts_in(
    model: Manifest, memory: Memory, check: Callable[[], None] = lambda: None
) -> dict[str, list[TensorPart]]:
    """Return the parts of the tensors' mix64 that a memory holds of a model.

    `check` is called before each tensor: to read all of a large model takes minutes on the host.
    """

    def boxes() -> Iterator[tuple[str, torch.Tensor, Slice, int]]:
        placed: Iterable[tuple[int, Slice | None]] = (
            ((i, Slice.whole_of(spec.shape)) for i, spec in enumerate(model.specs))
            if memory.shares is None
            else ((share.index, share.box) for share in memory.shares)
        )
        for (index, box), flat in zip(placed, memory.tensors, strict=True):
            if box is not None:
                check()
                spec = model.specs[index]
                yield spec.name, flat, box, TORCH_DTYPES[spec.dtype].itemsize

    return parts_of(boxes())


def _given(part: LoadTarget, _: StreamLayout) -> LoadTarget:
    """Return the load target of a stream, whatever its chunks."""
    return part


class RankStreamsEngine(WeightTransferEngine):
    """Receives the streams of several ranks, each through an engine that `make` returns.

    An init without streams is that of one rank: its engine is used as it is. Raises
    ManifestMismatchError or ConfigError at init unless the streams have each element of the model
    exactly once. An update of other tensors than the model's comes from the first rank alone; the
    packets of a delta come from each.
    """

    def __init__(self, make: Callable[[], WeightTransferEngine]) -> None:
        self._make = make
        self._engines: list[WeightTransferEngine] = []
        self._streams: list[RankStream] = []
        self._layout: StreamLayout | None = None
        self._groups: tuple[Together | None, GroupPlan] | None = None
        self._spare: list[torch.Tensor] = []
        self._digest = ""
        self._targets: weakref.WeakKeyDictionary[Memory, list[_StreamTarget]] = (
            weakref.WeakKeyDictionary()
        )
        self._placed: weakref.WeakKeyDictionary[Memory, PlacedStreams] = weakref.WeakKeyDictionary()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open what each rank offers. Raises ProtocolError for streams that are no model.

        BackendUnavailableError where a rank cannot be reached.
        """
        offer = init_info.payload
        if not isinstance(offer, StreamsInfo):
            if not (isinstance(offer, Mapping) and "streams" in offer):
                engine = self._make()
                self._engines = [engine]
                engine.init_transfer_engine(init_info)
                return
            offer = decode_payload(offer, StreamsInfo)
        model = manifest_from_wire(init_info.manifest)
        streams = [stream_of(info, model) for info in offer.streams]
        check_coverage(model, streams)
        for info, stream in zip(offer.streams, streams, strict=True):
            engine = self._make()
            self._engines.append(engine)  # before its init, which `shutdown` undoes
            own = structs.replace(
                init_info,
                path=info.path,
                manifest=manifest_to_wire(stream.manifest),
                payload=info.payload,
            )
            try:
                engine.init_transfer_engine(own)
            except ConnectError as exc:  # another rank may be reached, and send for all
                raise BackendUnavailableError(f"rank {info.rank}: {exc}") from exc
        self._streams, self._layout = streams, StreamLayout(model)
        boxes = [(info.rank, info.tensors, info.boxes, info.box) for info in offer.streams]
        described = msgspec.msgpack.encode((model.digest, boxes))
        self._digest = hashlib.blake2b(described, digest_size=16).hexdigest()

    def init_reply(self) -> Any:
        """Return the reply of the one engine, or those of all."""
        replies = [engine.init_reply() for engine in self._engines]
        return replies if self._layout is not None else replies[0]

    def start_weight_update(self) -> None:
        """Prepare all engines."""
        for engine in self._engines:
            engine.start_weight_update()

    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Load all streams into one load target, all at about one pace."""
        if self._layout is None:
            return self._engines[0].receive_weights(update_info, context)
        if update_info.manifest is not None:
            return self._engines[0].receive_weights(update_info, context)
        if update_info.delta is not None:
            return self._receive_deltas(update_info, context)
        update = decode_payload(update_info.payload, StreamsUpdate)
        payloads, sums = update.payloads, update.sums
        if len(payloads) != len(self._engines):
            raise ProtocolError(f"an update of {len(self._engines)} ranks needs a payload of each")
        infos = [structs.replace(update_info, payload=payload) for payload in payloads]
        target = self._opened(infos, context)

        def receive(i: int, part: LoadTarget, own: LoadContext) -> Received:
            own = replace(own, open_target=lambda _: part)
            with self._naming(self._streams[i]):
                return self._engines[i].receive_weights(infos[i], own)

        parts: Mapping[str, list[TensorPart]] = {}
        if target.memory is None:
            received, parts = self._through_hook(target, context, receive, sums=sums)
        else:
            received = self._in_turns(infos, self._parts(target, target.memory), context)
            if sums:
                parts = parts_in(self._layout.manifest, target.memory, context.check)
        joined = self._joined(self._layout.manifest, received, verify=update_info.verify)
        # A hook's target counts one group, that of a ring.
        groups = [buffer.numel() for buffer in self._spare]
        totals = self._digest, [one.lines_total for one in received]
        return replace(
            joined,
            extra_nbytes=sum(groups) - max(groups, default=0),
            stream_totals=totals if update_info.delta_follows else None,
            parts=parts,
        )

    def _receive_deltas(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Load the packets of each rank into its part of a StreamDeltas."""
        payloads = update_info.payload
        if not isinstance(payloads, list) or len(payloads) != len(self._engines):
            raise ProtocolError(f"a delta of {len(self._engines)} ranks needs packets of each")
        packets = [decode_payload(payload, StreamPackets) for payload in payloads]
        infos = [
            structs.replace(update_info, manifest=each.manifest, payload=each.payload)
            for each in packets
        ]
        assert self._layout is not None
        target = self._opened(infos, context)
        if not isinstance(target, StreamDeltas):
            raise ProtocolError("this receiver takes no deltas of several ranks")
        received = self._in_turns(infos, target.parts, context)
        return Received(
            self._layout.manifest,
            target.totals(),
            waited_s=max(one.waited_s for one in received),
            sources={
                stream.rank: part.nbytes
                for stream, part in zip(self._streams, target.parts, strict=True)
            },
        )

    def _opened(self, infos: Sequence[RegisteredUpdate], context: LoadContext) -> LoadTarget:
        """Return the load target of the model. Where it cannot be opened, leave all streams."""
        assert self._layout is not None
        try:
            return context.open_target(self._layout)
        except BaseException:
            # Other receivers of this host would wait for this one, or for what it feeds them with.
            for engine, info in zip(self._engines, infos, strict=True):
                with (
                    suppress(WeightSyncError),
                    closing(engine.receive_in_steps(info, context)) as s,
                ):
                    next(s)
            raise

    def receive_in_steps(self, update_info: RegisteredUpdate, context: LoadContext) -> Steps:
        """Load the one stream step by step; several are stepped through here."""
        if self._layout is None:
            return (yield from self._engines[0].receive_in_steps(update_info, context))
        return self.receive_weights(update_info, context)

    def streams_in(self, memory: Memory) -> PlacedStreams | None:
        """Return where the boxes of each rank belong in a memory of the model."""
        if self._layout is None:
            return None
        if memory not in self._placed:
            known = [part.memory for part in self._targets.get(memory, ())]
            places = [each for each in known if each is not None]
            places = places or [StreamPlaces(stream, memory).memory for stream in self._streams]
            self._placed[memory] = PlacedStreams(self._digest, self._streams, places)
        return self._placed[memory]

    def _in_turns(
        self,
        infos: Sequence[RegisteredUpdate],
        parts: Sequence[LoadTarget],
        context: LoadContext,
    ) -> list[Received]:
        """Receive some bytes of each stream in turn: all ranks send at once, at about one pace."""
        with ExitStack() as stack:
            left: dict[int, Steps] = {}
            for i, (engine, info, part) in enumerate(zip(self._engines, infos, parts, strict=True)):
                own = replace(context, open_target=partial(_given, part))
                left[i] = engine.receive_in_steps(info, own)
                stack.callback(left[i].close)
            received: dict[int, Received] = {}
            while left:
                for i, steps in list(left.items()):
                    try:
                        with self._naming(self._streams[i]):
                            next(steps)
                    except StopIteration as end:
                        received[i] = end.value
                        del left[i]
        return [received[i] for i in range(len(parts))]

    def _through_hook(
        self,
        target: LoadTarget,
        context: LoadContext,
        receive: Callable[[int, LoadTarget, LoadContext], Received],
        *,
        sums: bool,
    ) -> tuple[list[Received], dict[str, list[TensorPart]]]:
        """Receive all streams at once, and pass whole tensors to a hook, layer by layer.

        Returns also the parts of these tensors' mix64, where `sums` are wanted.
        """
        assert self._layout is not None
        if self._groups is None or self._groups[0] is not target.together:
            plan = GroupPlan(self._layout.manifest, self._streams, target.together)
            self._groups = target.together, plan
        # The hook runs in this thread, and may keep what it gets; the streams' bytes are copied.
        own = replace(context, mark_dirty=lambda: None, lends_views=True)
        assembly = Assembly(self._groups[1], target, context, self._spare, sums=sums)
        received = assembly.run(lambda i, part, check: receive(i, part, replace(own, check=check)))
        return received, assembly.parts

    def _joined(
        self,
        model: Manifest,
        received: Sequence[Received],
        *,
        verify: bool,
    ) -> Received:
        """Return the result of all streams: the weakest level, and a fingerprint of each table."""
        levels = {
            one.verified
            for one, stream in zip(received, self._streams, strict=True)
            if stream.nbytes
        }
        tables = [table_digest(one.fingerprints) for one in received] if verify else []
        return Received(
            model,
            [word for digest in tables for word in as_words(digest)],
            min(levels, key=_STRENGTH.index, default="none"),
            waited_s=max(one.waited_s for one in received),
            sources={
                stream.rank: one.read_nbytes
                for stream, one in zip(self._streams, received, strict=True)
            },
        )

    def finish_weight_update(self) -> None:
        """Finish the update of all engines."""
        for engine in self._engines:
            engine.finish_weight_update()

    def sender_alive(self) -> bool | None:
        """Whether all ranks live. None where one cannot tell, and the others live."""
        found = {engine.sender_alive() for engine in self._engines} or {False}
        if False in found:
            return False
        return None if None in found else True

    def sender_beat(self) -> int | None:
        """Return the sum of the ranks' heartbeats; None where one has none."""
        beats = [engine.sender_beat() for engine in self._engines]
        known = [beat for beat in beats if beat is not None]
        return sum(known) if known and len(known) == len(beats) else None

    def beat(self) -> None:
        """Send a heartbeat to every rank."""
        for engine in self._engines:
            engine.beat()

    @property
    def feeds_others(self) -> bool:
        """Whether other receivers get the bytes of an update from this one."""
        return any(engine.feeds_others for engine in self._engines)

    def usage(self) -> list[SharedMemoryUsage]:
        """Return what all engines hold open."""
        return [entry for engine in self._engines for entry in engine.usage()]

    def shutdown(self) -> None:
        """Shut down all engines, even where one raises."""
        with ExitStack() as last:
            last.callback(self._spare.clear)
            for engine in self._engines:
                last.callback(engine.shutdown)

    def _parts(self, target: LoadTarget, memory: Memory) -> Sequence[_StreamTarget]:
        """Return the load target of each stream; kept while the memory of `target` exists."""
        if memory not in self._targets:
            self._targets[memory] = [
                _StreamTarget(StreamPlaces(stream, memory), target) for stream in self._streams
            ]
        return self._targets[memory]

    @contextmanager
    def _naming(self, stream: RankStream) -> Iterator[None]:
        """Name the tensors of the model, and the rank, where boxes of a stream are wrong.

        The rank too where they do not come: it is one of several senders.
        """
        try:
            yield
        except (SourceLostError, TransferTimeout) as exc:
            named = copy.copy(exc)
            named.args = (f"rank {stream.rank}: {exc}",)
            raise named from exc
        except VerificationError as exc:
            if not exc.names:  # of a delta
                raise VerificationError(f"rank {stream.rank}: {exc}") from exc
            names = list(dict.fromkeys(stream.names(exc.names)))
            raise VerificationError(
                f"{len(names)} tensors differ from what rank {stream.rank} sent: {shorten(names)}; "
                "the update is not applied, send it again",
                names=names,
            ) from exc
