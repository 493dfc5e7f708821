"""Whether a source changed while it was sent: what receivers got may then be of two steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weightsync import optimizer_steps
from weightsync.optimizer_steps import StepWindow, storage_address, stored_at

_version_of = operator.attrgetter("_version")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dtype_of = operator.attrgetter("dtype")


class SourceWatch:
    """Compares tensors at the end of a transfer with what they were at its begin.

    Seen: a raised `_version`, another data address or dtype, and a step of a torch optimizer over
    their storage. Not seen: writes that torch does not count (through `.data`, NumPy or another
    process), and operators outside of an optimizer's step that run across the end of the transfer.
    """

    def __init__(self) -> None:
        optimizer_steps.install()
        self._names: Sequence[str] = ()
        self._tensors: Sequence[torch.Tensor] = ()
        self._seen: list[list[object]] = []
        self._window: StepWindow | None = None

    def begin(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Remember `tensors` as they are now; they are kept alive until `end`."""
        self.end()
        self._window = StepWindow()
        self._names, self._tensors = with_shards(names, tensors)
        self._seen = _look(self._tensors)

    def end(self, is_place: Callable[[int, int], bool] = lambda _, __: False) -> list[str]:
        """Return the names of those that changed since `begin`, and forget all.

        `is_place(i, address)` says that the sender itself moved tensor `i` to that address.
        """
        window, self._window = self._window, None
        names, tensors, seen = self._names, self._tensors, self._seen
        self._names, self._tensors, self._seen = (), (), []
        if window is None:
            return []
        stepped = window.close()
        now = _look(tensors)
        changed: set[int] = set()
        if now != seen:
            changed |= set(_differences(seen, now, is_place))
        if stepped:
            written = set[int]().union(*map(stored_at, stepped)) - {0}
            changed |= {i for i, t in enumerate(tensors) if storage_address(t) in written}
        return list(dict.fromkeys(names[i] for i in sorted(changed)))


class YieldWatch:
    """The same for tensors that a callable yields one by one, and may overwrite in between.

    Call `note` after the callable gave a tensor, `read` before it is asked for the next one. What
    the callable itself changes is its own affair: a buffer that it fills again, an adapter that it
    merges and takes out again. No tensor is kept alive. Of those that live no longer than until
    the next one, only steps over their storage are seen; what new tensors were made of is not
    known here.
    """

    def __init__(self) -> None:
        optimizer_steps.install()
        self._window = StepWindow()
        self._noted: dict[int, tuple[str, weakref.ref[torch.Tensor], int]] = {}
        self._last: list[tuple[str, torch.Tensor, int, int]] = []
        self._before: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self._changed: dict[str, None] = {}

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """The callable yielded this tensor; what it did to the last one before that is its own."""
        for key, find in self._before:
            last = find()
            if last is not None:
                self._noted[key] = self._noted[key][0], find, _version(last)
        self._before.clear()
        for part in _parts(tensor):
            version = _version(part)
            self._last.append((name, part, version, _address(part)))
            find = weakref.ref(part if part._base is None else part._base)
            key = storage_address(part) or id(part)
            self._noted[key] = name, find, version
            self._before.append((key, find))

    def read(self) -> None:
        """The last tensor's bytes were taken."""
        for name, part, version, address in self._last:
            if _version(part) != version or _address(part) != address:
                self._changed[name] = None
        self._last.clear()

    def end(self) -> list[str]:
        """Return the names of those that others changed since they were yielded."""
        self.read()
        written = set[int]().union(*map(stored_at, self._window.close()))
        for address, (name, find, version) in self._noted.items():
            tensor = find()
            if address in written or (tensor is not None and _version(tensor) != version):
                self._changed[name] = None
        self._noted.clear()
        self._before.clear()
        return list(self._changed)


def with_shards(
    names: Iterable[str], tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[str], Sequence[torch.Tensor]]:
    """Return the tensors, and beside each DTensor its local shard, which optimizers write."""
    if not any(hasattr(tensor, "_local_tensor") for tensor in tensors):
        return list(names), tensors
    parts = [(name, p) for name, t in zip(names, tensors, strict=True) for p in _parts(t)]
    return [name for name, _ in parts], [tensor for _, tensor in parts]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if type(tensor) in _PLAIN:
        return (tensor,)
    local = getattr(tensor, "_local_tensor", None)
    return (tensor,) if local is None else (tensor, local)


def _look(tensors: Sequence[torch.Tensor]) -> list[list[object]]:
    """Versions, addresses and dtypes, each a loop without Python in it where that goes."""
    try:
        versions = list(map(_version_of, tensors))
    except RuntimeError:
        versions = list(map(_version, tensors))
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except (RuntimeError, NotImplementedError):
        addresses = list(map(_address, tensors))
    return [versions, addresses, list(map(_dtype_of, tensors))]


def _differences(
    before: list[list[object]], now: list[list[object]], is_place: Callable[[int, int], bool]
) -> Iterator[int]:
    rows = enumerate(zip(zip(*before, strict=True), zip(*now, strict=True), strict=True))
    for i, ((version, address, dtype), (version_now, address_now, dtype_now)) in rows:
        moved = address != address_now and not is_place(i, int(address_now))
        if version != version_now or dtype is not dtype_now or moved:
            yield i


def _version(tensor: torch.Tensor) -> int:
    """Inference tensors have no version."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def _address(tensor: torch.Tensor) -> int:
    """Tensors of some classes have no memory of their own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
