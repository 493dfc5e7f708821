"""Prompts whose attention cache workers keep, so that what begins alike is read once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_KEPT_TOKENS = 4096
MAX_KEPT_PROMPTS = 32
MIN_SHARED_TOKENS = 16


@dataclass(slots=True)
class _Kept:
    tokens: tuple[int, ...]
    version: int | None = None
    """Of the weights that read its beginning; None until it was read."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first `length` tokens of a prompt are those of the kept prompt `key`.

    `version` is of the weights that read them.
    """

    key: int
    length: int
    version: int


class PrefixCache:
    """The prompts that were read last, up to `max_tokens` tokens in all; pure bookkeeping.

    Those with fewer than `min_shared` tokens are not worth it. A prompt that is being read may not
    be reused before it was.
    """

    def __init__(
        self,
        *,
        max_tokens: int = MAX_KEPT_TOKENS,
        max_prompts: int = MAX_KEPT_PROMPTS,
        min_shared: int = MIN_SHARED_TOKENS,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_prompts = max_prompts
        self._min_shared = min_shared
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._evicted: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_evicted(self) -> bool:
        """Whether the workers keep what is to be forgotten."""
        return bool(self._evicted)

    def find(self, prompt: list[int]) -> Beginning | None:
        """Return the kept prompt that shares the longest beginning with this one.

        The last token of a prompt is always read anew: what it says is the first token's.
        """
        best: Beginning | None = None
        for key, kept in self._kept.items():
            if kept.version is None:
                continue
            length = min(_shared(kept.tokens, prompt), len(prompt) - 1)
            if length >= self._min_shared and (best is None or length > best.length):
                best = Beginning(key, length, kept.version)
        if best is not None:
            self._kept.move_to_end(best.key)
        return best

    def add(self, prompt: list[int]) -> int | None:
        """Number a prompt that is about to be read, and make room for it; None: do not keep it."""
        tokens = tuple(prompt)
        known = any(kept.tokens == tokens for kept in self._kept.values())
        if known or not self._min_shared < len(prompt) <= self._max_tokens:
            return None
        self._next += 1
        self._kept[self._next] = _Kept(tokens)
        self._shrink(spare=self._next)
        return self._next

    def read(self, key: int, version: int | None) -> None:
        """A prompt was read, its beginning by weights of `version`, or (None) could not be."""
        if version is None:  # no worker has it
            self._kept.pop(key, None)
            self._evicted = [evicted for evicted in self._evicted if evicted != key]
        elif key in self._kept:
            self._kept[key].version = version

    def clear(self) -> None:
        """Evict all."""
        for key in list(self._kept):
            self._evict(key)

    def take_evicted(self) -> list[int]:
        """Return what is to be forgotten by the workers, once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _shrink(self, *, spare: int) -> None:
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_prompts or self._total > self._max_tokens
        ):
            self._evict(next(key for key in self._kept if key != spare))

    @property
    def _total(self) -> int:
        return sum(len(kept.tokens) for kept in self._kept.values())

    def _evict(self, key: int) -> None:
        del self._kept[key]
        self._evicted.append(key)


def _shared(first: tuple[int, ...], second: list[int]) -> int:
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return min(len(first), len(second))
