"""Assembly of whole tensors for a hook, a layer at a time, from boxes that several ranks send."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch

from weightsync.backends.base import Check, LoadContext, Received
from weightsync.cuda.wait import wait_for_all_streams
from weightsync.errors import TransferError
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES, from_bytes
from weightsync.weights.copying import arena
from weightsync.weights.copying.fingerprint import parts_of
from weightsync.weights.copying.layout import aligned, layer_of
from weightsync.weights.copying.rank_streams import RankStream
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sinks.base import (
    LoadTarget,
    NamedTensor,
    PartTarget,
    Together,
    own_storage,
    refuse_kept,
    users_code,
    uses,
)
from weightsync.wire.messages import TensorPart

_OPEN_GROUPS = 2
"""Groups that are filled at the same time, unless a stream needs another one to go on."""
_LOOK_S = 0.05

Receive = Callable[[int, LoadTarget, Check], Received]
"""Receives a stream, by its position, into a load target without memory."""


class GroupPlan:
    """The groups of tensors that a hook gets in one call, and their boxes in each stream.

    `groups` are indices of tensors, in the order in which a group begins; `group_of` is the group
    of each tensor, `boxes[s][g]` the number of boxes of group g in stream s.
    """

    def __init__(
        self, model: Manifest, streams: Sequence[RankStream], together: Together | None
    ) -> None:
        self.model = model
        self.streams = streams
        keys: dict[Hashable, int] = {}
        part = layer_of if together is None else together
        self.group_of = [keys.setdefault(part(spec.name), len(keys)) for spec in model.specs]
        self.groups: list[list[int]] = [[] for _ in keys]
        for i, group in enumerate(self.group_of):
            self.groups[group].append(i)
        self.boxes = [Counter(self.group_of[i] for i in stream.indices) for stream in streams]
        self.places = [
            {spec.name: i for i, spec in enumerate(stream.manifest.specs)} for stream in streams
        ]
        self.offsets: list[int] = [0] * len(model.specs)
        self.nbytes = []
        for indices in self.groups:
            at = 0
            for i in indices:
                self.offsets[i] = at
                at += aligned(model.specs[i].nbytes)
            self.nbytes.append(at)


class Assembly:
    """One update of a hook: streams fill groups in threads, and the caller's thread passes them on.

    Buffers are reused from group to group, and kept in `spare` for the next update. With `sums`,
    `parts` has those of the mix64 of the tensors that were passed on.
    """

    def __init__(
        self,
        plan: GroupPlan,
        target: LoadTarget,
        context: LoadContext,
        spare: list[torch.Tensor],
        *,
        sums: bool = False,
    ) -> None:
        self.parts: dict[str, list[TensorPart]] = {}
        self._sums = sums
        self._plan = plan
        self._target = target
        self._context = context
        self._spare = spare
        self._changed = threading.Condition()
        self._open: dict[int, torch.Tensor] = {}
        self._left = [Counter(counts) for counts in plan.boxes]
        self._missing: Counter[int] = sum(map(Counter, plan.boxes), Counter())
        self._awaited = 0
        self._error: BaseException | None = None
        self._received: dict[int, Received] = {}

    def run(self, receive: Receive) -> list[Received]:
        """Receive all streams, and pass every group to the hook; return what each stream received.

        Raises the first error of a stream, of the hook, or of the context's check.
        """
        threads = [
            threading.Thread(
                target=self._run, args=(i, receive), name="weightsync-stream", daemon=True
            )
            for i in range(len(self._plan.streams))
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for group in range(len(self._plan.groups)):
                self._pass(group, self._await(group))
            while any(thread.is_alive() for thread in threads):
                self._look()
                threads[-1].join(_LOOK_S)
                threads.sort(key=threading.Thread.is_alive)
        except BaseException as exc:
            self._fail(exc)
            raise
        finally:
            for thread in started:  # they read the sender's memory, which may go now
                thread.join()
        self._look()
        return [self._received[i] for i in range(len(threads))]

    def _run(self, stream: int, receive: Receive) -> None:
        try:
            target = _BoxTarget(lambda pairs: self._fill(stream, pairs))
            self._received[stream] = receive(stream, target, self._check)
        except BaseException as exc:  # noqa: BLE001  # raised by the caller's thread
            self._fail(exc)
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _look(self) -> None:
        if self._error is not None:
            raise self._error
        self._context.check()

    def _check(self) -> None:
        """Raise in the thread of a stream when the update has failed."""
        if self._error is not None:
            raise TransferError("this update has failed in another stream")
        self._context.check()

    def _await(self, group: int) -> torch.Tensor:
        """Return the bytes of a group, once all boxes of it are there."""
        with self._changed:
            self._awaited = group
            while self._missing[group]:
                self._changed.wait(_LOOK_S)
                self._look()
            buffer = self._open.pop(group, torch.empty(0, dtype=torch.uint8))
            self._changed.notify_all()  # another group may be opened
        return buffer

    def _pass(self, group: int, buffer: torch.Tensor) -> None:
        """Pass the tensors of a group to the hook in one call."""
        plan = self._plan
        # Each stream's thread, and the hook, may use CUDA streams of their own.
        wait_for_all_streams([buffer.device])
        flats = [
            (plan.model.specs[i].name, own_storage(self._flat(i, buffer)))
            for i in plan.groups[group]
        ]
        if self._sums:
            specs = [plan.model.specs[i] for i in plan.groups[group]]
            self.parts |= parts_of(
                (name, flat, Slice.whole_of(spec.shape), TORCH_DTYPES[spec.dtype].itemsize)
                for (name, flat), spec in zip(flats, specs, strict=True)
            )
        counts = [uses(flat) for _, flat in flats]
        pairs: list[NamedTensor] = [
            (name, from_bytes(flat, plan.model.specs[i]))
            for i, (name, flat) in zip(plan.groups[group], flats, strict=True)
        ]
        self._context.mark_dirty()
        with users_code("load_weights") if self._target.users_own else nullcontext():
            self._target.load(pairs)
        del pairs
        if self._context.lends_views:
            refuse_kept(flats, counts, self._context.kept_advice)
        wait_for_all_streams([buffer.device])
        with self._changed:
            if buffer.numel():
                self._spare.append(buffer)
            self._changed.notify_all()

    def _flat(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        begin = self._plan.offsets[index]
        return buffer[begin : begin + self._plan.model.specs[index].nbytes]

    def _fill(self, stream: int, pairs: Sequence[NamedTensor]) -> None:
        """Copy boxes of a stream to their tensors; wait where their group is too far ahead."""
        plan = self._plan
        source = plan.streams[stream]
        for name, tensor in pairs:
            place = plan.places[stream][name]
            index, box = source.indices[place], source.boxes[place]
            group = plan.group_of[index]
            self._copy(tensor, box, index, self._opened(stream, group, tensor.device))
            with self._changed:
                self._left[stream][group] -= 1
                self._missing[group] -= 1
                if not self._missing[group]:
                    self._changed.notify_all()

    def _copy(self, tensor: torch.Tensor, box: Slice, index: int, buffer: torch.Tensor) -> None:
        """Copy a box to its tensor. No view of the buffer stays: those of a hook are counted."""
        if not tensor.numel():
            return
        with torch.inference_mode(False), torch.no_grad():
            full = from_bytes(self._flat(index, buffer), self._plan.model.specs[index])
            for inside, own in box.parts():
                full[inside].copy_(tensor[own])

    def _opened(self, stream: int, group: int, device: torch.device) -> torch.Tensor:
        """Return the buffer of a group; wait where too many are open that need no more boxes."""
        with self._changed:
            while group not in self._open:
                ahead = len(self._open) >= _OPEN_GROUPS
                needed = any(self._left[stream][other] for other in self._open)
                first = min((g for g, left in self._missing.items() if left), default=group)
                # Complete groups wait for one that comes later in all streams: these have to go on.
                stuck = first == self._awaited and not any(map(self._missing.get, self._open))
                # Not the first that is incomplete: where the hook is slow, that comes after others.
                if not ahead or needed or group == self._awaited or stuck:
                    self._open[group] = self._take(self._plan.nbytes[group], device)
                    break
                self._changed.wait(_LOOK_S)
                self._check()
            return self._open[group]

    def _take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `uint8[nbytes]`, a spare buffer where one is large enough."""
        for i, buffer in enumerate(self._spare):
            if buffer.numel() >= nbytes and buffer.device == device:
                return self._spare.pop(i)
        largest = max(self._plan.nbytes)  # one that any group can use again
        self._spare[:] = [buffer for buffer in self._spare if buffer.numel() >= largest]
        return arena.allocate(largest, device)


class _BoxTarget(PartTarget):
    """Takes the boxes of one stream, whose memory is valid until `load` returns."""

    users_own = False

    def __init__(self, fill: Callable[[Sequence[NamedTensor]], None]) -> None:
        self._fill = fill

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        self._fill(pairs)
