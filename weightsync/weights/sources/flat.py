"""Parameters of which each rank holds a run of elements, as FSDP1 and ZeRO-3 split them.

A run of a flattened tensor is no box of it, and a few boxes: the end of a row, whole rows, the
beginning of another one, and the same again in each further dimension. What the rank holds of each
is a view of its own piece. So nothing is gathered for receivers on the host of the ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.copying.shards import Span, is_sharded
from weightsync.weights.sinks.module_sink import ModuleTensors, Rename, strip_wrappers
from weightsync.weights.sources.base import DeclaredSource
from weightsync.weights.sources.declared import Holding
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.tensor_kinds import check_readable


class Run(NamedTuple):
    """Elements `[begin, end)` of the flattened tensor `name`, which lie at `at` of a piece."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    at: int


class Box(NamedTuple):
    """A part of a run that is a box of its tensor, `length` elements from `at` of the run."""

    spans: tuple[Span, ...]
    at: int
    length: int


def boxes_of_run(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes that together are the elements `[begin, end)`, in order.

    At most two for each dimension but the first, and one more. A tensor without elements is one.
    """
    if math.prod(shape) == 0:
        yield Box(tuple((0, size) for size in shape), 0, 0)
    else:
        yield from _boxes((), tuple(shape), begin, end, 0)


def _boxes(
    above: tuple[Span, ...], shape: tuple[int, ...], begin: int, end: int, at: int
) -> Iterator[Box]:
    """Yield the boxes of a run within one element of the dimensions `above`."""
    if begin >= end:
        return
    if not shape:
        yield Box(above, at, 1)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within a row
        inner = (*above, (last, last + 1))
        yield from _boxes(inner, shape[1:], begin - last * row, end - last * row, at)
        return
    if begin < first * row:
        inner = (*above, (first - 1, first))
        yield from _boxes(inner, shape[1:], begin - (first - 1) * row, row, at)
    if first < last:
        whole = tuple((0, size) for size in shape[1:])
        length = (last - first) * row
        yield Box((*above, (first, last), *whole), at + first * row - begin, length)
    if last * row < end:
        inner = (*above, (last, last + 1))
        yield from _boxes(inner, shape[1:], 0, end - last * row, at + last * row - begin)


class Piece(NamedTuple):
    """A tensor of this rank, and the runs that lie in it; none where it is a whole tensor.

    `name` is that of the tensor, or of the piece in messages.
    """

    name: str
    tensor: torch.Tensor
    runs: Sequence[Run] | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A box, and where it lies in its piece; `at` is None where the piece is the whole tensor."""

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    at: int | None
    length: int

    def of(self, piece: torch.Tensor) -> torch.Tensor:
        held = piece.detach()
        if self.at is None:
            return held
        sizes = [end - begin for begin, end in self.spans]
        return held.narrow(0, self.at, self.length).view(sizes)


class FlatSource(DeclaredSource):
    """The weights of ranks that hold runs of elements. Every rank gives its own to `connect`.

    `pieces` returns the same pieces of this rank in the same order in every update, as they are
    then. `buffers` returns tensors that share the memory of pieces, and follow where it is moved.
    `dtype` and `rename` as in `connect`.
    """

    def __init__(
        self,
        pieces: Callable[[], Sequence[Piece]],
        *,
        buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._pieces = pieces
        self._buffers = buffers
        found = pieces()
        self._kinds = list(map(_kind_of, found))
        self._runs = [piece.runs for piece in found]
        self._views = list(map(_views_of, found))
        super().__init__(self._declare, dtype=dtype, rename=rename)

    def holdings(self) -> Holdings:
        """Return the boxes that this rank holds."""
        return Holdings(
            self._names(), self._boxes, self._parts, buffers=self._buffers, bases=self._bases
        )

    def _parts(self) -> list[torch.Tensor]:
        """Return the boxes as they are now. Raises ManifestMismatchError where one is missing."""
        now = self._now()
        for piece in now:
            check_readable(piece.name, piece.tensor, self._dtype)
        pairs = zip(now, self._views, strict=True)
        return [view.of(piece.tensor) for piece, views in pairs for view in views]

    def _bases(self) -> list[torch.Tensor]:
        """Return the piece of each box."""
        pairs = zip(self._now(), self._views, strict=True)
        return [piece.tensor for piece, views in pairs for _ in views]

    def _declare(self) -> list[Holding]:
        return [
            Holding(view.name, view.shape, view.spans, view.of(piece.tensor))
            for piece, views in zip(self._now(), self._views, strict=True)
            for view in views
        ]

    def _now(self) -> Sequence[Piece]:
        """Return the pieces as they are now. Raises ManifestMismatchError for other ones."""
        now = self._pieces()
        kinds = list(map(_kind_of, now))
        if kinds != self._kinds or [piece.runs for piece in now] != self._runs:
            names = {kind[0] for kind in {*kinds} ^ {*self._kinds}}
            changed = sorted(names) or ["the order of its parameters, or where they are"]
            raise ManifestMismatchError(
                "this rank does not hold the pieces of parameters that it held at connect(): "
                f"{shorten(changed)}; connect again",
                mismatched=changed,
            )
        return now


def _kind_of(piece: Piece) -> tuple[str, torch.Size, torch.dtype]:
    return piece.name, piece.tensor.shape, piece.tensor.dtype


def _views_of(piece: Piece) -> list[_View]:
    if piece.runs is None:
        shape = tuple(piece.tensor.shape)
        whole = tuple((0, size) for size in shape)
        return [_View(piece.name, shape, whole, None, piece.tensor.numel())]
    return [
        _View(run.name, run.shape, box.spans, run.at + box.at, box.length)
        for run in piece.runs
        for box in boxes_of_run(run.shape, run.begin, run.end)
    ]


def fsdp1_source(
    model: nn.Module, *, dtype: Dtype | None, rename: Rename | None
) -> FlatSource | None:
    """Return the source of a model with FullyShardedDataParallel in it, None of any other one.

    Raises ConfigError for parameters that were DTensors before, and for a part of such a model.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    wrappers = [m for m in model.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    if not wrappers and not any(map(_is_of_fsdp1, model.parameters())):
        return None
    reader = _Fsdp1(model, [wrapper for wrapper in wrappers if wrapper._handle is not None])
    if parts := [piece.name for piece in reader.pieces() if _is_of_fsdp1(piece.tensor)]:
        raise ConfigError(
            f"{len(parts)} parameters are pieces of a FullyShardedDataParallel around the given "
            f"model: {shorten(parts)}; give connect() the outermost one"
        )
    return FlatSource(reader.pieces, buffers=reader.buffers, dtype=dtype, rename=rename)


def _is_of_fsdp1(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a view of a flat one (`use_orig_params`)."""
    return bool(getattr(tensor, "_fsdp_flattened", False)) and not hasattr(tensor, "_param_infos")


class _Fsdp1:
    """Reads the flat parameters of FSDP1, and what it left whole: buffers and ignored modules.

    Each unit has one flat parameter, of which each rank has an equal part with padding. What an
    optimizer writes is that part, also while a gathered copy takes its place in a forward pass.
    """

    def __init__(self, model: nn.Module, units: Sequence[Any]) -> None:
        names = {id(module): strip_wrappers(name) for name, module in model.named_modules()}
        self._units = units
        self._runs = [_runs_of(unit._handle, names) for unit in units]
        self._found = ModuleTensors(model)

    def pieces(self) -> list[Piece]:
        """Return the flat parameters of this rank, and the tensors that each rank has whole."""
        self._found.refresh()
        flat = []
        managed: set[int] = set()
        for unit, runs in zip(self._units, self._runs, strict=True):
            handle = unit._handle
            parameter = handle.flat_param
            managed.update(map(id, (parameter, *(getattr(parameter, "_params", None) or ()))))
            shard = _shard_of(parameter)
            if shard is parameter:
                _check_views(parameter, runs)
            flat.append(Piece(runs[0].name if runs else "", shard, runs))
        pairs = zip(self._found.names, self._found.tensors, strict=True)
        whole = [Piece(name, tensor) for name, tensor in pairs if id(tensor) not in managed]
        return [*flat, *whole]

    def buffers(self) -> list[torch.Tensor]:
        """Return the tensors that share the memory of the flat parameters."""
        found: list[torch.Tensor] = []
        for unit in self._units:
            parameter = unit._handle.flat_param
            found += [getattr(parameter, "_local_shard", parameter)]
            found += getattr(parameter, "_params", None) or ()
        return found


def _shard_of(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a flat parameter: the parameter itself unless it is gathered.

    Torch counts writes to the parameter by its own version.
    """
    shard: torch.Tensor = getattr(parameter, "_local_shard", parameter)  # set by the first forward
    whole: torch.Tensor = parameter
    return whole if shard.data_ptr() == whole.data_ptr() else shard


def _check_views(parameter: Any, runs: Sequence[Run]) -> None:
    """Raise ManifestMismatchError for parameters of the user (`use_orig_params`) that left theirs.

    One whose `data` was replaced has its new values beside the flat parameter, into which torch
    copies them when the next forward pass begins.
    """
    views = getattr(parameter, "_params", None) or ()
    infos = parameter._shard_param_infos
    held = [(view, info) for view, info in zip(views, infos, strict=False) if info.in_shard]
    begin, width = parameter.data_ptr(), parameter.element_size()
    moved = [
        run.name
        for run, (view, info) in zip(runs, held, strict=False)
        if view.data_ptr() != begin + info.offset_in_shard * width
    ]
    if moved:
        raise ManifestMismatchError(
            f"the memory of {len(moved)} parameters of FullyShardedDataParallel was replaced: "
            f"{shorten(moved)}; write into them (copy_), or run a forward pass first",
            mismatched=[f"{name}: other memory" for name in moved],
        )


def _runs_of(handle: Any, names: dict[int, str]) -> list[Run]:
    """Return the runs of a flat parameter that are in this rank's part."""
    parameter = handle.flat_param
    extended = [e for e in getattr(parameter, "_param_extensions", ()) if e is not None]
    if extended or is_sharded(parameter):
        raise ConfigError(
            "FullyShardedDataParallel over DTensors is not supported; shard the model with "
            "fully_shard, or give a callable that yields (name, full tensor) on every rank"
        )
    runs = []
    rows = zip(parameter._param_infos, parameter._shapes, parameter._shard_param_infos, strict=True)
    for info, shape, held in rows:
        if held.in_shard:
            prefix = names[id(info.module)]
            name = f"{prefix}.{info.param_name}" if prefix else info.param_name
            begin, end = held.intra_param_start_idx, held.intra_param_end_idx + 1
            runs.append(Run(name, tuple(shape), begin, end, held.offset_in_shard))
    return runs
