"""The tensors of a source that all ranks of a trainer make together, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import torch

from weightsync.sending.call_off import CancelFlag, Cancellation, CancelledError
from weightsync.sending.ranks import RankComm
from weightsync.specs import Manifest
from weightsync.weights.shards import is_sharded
from weightsync.weights.source import IterableSource, WeightSource, checked, groups_of

Pair = tuple[str, torch.Tensor]


class CollectiveSource:
    """A WeightSource whose ranks exchange a status word before each group is gathered.

    A rank that fails in the middle of a group still takes part in the rest of that group's
    gathers, so that all ranks meet at the next word and raise there together. Shards that a
    callable yields are looked at on all ranks before any of them is gathered.
    """

    def __init__(self, source: WeightSource, ranks: RankComm) -> None:
        self._source = source
        self._ranks = ranks
        self._groups = groups_of(source.manifest)
        self._call_off = CancelFlag(ranks)
        self._making: Iterator[Pair] = iter(())
        self._rest: Iterator[Pair] = iter(())
        self._begin(lambda: None)

    @property
    def manifest(self) -> Manifest:
        """The source's own."""
        return self._source.manifest

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """The source's own."""
        return self._source.stable_tensors()

    def tensors(self) -> Iterator[Pair]:
        """Yield the source's tensors. Only inside `run`, and by every rank."""
        self._making = self._make()
        return self._making

    def run(self, work: Callable[[], None], *, check: Callable[[], None]) -> None:
        """Do one rank's part of a step; if it fails on any rank, raise on all of them.

        What `check` raises is raised here as it is: it says that this rank should leave. Any other
        error is raised as the ranks agree on it, and names its rank. `self.check` asks `check`,
        and whether another rank has left already, for waits in the middle of a group.
        """
        self._begin(check)
        self._call_off.next_turn()
        try:
            self._check_own()
            called_off = self._work(work)
            self._meet()
            self._over = True
            self._raise_late()
        except BaseException as exc:
            if not self._over:
                self._leave(exc)
            raise
        finally:
            self._making = self._rest = iter(())
        if called_off:
            raise CancelledError("another rank called the step off, and then found nothing wrong")

    def check(self) -> None:
        """Raise when this rank should leave the step, CalledOff when another one has."""
        self._check_own()
        self._call_off.look()

    def drain(self) -> None:
        """Take part in making every tensor without using any."""
        self._source.stable_tensors()  # raises, before anyone gathers, where a module has changed
        for _ in self.tensors():
            self.check()

    def _begin(self, check: Callable[[], None]) -> None:
        self._asked = check
        self._refused: BaseException | None = None
        self._late: BaseException | None = None
        self._over = False

    def _work(self, work: Callable[[], None]) -> bool:
        """Return whether the work was given up, because another rank gave up."""
        try:
            work()
        except Cancellation:
            for _ in self._making:
                pass
            return True
        return False

    def _make(self) -> Iterator[Pair]:
        shards = isinstance(self._source, IterableSource)
        made = self._source.shards if isinstance(self._source, IterableSource) else None
        pairs = checked((made or self._source.tensors)(), self._source.manifest)
        for group in self._groups:
            self._meet()
            left = len(group)
            while left:
                left -= self._take_shards(pairs, left) if shards else self._take(pairs, left)
                self._raise_late()
                yield from self._rest
        yield from pairs  # none is left; asking lets the source see its end

    def _take(self, pairs: Iterator[Pair], count: int) -> int:
        self._rest = islice(pairs, count)
        return count

    def _take_shards(self, pairs: Iterator[Pair], most: int) -> int:
        """Take neighbours that are shards, and gather none before all ranks have taken theirs.

        A tensor that is no shard may be overwritten when the next one is asked for.
        """
        taken: list[Pair] = []
        for pair in islice(pairs, most):
            taken.append(pair)
            if not is_sharded(pair[1]):
                break
        if is_sharded(taken[0][1]):
            self._meet()
        self._rest = map(self._gathered, taken)
        return len(taken)

    def _gathered(self, pair: Pair) -> Pair:
        assert isinstance(self._source, IterableSource)
        return pair[0], self._source.gather(pair[1])

    def _check_own(self) -> None:
        try:
            self._asked()
        except BaseException as exc:
            self._refused = exc
            raise

    def _meet(self) -> None:
        """Wait for the next word; what `check` raises meanwhile is kept until after it."""
        try:
            self._ranks.agree(look=self._look)
        except BaseException:
            self._over = True
            raise

    def _look(self) -> None:
        if self._late is not None:
            return
        try:
            self._check_own()
        except BaseException as exc:  # noqa: BLE001  # raised after the word, which is under way
            self._late = exc
            self._call_off.call()

    def _raise_late(self) -> None:
        if self._late is not None:
            raise self._late

    def _leave(self, error: BaseException) -> None:
        """Tell the others, who are on their way to the next word or wait for a receiver."""
        self._call_off.call()
        with suppress(Exception):
            for _ in self._rest:
                pass
        if isinstance(error, Exception) and error is not self._refused:
            self._ranks.agree(error)
        with suppress(Exception):
            self._ranks.agree(error)
