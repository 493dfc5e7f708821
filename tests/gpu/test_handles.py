"""CUDA handles between two processes, below every backend."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch

from weightsync.cuda.handles import (
    collect,
    export,
    gpu_key,
    local_gpu_keys,
    open_handle,
    why_not,
    withdraw,
)
from weightsync.errors import HandleError
from weightsync.wire.offers import CudaHandle

pytestmark = pytest.mark.gpu

WAIT_S = 60.0
MIB = 1 << 20


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def read_all(pipe: Connection) -> None:
    """Open every handle that comes and answer its bytes; keep it until an empty one comes."""
    held: list[torch.Tensor] = []
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        if not message:
            held.clear()
            pipe.send_bytes(b"closed")
            continue
        before = torch.cuda.current_device()
        held.append(open_handle(msgspec.msgpack.decode(message, type=CudaHandle)))
        assert torch.cuda.current_device() == before
        pipe.send_bytes(held[-1].cpu().numpy().tobytes())


class Reader:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def read(self, handle: CudaHandle) -> bytes:
        return self._ask(msgspec.msgpack.encode(handle))

    def close_all(self) -> None:
        assert self._ask(b"") == b"closed"

    def _ask(self, message: bytes) -> bytes:
        self._pipe.send_bytes(message)
        assert self._pipe.poll(WAIT_S), "the reader did not answer in time"
        return self._pipe.recv_bytes()


@contextmanager
def reader() -> Iterator[Reader]:
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=read_all, args=(child,), daemon=True)
    process.start()
    child.close()
    try:
        yield Reader(parent)
    finally:
        parent.close()
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
            process.join(WAIT_S)


def needs_ipc() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


def test_this_gpu_has_a_normal_key() -> None:
    keys = local_gpu_keys()
    assert len(keys) == torch.cuda.device_count()
    assert keys[gpu_key(0)] == 0
    assert gpu_key(torch.device("cuda", 0)) == gpu_key(0)


def test_bytes_and_later_writes_are_seen() -> None:
    needs_ipc()
    memory = pattern(MIB).cuda()
    with reader() as other:
        assert other.read(export(memory)) == bytes(pattern(MIB).numpy())
        memory.copy_(pattern(MIB, seed=1))
        torch.cuda.synchronize()
        assert other.read(export(memory)) == bytes(pattern(MIB, seed=1).numpy())
        other.close_all()


def test_views_of_one_storage_open_at_their_own_size_and_place() -> None:
    needs_ipc()
    content = pattern(3 * MIB)
    memory = content.cuda()
    with reader() as other:
        for start, stop in ((0, 512), (0, 3 * MIB), (0, 1), (777, 2 * MIB), (3 * MIB - 1, 3 * MIB)):
            part = content[start:stop]
            assert other.read(export(memory[start:stop])) == bytes(part.numpy())
        other.close_all()


def test_an_offset_leads_into_the_memory() -> None:
    needs_ipc()
    content = pattern(4096)
    memory = content.cuda()
    with reader() as other:
        handle = msgspec.structs.replace(export(memory), offset=1024)
        assert other.read(handle) == bytes(content[1024:].numpy())
        other.close_all()


def freed() -> int:
    torch.cuda.synchronize()
    collect()
    return torch.cuda.memory_allocated()


def test_memory_is_freed_after_its_reader_gave_it_back() -> None:
    needs_ipc()
    before = freed()
    memory = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    with reader() as other:
        for _ in range(2):
            other.read(export(memory))
        del memory
        assert freed() > before
        other.close_all()
        assert freed() == before


def test_memory_whose_export_was_withdrawn_is_freed() -> None:
    """With it goes what tests before had exported and nobody holds any more."""
    needs_ipc()
    before = freed()
    memory = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    handle = export(memory)
    del memory
    held = freed()
    assert held > before
    withdraw(handle)
    assert freed() <= held - 64 * MIB


def test_the_exporting_process_opens_its_own_handle_rightly_or_not_at_all() -> None:
    needs_ipc()
    memory = pattern(4096).cuda()
    handle = export(memory)
    # Which of the two is up to the driver.
    try:
        opened = open_handle(handle)
    except HandleError:
        withdraw(handle)
    else:
        assert torch.equal(opened, memory)


def test_a_made_up_handle_is_an_error_and_leaves_cuda_usable() -> None:
    needs_ipc()
    memory = torch.ones(4096, dtype=torch.uint8, device="cuda")
    handle = export(memory)
    forged = msgspec.structs.replace(
        handle, handle=handle.handle[:2] + os.urandom(64), event_sync_required=False
    )
    with pytest.raises(HandleError):
        open_handle(forged)
    withdraw(handle)
    assert int(memory.sum()) == 4096
