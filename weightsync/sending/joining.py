"""Where a trainer's ranks find each other: a private Gloo group through the trainer's store."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from weightsync.errors import ConfigError, TransferError, TransferTimeout
from weightsync.sending.checkin import StoreRendezvous
from weightsync.sending.ranks import MAX_RANKS, Gloo, RankComm, alone, name_ranks, who_is_gone

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0


def join_ranks(
    process_group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    call: str = "connect()",
) -> RankComm:
    """Make the private group over the ranks of `process_group`; each of them has to call this.

    None means the default group where there is one of more than one rank, else `alone()`.
    `timeout_s` bounds every later wait for another rank, so it has to cover the longest time that
    rank 0 may wait for receivers. Raises TransferTimeout naming the ranks that did not make the
    user's `call` within the shorter of the two times.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return alone()
    names = dist.get_process_group_ranks(process_group)
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ConfigError("this process is no member of the process_group that connect() was given")
    if len(names) == 1:
        return alone()
    if len(names) > MAX_RANKS:
        raise ConfigError(f"one sender has at most {MAX_RANKS} ranks, not {len(names)}")
    if rank == 0:
        _compare_timeouts(process_group, join_timeout_s)
    bound_s = min(join_timeout_s, timeout_s)
    check_in = _meet_at_store(names, rank, bound_s, call)
    group = _make_group(check_in, rank, names, bound_s)
    group.set_timeout(timedelta(seconds=timeout_s))
    return RankComm(group, check_in, rank=rank, names=names, timeout_s=timeout_s)


def _compare_timeouts(process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """A rank that dies inside a collective of the trainer's is noticed after that one's timeout."""
    group = process_group or dist.group.WORLD
    longest = 0.0
    with suppress(AttributeError, RuntimeError):  # a backend need not say
        backends = [group._get_backend(device) for device in group._device_types] if group else []
        longest = max((b.options._timeout.total_seconds() for b in backends), default=0.0)
    if longest > timeout_s:
        logger.warning(
            "a rank that dies while tensors are gathered is noticed after the process group's own "
            "timeout of %g s, later than timeout_s (%g s): init_process_group(timeout=…) sets it",
            longest,
            timeout_s,
        )


def _meet_at_store(names: Sequence[int], rank: int, timeout_s: float, call: str) -> StoreRendezvous:
    """Meet the other ranks in the trainer's store."""
    digest = hashlib.blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()
    store = PrefixStore(f"weightsync/{digest}", dist.distributed_c10d._get_default_store())
    try:
        check_in, missing = StoreRendezvous.arrive(
            store, rank=rank, size=len(names), timeout_s=timeout_s
        )
    except RuntimeError as exc:
        raise TransferError(
            "the trainer's store (held by rank 0, or by torchrun's agent) does not answer; it has "
            "to live as long as the trainer"
        ) from exc
    if missing:
        late = name_ranks(names[rank] for rank in missing)
        raise TransferTimeout(
            f"{late} of {len(names)} did not call {call} within {timeout_s:g} s; every rank of "
            "the process group has to call it"
        )
    return check_in


def _make_group(
    check_in: StoreRendezvous, rank: int, names: Sequence[int], timeout_s: float
) -> Gloo:
    # Not dist.new_group: its names depend on what this process made before, and ranks that
    # recover from an error at different times would wait for each other under different names.
    try:
        store = PrefixStore("gloo", check_in.store)
        group = dist.ProcessGroupGloo(store, rank, len(names), timedelta(seconds=timeout_s))
        return cast(Gloo, group)
    except RuntimeError as exc:
        gone = who_is_gone(check_in, names)
        raise TransferError(f"the trainer's ranks could not connect: {gone} stayed away") from exc
