"""Key-value caches of a batch of rows, and of prompts that are kept for reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from weightsync.serve.messages import RowId

_SPARE_TOKENS = 64

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, [rows, heads, tokens, head size] each; head sizes may differ."""


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call] # transformers annotates in part
    """One layer's keys and values with spare room, so that a decode step copies only its token."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call] # as above
        self._rooms: list[torch.Tensor] = []

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the keys and values. The tensors are not copied."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._rooms = []
        self.keys, self.values = keys, values

    def reset(self) -> None:
        """Drop all keys and values, and free their memory.

        Not as transformers 5.0 does it, which writes zeros and keeps the columns.
        """
        self._rooms = []
        self.keys = self.values = None
        self.is_initialized = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        """Append the keys and values of new tokens; return all. Called by the model."""
        if self.get_seq_length() == 0:
            self.put(key_states.contiguous(), value_states.contiguous())
        else:
            self._append(key_states, value_states)
        return self.held()

    def crop(self, max_length: int) -> None:
        """Keep the first columns; the next update writes over the others."""
        keys, values = self.held()
        self.keys, self.values = keys[..., :max_length, :], values[..., :max_length, :]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep, repeat or reorder rows."""
        keys, values = self.held()
        self.put(keys.index_select(0, indices), values.index_select(0, indices))

    def _append(self, *new: torch.Tensor) -> None:
        held = self.held()
        begin, end = held[0].shape[-2], held[0].shape[-2] + new[0].shape[-2]
        if not self._rooms or self._rooms[0].shape[-2] < end:
            self._rooms = [_with_room(tensor, end) for tensor in held]
        for room, tensor in zip(self._rooms, new, strict=True):
            room[..., begin:end, :] = tensor
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)

    def held(self) -> KeysAndValues:
        """Return all keys and values. The next update does not write to them.

        The layer must not be empty.
        """
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


def cached_layers(cache: Cache) -> list[PreallocatedLayer]:
    """Return the layers of a cache that store keys and values; other layers share them."""
    return [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)]


class CachedPrefix:
    """Keys and values of a prompt, reused by later prompts with the same first tokens."""

    def __init__(self, tokens: Sequence[int], layers: Sequence[KeysAndValues]) -> None:
        self.tokens = list(tokens)
        self._layers = list(layers)

    @classmethod
    def of(cls, tokens: Sequence[int], cache: Cache, row: int) -> CachedPrefix:
        """Return a copy of the last `len(tokens)` columns of one row."""
        part = (slice(row, row + 1), slice(None), slice(-len(tokens), None))
        layers = [_copies(layer, part) for layer in cached_layers(cache)]
        return cls(tokens, layers)

    def common_length(self, prompt: Sequence[int]) -> int:
        """Return the length of the prefix that `prompt` shares with this prompt."""
        pairs = zip(self.tokens, prompt, strict=False)
        shorter = min(len(self.tokens), len(prompt))
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)

    def fill(self, cache: Cache, length: int) -> None:
        """Put the first `length` tokens into an empty cache, which does not write to them."""
        for layer, (keys, values) in zip(cached_layers(cache), self._layers, strict=True):
            layer.put(keys[..., :length, :], values[..., :length, :])


class BatchedKVCache:
    """The cache of all live rows. The model gets `cache`, `mask()` and `positions()`."""

    def __init__(self, cache: Cache, device: torch.device) -> None:
        self.cache = cache
        self.rows: list[RowId] = []
        self.device = device
        self._pads = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def width(self) -> int:
        """The number of columns: the tokens of the longest row."""
        return self.cache.get_seq_length()

    def join(self, rows: Sequence[RowId], cache: Cache, pads: Sequence[int]) -> None:
        """Add the rows of `cache` as `rows`; `pads` are their numbers of padding columns."""
        old_width, new_width = self.width, cache.get_seq_length()
        width = max(old_width, new_width)
        for ours, theirs in zip(cached_layers(self.cache), cached_layers(cache), strict=True):
            ours.put(*_joined(ours, theirs, width))
        new_pads = torch.tensor(pads, dtype=torch.int64, device=self.device)
        self._pads = torch.cat((self._pads + width - old_width, new_pads + width - new_width))
        self.rows.extend(rows)

    def drop(self, rows: Sequence[RowId]) -> None:
        """Remove `rows`, and the columns that only they used. Unknown rows are ignored."""
        gone = set(rows)
        left = [i for i, row in enumerate(self.rows) if row not in gone]
        if len(left) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in left]
        if not left:
            self._clear()
            return
        self._trim(torch.tensor(left, device=self.device))

    def _trim(self, index: torch.Tensor) -> None:
        """Keep the rows at `index`, and the columns that they use."""
        pads = self._pads[index]
        unused = int(pads.min())
        self._pads = pads - unused
        for layer in cached_layers(self.cache):
            kept = (tensor[..., unused:, :].index_select(0, index) for tensor in layer.held())
            layer.put(*kept)

    def cut(self, unused: torch.Tensor) -> None:
        """Remove the last `unused[i]` columns, int64[rows], of each row, which were just read."""
        width = self.width - int(unused.min())
        shifts = unused - unused.min()
        lagging = {shift: shifts == shift for shift in set(shifts.tolist()) - {0}}
        for layer in cached_layers(self.cache):
            layer.crop(width)
            for tensor in layer.held():
                for shift, rows in lagging.items():  # all rows end in the same column
                    tensor[rows, :, shift:] = tensor[rows, :, :-shift]
        self._pads = self._pads + shifts
        if int(self._pads.min()) > _SPARE_TOKENS:
            self._trim(torch.arange(len(self.rows), device=self.device))

    def mask(self, new: int = 1) -> torch.Tensor:
        """Return int64[rows, width + new]: the columns that each row's next tokens attend to."""
        columns = torch.arange(self.width + new, device=self.device)
        return (columns >= self._pads[:, None]).to(torch.int64)

    def positions(self, new: int = 1) -> torch.Tensor:
        """Return int64[rows, new]: the positions of the next tokens in their rows."""
        columns = torch.arange(self.width, self.width + new, device=self.device)
        return columns - self._pads[:, None]

    def _clear(self) -> None:
        self._pads = self._pads[:0]
        for layer in cached_layers(self.cache):
            layer.reset()


def _with_room(held: torch.Tensor, tokens: int) -> torch.Tensor:
    rows, heads, length, size = held.shape
    room = held.new_empty(rows, heads, tokens + _SPARE_TOKENS, size)
    room[..., :length, :] = held
    return room


def _copies(layer: PreallocatedLayer, part: tuple[slice, ...]) -> KeysAndValues:
    keys, values = layer.held()
    return keys[part].clone(), values[part].clone()


def _joined(
    ours: PreallocatedLayer, theirs: PreallocatedLayer, width: int
) -> Iterator[torch.Tensor]:
    for old, new in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert new is not None
        parts = [new] if old is None else [old, new]
        _, heads, _, size = new.shape
        # Padding is masked, but must be finite: masked values are multiplied by zero.
        whole = new.new_zeros(sum(map(len, parts)), heads, width, size)
        begin = 0
        for part in parts:
            whole[begin : begin + len(part), :, width - part.shape[-2] :] = part
            begin += len(part)
        yield whole
