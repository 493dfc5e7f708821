"""A trainer's parameters in shared memory, moved there once: the unpacked path on a host.

Every tensor has its fixed place in one segment. A tensor that is alone in its storage is *moved*
there (adopted): from then on the trainer's optimizer writes where the receivers read, and an update
copies nothing on this side. A tensor that cannot be moved (a view of something larger, a cast, an
odd stride) is copied to its place before each update.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.errors import ManifestMismatchError
from weightsync.optimizer_steps import held_back
from weightsync.shm.segment import Segment, live_segments

logger = logging.getLogger(__name__)

_SHAPE = operator.attrgetter("shape")
_STEP_S = 5.0
"""How long a step of another thread may take before its tensors are left where they are."""
_OWN_REFERENCES = 2
"""Uses of a storage that only one tensor has: that tensor, and Python's wrapper of the storage."""


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """What is made here is trained later, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SharedStream:
    """Tensors at `offsets` of a segment of `nbytes` bytes.

    `dtypes` and `shapes` are those in which the tensors are sent. The segment is made here, so a
    `/dev/shm` too small is a SegmentError now.
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
        self.dropped = False
        self._adopt = adopt
        self._adopted: dict[int, torch.Tensor] = {}
        self._lent: dict[int, StorageWeakRef] = {}
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
        """Which tensors live here."""
        return frozenset(self._adopted)

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the tensors that do not live here: what a sender holds beside its model."""
        if len(self._adopted) == len(self._views):
            return 0
        sizes = enumerate(flat.numel() for flat in self.tensors)
        return sum(nbytes for i, nbytes in sizes if i not in self._adopted)

    def is_place(self, index: int, address: int) -> bool:
        """Whether `address` is the place of tensor `index` here."""
        return self._addresses[index] == address

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move those here that can be moved, before a thread of its own sends them.

        A step that writes a parameter while it is moved would write to memory that nobody reads
        any more.
        """
        if self._adopt:
            for i, (tensor, view) in enumerate(zip(tensors, self._views, strict=True)):
                if tensor.shape == view.shape and _alone_in_its_storage(tensor, view):
                    self._bring(i, tensor)

    def refresh(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bring every place up to date; return the bytes that had to be copied.

        A tensor that was moved elsewhere since (another storage, shape or stride) is copied and
        moved here again.
        """
        if len(self._adopted) == len(self._views) and self._stay(tensors):
            return 0
        copied = 0
        places = zip(tensors, self._addresses, self._shapes, strict=True)
        for i, (tensor, address, shape) in enumerate(places):
            stays = tensor.data_ptr() == address and tensor.shape == shape
            if not (stays and tensor.is_contiguous() and i in self._adopted):
                copied += self._bring(i, tensor)
        return copied

    def _stay(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all lie in their places as they were: the usual case, without a loop."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
            and list(map(_SHAPE, tensors)) == self._shapes
            and all(map(torch.Tensor.is_contiguous, tensors))
        )

    @_plain_tensors()
    def occupied(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether something else still uses the place of a tensor that moved elsewhere since.

        `aside = p.data; p.data = averaged` leaves `aside` in the place of `p`: to bring `p` there
        would overwrite it, so another stream has to be made. Asked before `refresh`.
        """
        if list(map(torch.Tensor.data_ptr, tensors)) == self._addresses:
            return False
        with held_back() as nobody_steps:
            for i, adopted in self._adopted.items():
                if tensors[i].data_ptr() == self._addresses[i]:
                    continue
                replaced = adopted is not tensors[i] and nobody_steps
                if replaced and adopted.data_ptr() == self._addresses[i]:
                    adopted.data = adopted.detach().clone()
                if not self._lent[i].expired():  # type: ignore[no-untyped-call]  # torch's
                    return True
        return False

    @_plain_tensors()
    def write(self, index: int, tensor: torch.Tensor) -> None:
        """Copy one tensor to its place."""
        self._views[index].copy_(tensor.detach())

    @_plain_tensors()
    def close(self) -> None:
        """Move adopted tensors back into their own memory, remove the segment. Idempotent.

        A step of another thread has 5 s to end, and holds the tensors where they are otherwise:
        the mapping lives as long as they do. So does any step where the stream was `dropped`: the
        garbage collector may come in the middle of it.
        """
        if self._adopted:
            with held_back(0.0 if self.dropped else _STEP_S, own=self.dropped) as nobody_steps:
                if nobody_steps:
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
    def _bring(self, index: int, tensor: torch.Tensor) -> int:
        view = self._views[index]
        if tensor.shape != view.shape:
            raise ManifestMismatchError(
                f"tensor {index} has become {list(tensor.shape)} and was {list(view.shape)} at "
                "connect(); connect again"
            )
        if tensor.numel() == 0:
            return 0
        with held_back() as nobody_steps:  # a step writes where the tensor was as it began
            view.copy_(tensor.detach())
            if nobody_steps and self._adopt and _alone_in_its_storage(tensor, view):
                tensor.data = self._lend(index)
                self._adopted[index] = tensor
            else:
                self._adopted.pop(index, None)
        return view.numel() * view.element_size()

    def _lend(self, index: int) -> torch.Tensor:
        """A view through a storage of its own: `share_memory()` moves a storage with all its views.

        What is written here and what receivers read must stay in the segment then.
        """
        view = self._views[index]
        offset = self._addresses[index] - self.segment.address
        flat = self.segment.tensor(offset, view.numel() * view.element_size())
        self._lent[index] = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        return flat.view(view.dtype).view(view.shape)


def _alone_in_its_storage(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether nothing but `tensor` sees its memory, so that moving it moves all there is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.dtype is not view.dtype or not tensor.is_contiguous() or not tensor.is_leaf:
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        return False
    if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES:
        return False
    return not _in_shared_memory(tensor)


def _in_shared_memory(tensor: torch.Tensor) -> bool:
    """Another sender of this process has adopted it; taking it away would go back and forth."""
    address = tensor.data_ptr()
    return tensor.is_shared() or any(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        segment.owner and segment.address <= address < segment.address + segment.nbytes
        for segment in live_segments()
    )
