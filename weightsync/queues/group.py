"""Collectives over a process group, used to create queues: an all-gather of bytes, no pickle.

A group is a torch ProcessGroup, or any object with `rank`, `world_size` and `store`, a torch Store.
A module of its own, because queues made from a handle need no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weightsync.errors import ConfigError, ProtocolError, TransferError, WeightSyncError
from weightsync.queues.message_queue import QueueHandle
from weightsync.queues.sockets import own_address
from weightsync.shm.host_keys import host_key

_ROOM_NBYTES = 8192
_LENGTH_NBYTES = 8
_PREFIX = "weightsync/message_queue"


@runtime_checkable
class StoreGroup(Protocol):
    """A process group that has only a store; every member creates its queues in the same order."""

    @property
    def rank(self) -> int:
        """This member's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of members."""
        ...

    @property
    def store(self) -> Store:
        """The store that all members share."""
        ...


class Group:
    """One member of a process group: `rank` of `size`, with an all-gather of bytes."""

    def __init__(self, group: dist.ProcessGroup | StoreGroup) -> None:
        """Raise ConfigError if `group` is of neither kind."""
        self._torch: dist.ProcessGroup | None = None
        self._store: Store | None = None
        if isinstance(group, dist.ProcessGroup):
            self._torch = group
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        elif isinstance(group, StoreGroup):
            self._store = group.store
            self.rank, self.size = group.rank, group.world_size
        else:
            raise ConfigError(
                f"a {type(group).__name__} is no process group; give a torch ProcessGroup, or an "
                "object with rank, world_size and store"
            )

    def check_rank(self, argument: str, rank: object) -> None:
        """Raise ConfigError unless `rank` is a rank in this group."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ConfigError(
                f"{argument} is a rank of the group, 0 to {self.size - 1}, not {rank!r}"
            )

    def rank_of(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank. Raises ConfigError for one outside."""
        if self._torch is None:
            self.check_rank("reader_rank", global_rank)
            return global_rank
        members = dist.get_process_group_ranks(self._torch)
        if global_rank not in members:
            raise ConfigError(
                f"reader_rank is a global rank of the group, one of {members}, not {global_rank!r}"
            )
        return members.index(global_rank)

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Return every member's bytes by rank. All members call it; the group sets the timeout."""
        limit = _ROOM_NBYTES - _LENGTH_NBYTES
        if len(mine) > limit:
            raise ProtocolError(f"{len(mine)} bytes exceed the {limit} bytes of one all-gather")
        return self._by_tensors(mine) if self._store is None else self._by_store(self._store, mine)

    def everybodys_host(self) -> list[str]:
        """Return every member's host key by rank; equal for members that share `/dev/shm`."""
        return [key.decode() for key in self.all_gather(host_key().encode())]

    def share(self, make: Callable[[], QueueHandle] | None) -> list[QueueHandle | None]:
        """Return the handles that members made, by rank. All members call it, some with `make`.

        When `make` fails, its error is raised on that rank, and a TransferError with the reason on
        all other ranks.
        """
        failed: WeightSyncError | None = None
        mine = b""
        if make is not None:
            try:
                mine = b"+" + msgspec.msgpack.encode(make())
            except WeightSyncError as exc:
                failed = exc
                mine = b"-" + str(exc).encode()[: _ROOM_NBYTES // 2]
        gathered = self.all_gather(mine)
        if failed is not None:
            raise failed
        for rank, entry in enumerate(gathered):
            if entry[:1] == b"-":
                why = entry[1:].decode(errors="replace")
                raise TransferError(f"rank {rank} could not make its message queue: {why}")
        return [_decode_handle(entry[1:]) if entry else None for entry in gathered]

    def address(self) -> str:
        """Return this host's address as seen from other members. Raises ConfigError if unknown."""
        host = getattr(self._store, "host", None) or os.environ.get("MASTER_ADDR")
        if not host:
            raise ConfigError(
                "members of this group are on other hosts, and the group does not say how they "
                "reach this one; give connect_ip"
            )
        return own_address(str(host))

    def _by_tensors(self, mine: bytes) -> list[bytes]:
        device = "cuda" if dist.get_backend(self._torch) == "nccl" else "cpu"
        padded = len(mine).to_bytes(_LENGTH_NBYTES, "little") + mine
        row = torch.zeros(_ROOM_NBYTES, dtype=torch.uint8)
        row[: len(padded)] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        rows = [torch.empty_like(row, device=device) for _ in range(self.size)]
        dist.all_gather(rows, row.to(device), group=self._torch)
        return [_unpadded(bytes(cast(Any, found.tolist()))) for found in rows]

    def _by_store(self, store: Store, mine: bytes) -> list[bytes]:
        # The store counts the rounds, so that successive all-gathers use different keys.
        round_number = store.add(f"{_PREFIX}/turns/{self.rank}", 1)
        store.set(f"{_PREFIX}/{round_number}/{self.rank}", cast(Any, mine or b"\0"))
        gathered = [
            bytes(store.get(f"{_PREFIX}/{round_number}/{rank}")) for rank in range(self.size)
        ]
        return [b"" if entry == b"\0" else entry for entry in gathered]


def _decode_handle(data: bytes) -> QueueHandle:
    try:
        return msgspec.msgpack.decode(data, type=QueueHandle)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"a member sent bytes that are no handle of a queue: {exc}") from exc


def split_by_host(hosts: Sequence[str], writer: int) -> tuple[list[int], list[int]]:
    """Return the ranks on the writer's host and on other hosts, without the writer's rank."""
    others = [rank for rank in range(len(hosts)) if rank != writer]
    local = [rank for rank in others if hosts[rank] == hosts[writer]]
    return local, [rank for rank in others if rank not in local]


def _unpadded(row: bytes) -> bytes:
    length = int.from_bytes(row[:_LENGTH_NBYTES], "little")
    return row[_LENGTH_NBYTES : _LENGTH_NBYTES + length]
