"""Dtypes and quantization schemes of receivers, asked for before a sender connects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from weightsync.errors import ConfigError, shorten
from weightsync.ranks.comm import RankComm
from weightsync.specs import FLOATING
from weightsync.transports.base import BaseTransport
from weightsync.transports.calls import CallThreads
from weightsync.wire.messages import InitReply, InitRequest, Reply


class KeptDtypes(msgspec.Struct, frozen=True, kw_only=True):
    """In which floating-point dtype the receivers keep each tensor, by name.

    `unlike` are the tensors that they keep in several: the sender sends these as they are, and each
    receiver casts them itself. `only` is the dtype of all tensors, None where there are several.
    """

    dtypes: dict[str, str]
    unlike: frozenset[str] = frozenset()
    only: str | None = None

    @classmethod
    def of(cls, receivers: Iterable[Mapping[str, Sequence[str]]]) -> KeptDtypes:
        """Return what receivers keep that said this: the names of tensors by dtype."""
        found: dict[str, str] = {}
        unlike: set[str] = set()
        for kept in receivers:
            for dtype in sorted(kept.keys() & FLOATING):
                for name in kept[dtype]:
                    if found.setdefault(name, dtype) != dtype:
                        unlike.add(name)
        dtypes = {name: dtype for name, dtype in found.items() if name not in unlike}
        several = set(dtypes.values())
        only = several.pop() if len(several) == 1 and not unlike else None
        return cls(dtypes=dtypes, unlike=frozenset(unlike), only=only)


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of all receivers: the dtypes that they keep, and quantization_config by target.

    `dtypes` is None where none said any.
    """

    dtypes: KeptDtypes | None
    quantization: list[tuple[str, Any]]
    targets: list[str]

    def kept(self) -> KeptDtypes:
        """Return the dtypes. Raises ConfigError where no receiver says any."""
        if self.dtypes is None:
            raise ConfigError(
                f'dtype="receiver": {shorten(self.targets)} does not say in which dtypes it keeps '
                "the weights; give WeightReceiver(hook, manifest=...), or name a dtype here"
            )
        return self.dtypes


def describe_receivers(transports: Sequence[BaseTransport], timeout_s: float) -> Described:
    """Return what these receivers say; all are asked at once. Raises the errors of a call."""
    threads: CallThreads[Reply] = CallThreads()
    futures: list[Future[Reply]] = [Future() for _ in transports]
    for transport, future in zip(transports, futures, strict=True):
        threads.submit(lambda t=transport: t.call(InitRequest(), timeout_s=timeout_s), future)  # type: ignore[misc]  # mypy infers no default of a lambda
    threads.close()
    targets = [transport.target for transport in transports]
    replies = [future.result() for future in futures]
    named = [(t, r) for t, r in zip(targets, replies, strict=True) if isinstance(r, InitReply)]
    kept = [reply.kept for _, reply in named if reply.kept]
    return Described(
        dtypes=KeptDtypes.of(kept) if kept else None,
        quantization=[(target, reply.quantization) for target, reply in named],
        targets=targets,
    )


def describe_together(
    ranks: RankComm,
    make: Callable[[], Sequence[BaseTransport]],
    made: list[BaseTransport],
    timeout_s: float,
) -> Described:
    """Return what the receivers say to rank 0, on every rank. Collective.

    Rank 0 makes the transports, and adds them to `made`: the caller uses them, or closes them.
    """

    def ask() -> bytes:
        if ranks.rank:
            return b""
        made.extend(make())
        return msgspec.msgpack.encode(describe_receivers(made, timeout_s))

    said = ranks.together(ask)
    return msgspec.msgpack.decode(ranks.exchange(said)[0], type=Described)
