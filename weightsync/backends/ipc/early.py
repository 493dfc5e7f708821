"""Fingerprints of registered memory that are taken before an update, when its tensors are written.

The trainer says which tensors have the values of the next update. So its pass over them runs while
it goes on, beside its optimizer for instance, and not beside the receivers that copy them. What it
says is checked: a tensor that torch saw written since is read again. A write that torch does not
count makes another fingerprint than the receivers find, and fails the update. Not run on a GPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from weightsync.look import address_of, version_of
from weightsync.runtime.optimizer_steps import StepWindow, storage_address, stored_at
from weightsync.weights.copying.copy_plan import CompiledUnit
from weightsync.weights.copying.fused import Batch, reading
from weightsync.weights.copying.layout import StreamLayout

_KEPT_BATCHES = 256
"""Groups of copy units whose tables are kept: a trainer writes the same layers at each step."""

_Version = tuple[torch.Tensor, int]


class _Stamp(NamedTuple):
    """A tensor as it was said to be written, and the optimizer steps that began since.

    `counting` are further tensors on which torch counts writes to it. There are no weak references
    to these: while there are, `Module.to` fails for DTensors and tensors of torchao.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    counting: Sequence[_Version]
    window: StepWindow


class EarlyFingerprints:
    """The fingerprints of copy units whose tensors were said to be written. For one thread.

    `units` are the units of `layout` in registered memory, which does not move while this is used,
    and `addresses` those of its tensors.
    """

    def __init__(
        self, layout: StreamLayout, units: Sequence[CompiledUnit], addresses: Sequence[int]
    ) -> None:
        self._compiled = units
        self._addresses = addresses
        self._tensors_of = [
            [part.index for part in layout.slices(unit.start, unit.stop)] for unit in layout.units
        ]
        self._units_of: dict[int, list[int]] = {}
        for number, indices in enumerate(self._tensors_of):
            for index in indices:
                self._units_of.setdefault(index, []).append(number)
        self._stamps: dict[int, _Stamp] = {}
        self._windows: Counter[StepWindow] = Counter()
        self._found: dict[int, Callable[[], int]] = {}
        self._batches: dict[tuple[int, ...], Batch] = {}

    def note(
        self,
        tensors: Mapping[int, torch.Tensor],
        counting: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Read the units that these tensors complete; on a GPU enqueued on a stream of its own.

        `tensors` are stable ones by their index, and `counting` has those on which torch counts
        writes to them, where there are others. Tensors that are not in registered memory themselves
        (copied there by the update), and inference tensors, are left to the update.
        """
        window = StepWindow()
        concerned = sorted({unit for index in tensors for unit in self._units_of.get(index, ())})
        for unit in concerned:
            self._found.pop(unit, None)
        for index, tensor in tensors.items():
            self._drop(index)
            version = version_of(tensor)
            if version >= 0 and address_of(tensor) == self._addresses[index]:
                others = [(t, version_of(t)) for t in counting.get(index, ())]
                self._stamps[index] = _Stamp(weakref.ref(tensor), version, others, window)
                self._windows[window] += 1
        if not self._windows[window]:
            window.close()
            del self._windows[window]
        complete = [
            unit
            for unit in concerned
            if all(index in self._stamps for index in self._tensors_of[unit])
        ]
        if complete:
            self._read(complete)

    def take(self, tensors: Sequence[torch.Tensor]) -> dict[int, Callable[[], int]]:
        """Return functions that wait for fingerprints, by the number of the unit, and forget all.

        Of units whose tensors are as they were when they were noted: `tensors` are all stable ones.
        """
        written = {
            window: set[int]().union(*map(stored_at, window.close())) - {0}
            for window in self._windows
        }
        stale = {
            index
            for index, stamp in self._stamps.items()
            if stamp.tensor() is not tensors[index]
            or version_of(tensors[index]) != stamp.version
            or address_of(tensors[index]) != self._addresses[index]
            or storage_address(tensors[index]) in written[stamp.window]
            or any(map(_has_moved_on, stamp.counting))
        }
        found = {
            unit: read
            for unit, read in self._found.items()
            if stale.isdisjoint(self._tensors_of[unit])
        }
        self._forget()
        return found

    def close(self) -> None:
        """Wait for what was enqueued, and forget all: the memory is freed next. Idempotent."""
        for batch in self._batches.values():
            batch.wait()
        self._forget()
        self._batches.clear()
        self._compiled = ()

    def _forget(self) -> None:
        for window in self._windows:
            window.close()
        self._windows.clear()
        self._found.clear()
        self._stamps.clear()

    def _drop(self, index: int) -> None:
        """Forget a tensor; a window that no other one needs collects no more."""
        stamp = self._stamps.pop(index, None)
        if stamp is not None:
            self._windows[stamp.window] -= 1
            if not self._windows[stamp.window]:
                stamp.window.close()
                del self._windows[stamp.window]

    def _read(self, units: Sequence[int]) -> None:
        """Read these units, all at once where a kernel does."""
        compiled = [self._compiled[unit] for unit in units]
        if all(one.on_host for one in compiled):
            for unit, one in zip(units, compiled, strict=True):
                fingerprint = one.fingerprint()
                self._found[unit] = partial(int, fingerprint)
            return
        batch = self._batches.get(tuple(units)) or reading(compiled)
        if batch is None:
            return  # torch would wait for each of them
        if len(self._batches) >= _KEPT_BATCHES:
            self._batches.pop(next(iter(self._batches))).wait()
        self._batches[tuple(units)] = batch
        batch.launch()
        for place, unit in enumerate(units):
            self._found[unit] = partial(_fingerprint, batch, place)


def _has_moved_on(then: _Version) -> bool:
    tensor, version = then
    return version_of(tensor) != version


def _fingerprint(batch: Batch, place: int) -> int:
    return batch.fingerprints()[place]
