"""The tensors of a source that all ranks of a trainer make together, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import torch

from weightsync.errors import TransferError
from weightsync.sending.call_off import CalledOff, CallOff
from weightsync.sending.ranks import Ranks
from weightsync.specs import Manifest
from weightsync.weights.groups import groups_of
from weightsync.weights.source import WeightSource, checked


class Lockstep:
    """A WeightSource whose ranks exchange a status word before each group is gathered.

    A rank that fails in the middle of a group still takes part in the rest of that group's
    gathers, so that all ranks meet at the next word and raise there together.
    """

    def __init__(self, source: WeightSource, ranks: Ranks) -> None:
        self._source = source
        self._ranks = ranks
        self._groups = groups_of(source.manifest)
        self._rest: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._parted = False
        self._call_off = CallOff(ranks)
        self.check: Callable[[], None] = lambda: None

    @property
    def manifest(self) -> Manifest:
        """The source's own."""
        return self._source.manifest

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """The source's own."""
        return self._source.stable_tensors()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source's tensors. Only inside `run`, and by every rank."""
        pairs = checked(self._source.tensors(), self._source.manifest)
        for group in self._groups:
            self._meet()
            self._rest = islice(pairs, len(group))
            yield from self._rest
        yield from pairs  # none is left; asking lets the source see its end

    def run(self, work: Callable[[], None], *, check: Callable[[], None]) -> None:
        """Do one rank's part of a step; if it fails on any rank, raise on all of them.

        `check` raises when this rank should leave; `self.check` asks it and whether another rank
        has left already, for waits in the middle of a group.
        """
        self._parted = False
        self._call_off.next_turn()

        def check_all() -> None:
            check()
            self._call_off.look()

        self.check = check_all
        try:
            work()
            self._meet()
        except CalledOff:
            self._leave(None)
        except BaseException as exc:
            self._leave(exc)
            raise
        finally:
            self._rest = iter(())

    def drain(self) -> None:
        """Take part in making every tensor without using any."""
        for _ in self.tensors():
            self.check()

    def _meet(self) -> None:
        self.check()
        try:
            self._ranks.agree()
        except BaseException:
            self._parted = True
            raise

    def _leave(self, error: BaseException | None) -> None:
        """Tell the others, who are on their way to the next word or wait for a receiver."""
        if self._parted:
            return
        if error is not None:
            self._call_off.call()
        with suppress(Exception):
            for _ in self._rest:
                pass
        if error is None:
            self._ranks.agree()  # raises what the other rank brings
            raise TransferError("the step was called off by a rank that then found nothing wrong")
        with suppress(Exception):
            self._ranks.agree(error)
