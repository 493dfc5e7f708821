"""What the making of queues needs of a process group: everybody's bytes, and nothing pickled.

A group is torch's own, or any object with `rank`, `world_size` and `store`, a torch Store. Apart
from the queues, since those made of a handle need no torch.
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
    """A group that has only a store; every member makes its queues in the same order."""

    @property
    def rank(self) -> int:
        """This member's rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many members there are."""
        ...

    @property
    def store(self) -> Store:
        """The store that all members share."""
        ...


class Group:
    """`rank` of `size` members, which tell each other bytes."""

    def __init__(self, group: dist.ProcessGroup | StoreGroup) -> None:
        """Raises ConfigError for what is no group."""
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
                f"a {type(group).__name__} is no process group; give torch's, or an object with "
                "rank, world_size and store"
            )

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Return every member's bytes by rank; all call it, and wait as long as the group does."""
        if len(mine) > _ROOM_NBYTES - _LENGTH_NBYTES:
            raise ProtocolError(f"{len(mine)} bytes are more than members tell each other here")
        return self._by_tensors(mine) if self._store is None else self._by_store(self._store, mine)

    def everybodys_host(self) -> list[str]:
        """Return every member's host by rank: equal for those who share `/dev/shm`."""
        return [key.decode() for key in self.all_gather(host_key().encode())]

    def share(self, make: Callable[[], QueueHandle] | None) -> list[QueueHandle | None]:
        """Return the handles that members made, by rank; all call it, some with `make`.

        When making fails, it raises there and a TransferError saying why raises everywhere else.
        """
        failed: WeightSyncError | None = None
        mine = b""
        if make is not None:
            try:
                mine = b"+" + msgspec.msgpack.encode(make())
            except WeightSyncError as exc:
                failed = exc
                mine = b"-" + str(exc).encode()[: _ROOM_NBYTES // 2]
        told = self.all_gather(mine)
        if failed is not None:
            raise failed
        for rank, note in enumerate(told):
            if note[:1] == b"-":
                why = note[1:].decode(errors="replace")
                raise TransferError(f"rank {rank} could not make its message queue: {why}")
        return [_decode_handle(note[1:]) if note else None for note in told]

    def address(self) -> str:
        """Return the address by which other members reach this host, as far as it can be told."""
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
        # Counted in the store, so that queues made one after another do not meet.
        turn = store.add(f"{_PREFIX}/turns/{self.rank}", 1)
        store.set(f"{_PREFIX}/{turn}/{self.rank}", cast(Any, mine or b"\0"))
        told = [bytes(store.get(f"{_PREFIX}/{turn}/{rank}")) for rank in range(self.size)]
        return [b"" if note == b"\0" else note for note in told]


def _decode_handle(data: bytes) -> QueueHandle:
    try:
        return msgspec.msgpack.decode(data, type=QueueHandle)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"a member told what is no handle of a queue: {exc}") from exc


def split_by_host(hosts: Sequence[str], writer: int) -> tuple[list[int], list[int]]:
    """Return the ranks, other than the writer's, on its host and elsewhere."""
    others = [rank for rank in range(len(hosts)) if rank != writer]
    local = [rank for rank in others if hosts[rank] == hosts[writer]]
    return local, [rank for rank in others if rank not in local]


def _unpadded(row: bytes) -> bytes:
    length = int.from_bytes(row[:_LENGTH_NBYTES], "little")
    return row[_LENGTH_NBYTES : _LENGTH_NBYTES + length]
