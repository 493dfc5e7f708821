"""The trainer's parameters in shared memory: the unpacked path on one host.

Every tensor has a fixed place in one segment. A tensor that alone uses its storage is *moved* there
(adopted). From then on the trainer's optimizer writes where the receivers read, and an update
copies nothing on the trainer's side. A tensor that cannot be moved (a view of a larger tensor, a
cast, a non-contiguous tensor) is copied to its place before each update. Tensors that are known to
share its storage, as the flat buffers of FSDP2 do with the shards, are moved with it.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.errors import ManifestMismatchError, TransferError
from weightsync.look import Look, are_plain
from weightsync.runtime.optimizer_steps import held_back
from weightsync.shm.segment import Segment, live_segments

logger = logging.getLogger(__name__)

_SHAPE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STEP_S = 5.0
"""How long `close` waits for an optimizer step of another thread."""
_OWN_REFERENCES = 2
"""Use count of a storage with a single tensor: the tensor, and Python's wrapper of the storage."""


def _is_plain(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether the bytes of a tensor at the address of `view` are those that `view` reads."""
    lazy = tensor.is_neg() or tensor.is_conj()
    return tensor.dtype is view.dtype and tensor.is_contiguous() and not lazy


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Leave inference mode, because tensors that are made here are trained later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SharedStream:
    """Tensors at `offsets` of a segment of `nbytes` bytes.

    `dtypes` and `shapes` are those that are sent. `buffers` returns tensors that may share the
    storage of one that is moved: its whole storage is moved then, where its place has room. So
    does `views`, which are in use for an update alone: they are not kept. `parts`, each a tensor by
    its index, the first byte and the bytes, are the registered `tensors` instead of whole ones, and
    `offsets` are theirs. `moves` counts the tensors that `occupied` has moved out of the segment.
    The constructor creates the segment, and raises SegmentError if `/dev/shm` is too small.
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
        buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
        views: Callable[[], Sequence[torch.Tensor]] = tuple,
        parts: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        self.segment = Segment.create(max(nbytes, 1))
        self.finalizing = False
        self.moves = 0
        self._adopt = adopt
        self._buffers = buffers
        self._used = views
        self._passing: set[int] = set()
        self._rooms = rooms(offsets, nbytes)
        self._adopted: dict[int, list[torch.Tensor]] = {}
        self._alias_storages: dict[int, StorageWeakRef] = {}
        self._views: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        for offset, dtype, shape in zip(offsets, dtypes, shapes, strict=True):
            size = torch.Size(shape)
            flat = self.segment.tensor(offset, size.numel() * dtype.itemsize)
            self.tensors.append(flat)
            self._views.append(flat.view(dtype).view(size))
        self._flats = self.tensors
        self._bases = None if parts is None else [i for i, _, _ in parts]
        self.offsets = list(offsets)
        if parts is not None:
            self.tensors = [self._flats[i][at : at + size] for i, at, size in parts]
            self.offsets = [offsets[i] + at for i, at, _ in parts]
        self._addresses = [view.data_ptr() for view in self._views]
        self._part_addresses = [flat.data_ptr() for flat in self.tensors]
        self._shapes = [view.shape for view in self._views]
        self._dtypes = [view.dtype for view in self._views]

    @property
    def adopted(self) -> frozenset[int]:
        """Indices of the tensors that were moved here."""
        return frozenset(self._adopted)

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the tensors that are copied here: the sender's memory beside its model."""
        if len(self._adopted) == len(self._views):
            return 0
        sizes = enumerate(flat.numel() for flat in self._flats)
        return sum(nbytes for i, nbytes in sizes if i not in self._adopted)

    def is_adopted(self, index: int, address: int) -> bool:
        """Return whether `address` is the place of part `index` in this segment."""
        return self._part_addresses[index] == address

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move the tensors that can be moved. Called before a background thread sends them.

        An optimizer step that writes a parameter during the move would write to memory that is no
        longer in use.
        """
        if self._adopt:
            known = self._users()
            for i, (tensor, view) in enumerate(zip(tensors, self._views, strict=True)):
                companions = _companions(tensor, known)
                if tensor.shape == view.shape and self._movable(i, tensor, companions):
                    self._copy_or_move(i, tensor, companions)

    def refresh(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int] | None = None
    ) -> int:
        """Update every place; return the bytes that were copied.

        A tensor that was moved out of the segment (new storage, shape or stride) is copied and
        moved here again. `addresses` are those of the tensors, where it is known that they have
        their shapes here, after `occupied` was False.
        """
        if len(self._adopted) == len(self._views) and (
            addresses == self._addresses or self._all_in_place(tensors)
        ):
            return 0
        copied = 0
        known = self._users()
        places = zip(tensors, self._addresses, self._shapes, strict=True)
        for i, (tensor, address, shape) in enumerate(places):
            in_place = tensor.data_ptr() == address and tensor.shape == shape
            if not (in_place and _is_plain(tensor, self._views[i]) and i in self._adopted):
                copied += self._copy_or_move(i, tensor, _companions(tensor, known))
        return copied

    def _all_in_place(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are unchanged in their places: the usual case, no loop."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
            and all(map(operator.eq, map(_SHAPE, tensors), self._shapes))
            and self._are_plain(tensors)
        )

    def _are_plain(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return `_is_plain` of all tensors, without a loop in Python."""
        return list(map(_DTYPE, tensors)) == self._dtypes and are_plain(tensors)

    @_plain_tensors()
    def occupied(self, tensors: Sequence[torch.Tensor], look: Look | None = None) -> bool:
        """Return whether a place is used by other than the tensor that was moved there, as it was.

        After `aside = p.data; p.data = averaged`, `aside` uses the place of `p`. After
        `p.data = p.data.t()`, `p` itself does, in another order. A copy of `p` to its place would
        overwrite what lies there, so the caller makes a new stream. Called before `refresh`. `look`
        is what is known of these tensors at this time.
        """
        if look is not None and look.plain and look.dtypes == self._dtypes:
            if look.addresses == self._addresses:
                return False
        elif list(map(torch.Tensor.data_ptr, tensors)) == self._addresses:
            return not self._are_plain(tensors)
        with held_back() as no_step_runs:
            for i, moved in self._adopted.items():
                adopted = moved[0]
                if tensors[i].data_ptr() == self._addresses[i]:
                    if not _is_plain(tensors[i], self._views[i]):
                        return True
                    continue
                replaced = adopted is not tensors[i] and no_step_runs
                if replaced and adopted.data_ptr() == self._addresses[i]:
                    _to_private(moved)
                    self.moves += 1
                if not self._alias_storages[i].expired():  # type: ignore[no-untyped-call]  # torch's
                    return True
        return False

    @_plain_tensors()
    def write(self, index: int, tensor: torch.Tensor) -> None:
        """Copy one tensor to its place, or one part to the place of that part."""
        view = self._views[index] if self._bases is None else self._part(index, tensor.shape)
        view.copy_(tensor.detach())

    def _part(self, index: int, shape: torch.Size) -> torch.Tensor:
        assert self._bases is not None
        return self.tensors[index].view(self._views[self._bases[index]].dtype).view(shape)

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
        self._flats.clear()
        self.tensors.clear()
        self.segment.close()

    def _move_back(self) -> None:
        for i, moved in self._adopted.items():
            if moved[0].data_ptr() == self._addresses[i]:
                _to_private(moved)

    def _users(self) -> dict[int, list[torch.Tensor]]:
        """Return the tensors that are known to use each storage, by its address."""
        lasting, passing = self._buffers(), self._used()
        known = companions_of([*lasting, *passing])
        kept = {id(t) for users in companions_of(lasting).values() for t in users}
        self._passing = {id(t) for users in known.values() for t in users} - kept
        return known

    def _movable(
        self, index: int, tensor: torch.Tensor, companions: Sequence[torch.Tensor]
    ) -> bool:
        """Whether only a tensor and `companions` use its storage, and its place has room for it."""
        view = self._views[index]
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
            return False
        nbytes = view.numel() * view.element_size()
        if companions:
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes > self._rooms[index] or tensor.storage_offset():
                return False
        return _alone_in_its_storage(tensor, view, nbytes, len(companions))

    @_plain_tensors()
    def _copy_or_move(
        self, index: int, tensor: torch.Tensor, companions: Sequence[torch.Tensor]
    ) -> int:
        view = self._views[index]
        if tensor.shape != view.shape:
            raise ManifestMismatchError(
                f"tensor {index} has the shape {list(tensor.shape)} and had {list(view.shape)} at "
                "connect(); connect again"
            )
        if tensor.numel() == 0:
            return 0
        if tensor.data_ptr() == self._addresses[index] and not _is_plain(tensor, view):
            # `occupied` found this before the update began, or another thread has just done it.
            raise TransferError(
                f"tensor {index} was turned round in its memory (transposed, viewed as another "
                "dtype) while an update began; send it again"
            )
        with held_back() as no_step_runs:  # a running step writes to the tensor's old memory
            view.copy_(tensor.detach())
            if no_step_runs and self._adopt and self._movable(index, tensor, companions):
                if companions:
                    _move([tensor, *companions], self._new_storage(index, tensor))
                else:
                    tensor.data = self._new_alias(index)
                lasting = (other for other in companions if id(other) not in self._passing)
                self._adopted[index] = [tensor, *lasting]
            else:
                self._adopted.pop(index, None)
        return view.numel() * view.element_size()

    def _new_storage(self, index: int, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return a new storage over a place, with all bytes of the storage of a tensor."""
        storage = tensor.untyped_storage()
        offset = self._addresses[index] - self.segment.address
        place = self.segment.tensor(offset, storage.nbytes()).untyped_storage()
        place.copy_(storage)
        self._alias_storages[index] = StorageWeakRef(place)  # type: ignore[no-untyped-call]
        return place

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


def rooms(offsets: Sequence[int], nbytes: int) -> list[int]:
    """Return the bytes from each offset to the next one, the last time to `nbytes`."""
    return [end - begin for begin, end in itertools.pairwise([*offsets, nbytes])]


def companions_of(buffers: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Return the tensors that use each storage of `buffers`, by its address.

    A view keeps alive the tensor that it was made of, which is another user of its storage.
    """
    found: dict[int, list[torch.Tensor]] = {}
    for buffer in buffers:
        users = found.setdefault(buffer.untyped_storage().data_ptr(), [])
        for tensor in (buffer, buffer._base):
            if tensor is not None and all(tensor is not known for known in users):
                users.append(tensor)
    return found


def companion_sizes(buffers: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of `buffers`, by its address."""
    storages = [buffer.untyped_storage() for buffer in buffers]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def address_of_storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, 0 for a tensor of another class."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in _PLAIN else 0


def _companions(
    tensor: torch.Tensor, known: Mapping[int, Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return the other tensors that are known to use the storage of a tensor."""
    if not known or type(tensor) not in _PLAIN or tensor.device.type != "cpu":
        return []
    users = known.get(tensor.untyped_storage().data_ptr(), ())
    others = [*users, tensor._base] if users and tensor._base is not None else users
    return list({id(t): t for t in others if t is not tensor}.values())


def _to_private(moved: Sequence[torch.Tensor]) -> None:
    """Move a tensor back to private memory, with those that share its storage."""
    if len(moved) == 1:
        moved[0].data = moved[0].detach().clone()
        return
    storage = moved[0].untyped_storage()
    together = [t for t in moved if t.untyped_storage().data_ptr() == storage.data_ptr()]
    _move(together, storage.clone())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _move(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> None:
    """Point tensors that share one storage at the same places of another one."""
    for tensor in tensors:
        made = torch.empty(0, dtype=tensor.dtype)
        tensor.data = made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _alone_in_its_storage(
    tensor: torch.Tensor, view: torch.Tensor, nbytes: int, others: int
) -> bool:
    """Return whether `tensor` and `others` that are known alone use its storage of `nbytes`."""
    if tensor.dtype is not view.dtype or not tensor.is_contiguous() or not tensor.is_leaf:
        return False
    if tensor.is_inference():  # moved, it could not be viewed any more outside of inference mode
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:
        return False
    if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES + others:
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
