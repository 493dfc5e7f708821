"""The trainer's parameters in shared memory: the unpacked path on one host.

Every tensor has a fixed place in one segment. A tensor that alone uses its storage is *moved* there
(adopted). From then on the trainer's optimizer writes where the receivers read, and an update
copies nothing on the trainer's side. A tensor that cannot be moved (a view of a larger tensor, a
cast, a non-contiguous tensor) is copied to its place before each update.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.errors import ManifestMismatchError
from weightsync.runtime.optimizer_steps import held_back
from weightsync.shm.segment import Segment, live_segments

logger = logging.getLogger(__name__)

_SHAPE = operator.attrgetter("shape")
_STEP_S = 5.0
"""How long `close` waits for an optimizer step of another thread."""
_OWN_REFERENCES = 2
"""Use count of a storage with a single tensor: the tensor, and Python's wrapper of the storage."""


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Leave inference mode, because tensors that are made here are trained later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SharedStream:
    """Tensors at `offsets` of a segment of `nbytes` bytes.

    `dtypes` and `shapes` are those that are sent. The constructor creates the segment, and raises
    SegmentError if `/dev/shm` is too small.
    """

    @_plain_tensors()
    def __init__(
        self,
        offsets: Sequence[int],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        nbytes: int,
        *,
        adopt: bool,
    ) -> None:
        self.segment = Segment.create(max(nbytes, 1))
        self.finalizing = False
        self._adopt = adopt
        self._adopted: dict[int, torch.Tensor] = {}
        self._alias_storages: dict[int, StorageWeakRef] = {}
        self._views: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        for offset, dtype, shape in zip(offsets, dtypes, shapes, strict=True):
            size = torch.Size(shape)
            flat = self.segment.tensor(offset, size.numel() * dtype.itemsize)
            self.tensors.append(flat)
            self._views.append(flat.view(dtype).view(size))
        self._addresses = [view.data_ptr() for view in self._views]
        self._shapes = [view.shape for view in self._views]

    @property
    def adopted(self) -> frozenset[int]:
        """Indices of the tensors that were moved here."""
        return frozenset(self._adopted)

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the tensors that are copied here: the sender's memory beside its model."""
        if len(self._adopted) == len(self._views):
            return 0
        sizes = enumerate(flat.numel() for flat in self.tensors)
        return sum(nbytes for i, nbytes in sizes if i not in self._adopted)

    def is_adopted(self, index: int, address: int) -> bool:
        """Return whether `address` is the place of tensor `index` in this segment."""
        return self._addresses[index] == address

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move the tensors that can be moved. Called before a background thread sends them.

        An optimizer step that writes a parameter during the move would write to memory that is no
        longer in use.
        """
        if self._adopt:
            for i, (tensor, view) in enumerate(zip(tensors, self._views, strict=True)):
                if tensor.shape == view.shape and _alone_in_its_storage(tensor, view):
                    self._copy_or_move(i, tensor)

    def refresh(self, tensors: Sequence[torch.Tensor]) -> int:
        """Update every place; return the bytes that were copied.

        A tensor that was moved out of the segment (new storage, shape or stride) is copied and
        moved here again.
        """
        if len(self._adopted) == len(self._views) and self._all_in_place(tensors):
            return 0
        copied = 0
        places = zip(tensors, self._addresses, self._shapes, strict=True)
        for i, (tensor, address, shape) in enumerate(places):
            in_place = tensor.data_ptr() == address and tensor.shape == shape
            if not (in_place and tensor.is_contiguous() and i in self._adopted):
                copied += self._copy_or_move(i, tensor)
        return copied

    def _all_in_place(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are unchanged in their places: the usual case, no loop."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
            and all(map(operator.eq, map(_SHAPE, tensors), self._shapes))
            and all(map(torch.Tensor.is_contiguous, tensors))
        )

    @_plain_tensors()
    def occupied(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether another tensor still uses the place of a tensor that was moved away.

        After `aside = p.data; p.data = averaged`, `aside` uses the place of `p`. A copy of `p` to
        its place would overwrite `aside`, so the caller makes a new stream. Called before
        `refresh`.
        """
        if list(map(torch.Tensor.data_ptr, tensors)) == self._addresses:
            return False
        with held_back() as no_step_runs:
            for i, adopted in self._adopted.items():
                if tensors[i].data_ptr() == self._addresses[i]:
                    continue
                replaced = adopted is not tensors[i] and no_step_runs
                if replaced and adopted.data_ptr() == self._addresses[i]:
                    adopted.data = adopted.detach().clone()
                if not self._alias_storages[i].expired():  # type: ignore[no-untyped-call]  # torch's
                    return True
        return False

    @_plain_tensors()
    def write(self, index: int, tensor: torch.Tensor) -> None:
        """Copy one tensor to its place."""
        self._views[index].copy_(tensor.detach())

    @_plain_tensors()
    def close(self) -> None:
        """Move adopted tensors back into private memory and remove the segment. Idempotent.

        Waits at most 5 s for optimizer steps of other threads. If one still runs, the tensors stay
        in the mapping, which lives as long as they do. The same holds for any running step when
        the stream was `finalizing`, because the garbage collector may run during a step.
        """
        if self._adopted:
            with held_back(
                0.0 if self.finalizing else _STEP_S, own=self.finalizing
            ) as no_step_runs:
                if no_step_runs:
                    self._move_back()
        self._adopted.clear()
        self._views.clear()
        self.tensors.clear()
        self.segment.close()

    def _move_back(self) -> None:
        for i, tensor in self._adopted.items():
            if tensor.data_ptr() == self._addresses[i]:
                tensor.data = tensor.detach().clone()

    @_plain_tensors()
    def _copy_or_move(self, index: int, tensor: torch.Tensor) -> int:
        view = self._views[index]
        if tensor.shape != view.shape:
            raise ManifestMismatchError(
                f"tensor {index} has the shape {list(tensor.shape)} and had {list(view.shape)} at "
                "connect(); connect again"
            )
        if tensor.numel() == 0:
            return 0
        with held_back() as no_step_runs:  # a running step writes to the tensor's old memory
            view.copy_(tensor.detach())
            if no_step_runs and self._adopt and _alone_in_its_storage(tensor, view):
                tensor.data = self._new_alias(index)
                self._adopted[index] = tensor
            else:
                self._adopted.pop(index, None)
        return view.numel() * view.element_size()

    def _new_alias(self, index: int) -> torch.Tensor:
        """Return a view of the place with a new storage.

        `share_memory()` moves a storage with all its views. With a separate storage, the view that
        this object writes through stays in the segment.
        """
        view = self._views[index]
        offset = self._addresses[index] - self.segment.address
        flat = self.segment.tensor(offset, view.numel() * view.element_size())
        self._alias_storages[index] = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        return flat.view(view.dtype).view(view.shape)


def _alone_in_its_storage(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether `tensor` is the only user of its memory, so that it can be moved."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.dtype is not view.dtype or not tensor.is_contiguous() or not tensor.is_leaf:
        return False
    if tensor.is_inference():  # moved, it could not be viewed any more outside of inference mode
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        return False
    if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES:
        return False
    return not _in_shared_memory(tensor)


def _in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return whether another sender of this process has adopted `tensor`.

    If two senders adopted the same tensor, each update would move it again.
    """
    address = tensor.data_ptr()
    return tensor.is_shared() or any(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        segment.owner and segment.address <= address < segment.address + segment.nbytes
        for segment in live_segments()
    )
