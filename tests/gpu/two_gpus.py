"""A stand-in for a driver with several GPUs, in whose memory the host's memory is.

A handle is that of CUDA IPC to all of weightsync; here it has a process and an address. What is
opened is a mirror, filled with junk: bytes come only with the copies of a Link, as over NVLink.
Code that reads the memory of another GPU in any other way gets junk, and the count of what crossed
says how often each byte was read. Everything else is real. Nothing of it has run on two GPUs.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import weightsync.receiver as receiver_module
from tests.weights.late_lane import LateLane
from weightsync.backends import registry, ring
from weightsync.backends.ipc import landing, receiver, sender
from weightsync.backends.ipc.backend import IpcBackend
from weightsync.backends.ring import keyed_handle
from weightsync.cuda import devices, handles, memory
from weightsync.cuda.memory import PROBE_NBYTES
from weightsync.ranks import worker
from weightsync.shm.host_keys import host_key
from weightsync.wire.offers import CudaHandle, KeyedHandle

GPUS = [f"GPU-a8f1c3d2-0b4e-4f6a-9c7d-{i:012d}" for i in range(5)]
REFUSED = "CUDA error: peer access is not supported between these two devices"
UNIT_NBYTES = 64 << 10
_JUNK = 0xEE
_PLACE = struct.Struct("<qQ")
_PR_SET_PTRACER, _ANY = 0x59616D61, -1

_libc = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_process(pid: int, address: int, target: torch.Tensor) -> None:
    """Copy memory of a process of this host to a tensor, `uint8[nbytes]`."""
    nbytes = target.numel()
    ours, theirs = _Span(target.data_ptr(), nbytes), _Span(address, nbytes)
    done = _libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    if done != nbytes:
        raise RuntimeError(f"process_vm_readv: {os.strerror(ctypes.get_errno())}")


@dataclass
class Node:
    """The GPUs as one process sees them: its own `trainer` and `receiver`, and those of others.

    `seen` are the visible GPUs, by ordinal; `apart` pairs of them without peer access. The link
    refuses every copy after the first `fails`.
    """

    trainer: str = GPUS[0]
    receiver: str = GPUS[1]
    seen: Sequence[str] = (GPUS[1], GPUS[0])
    apart: Sequence[frozenset[str]] = ()
    no_cuda_ipc: str = ""
    fails: int | None = None
    crossed: int = 0
    copies: int = 0
    mirrors: list[tuple[int, int, int, torch.Tensor]] = field(default_factory=list)

    def can_access(self, ordinal: int, peer: int) -> bool:
        return frozenset((self.seen[ordinal], self.seen[peer])) not in self.apart

    def export(self, tensor: torch.Tensor) -> CudaHandle:
        """Return the handle of any memory of this process."""
        place = _PLACE.pack(os.getpid(), tensor.data_ptr())
        return CudaHandle(
            device=self.trainer,
            nbytes=tensor.numel(),
            handle=b"\x03c" + place.ljust(64, b"\0"),
            base_offset=0,
            ref_counter_handle=b"/torch_1_2_3",
            ref_counter_offset=0,
            event_handle=bytes(64),
            event_sync_required=False,
        )

    def open(self, handle: CudaHandle) -> torch.Tensor:
        """Return a mirror of memory: junk, until it is read over the link."""
        handles._check_fields(handle)
        assert handle.device in self.seen, "memory of a GPU that is not seen was opened"
        pid, address = _PLACE.unpack(handle.handle[2 : 2 + _PLACE.size])
        if handle.device == self.receiver:
            assert pid == os.getpid(), "the stand-in has no memory of other processes on one GPU"
            view = (ctypes.c_ubyte * handle.nbytes).from_address(address)
            return torch.frombuffer(view, dtype=torch.uint8)[handle.offset :]
        mirror = torch.full((handle.nbytes,), _JUNK, dtype=torch.uint8)
        if handle.nbytes == PROBE_NBYTES:
            read_process(pid, address, mirror)
        else:
            self.mirrors.append((mirror.data_ptr(), address, pid, mirror))
        return mirror[handle.offset :]

    def read(self, source: torch.Tensor) -> None:
        """Bring the bytes of a part of a mirror, as a copy over the link would."""
        for base, address, pid, mirror in self.mirrors:
            offset = source.data_ptr() - base
            if 0 <= offset <= mirror.numel() - source.numel():
                read_process(pid, address + offset, source)
                self.crossed += source.numel()
                return
        raise AssertionError("the source of a copy is memory of no other GPU")


class Link(LateLane):
    """Copies between two GPUs, each as late as allowed."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def run(self, copy: Callable[[], object]) -> Any:
        node, arrival = self._node, copy.__self__  # type: ignore[attr-defined]  # a bound method
        assert isinstance(arrival, landing.Arrival)
        node.copies += 1
        if node.fails is not None and node.copies > node.fails:
            raise RuntimeError(f"{REFUSED}\nCUDA kernel errors might be reported later")

        def cross() -> None:
            arrival.buffer.fill_(_JUNK)
            for source in arrival.sources:
                node.read(source)
            copy()

        return super().run(cross)


NODES: list[Node] = []
"""The node of this process, where it was installed for good."""


def install_rank(rank: int, receivers: int = 0) -> None:
    """Make a rank's process one whose weights are on GPU `rank`, and its receivers `receivers` on.

    It sees all GPUs, its own ones last.
    """
    own = GPUS[rank + receivers]
    if not NODES:
        NODES.append(Node(GPUS[rank], own, [*(gpu for gpu in GPUS if gpu != own), own]))
        install(NODES[0])
    # A trainer that ended has put back what its test may have changed.
    vars(worker)["device_keys"] = lambda _: [NODES[0].trainer, host_key()]


def install_receiver(seen: list[int]) -> None:
    """Make this process one of receivers on the last GPU that see others by these numbers."""
    if not NODES:
        NODES.append(Node(receiver=GPUS[-1]))
        install(NODES[0])
    node = NODES[0]
    node.seen, node.fails = [GPUS[i] for i in seen], None
    registry._endpoints.clear()


def fail_soon(copies: int) -> None:
    """Have the link of this process refuse copies after so many more."""
    NODES[0].fails = NODES[0].copies + copies


def crossed(_: object) -> int:
    """Return the bytes that have crossed the link of this process."""
    return NODES[0].crossed


def install(node: Node, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make the driver of this process that of `node`; weights on the CPU count as on its GPUs."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_long(_ANY), 0, 0, 0)  # other receivers read this process

    def on_own_gpu(pick: Any) -> Any:
        def picked(offered: KeyedHandle, keys: Sequence[str]) -> Any:
            handle, gpu = pick(offered, keys)
            return handle, None if gpu is None else torch.device("cpu")

        return picked

    def endpoint(_: IpcBackend, device: torch.device) -> dict[str, Any]:
        facts: dict[str, Any] = {"streams": True, "peers": handles.peer_faults(node.receiver)}
        return facts | ({"no_cuda_ipc": node.no_cuda_ipc} if node.no_cuda_ipc else {})

    begin = ring.Ring.__init__

    def on_gpu(made: ring.Ring, shape: Any, device: Any = ring._CPU, probe: Any = None) -> None:
        begin(made, shape, device, probe)
        if probe is not None and device is probe:  # as the packed path of `cuda_ipc` makes it
            buckets: Any = made.buckets
            buckets.handle = lambda: keyed_handle(None, buckets._buffer)

    patch(worker, "device_keys", lambda _: [node.trainer, host_key()])
    patch(receiver_module, "device_keys", lambda _: [node.receiver, host_key()])
    patch(handles, "local_gpu_keys", lambda: {key: i for i, key in enumerate(node.seen)})
    patch(devices, "can_access_peer", node.can_access)
    patch(handles, "export", node.export)
    patch(handles, "open_handle", node.open)
    patch(memory, "pick_readable", on_own_gpu(memory.pick_readable))
    patch(receiver, "pick_readable", memory.pick_readable)
    patch(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
    patch(landing, "copy_stream", lambda _: Link(node))
    patch(receiver, "LANDING_NBYTES", UNIT_NBYTES)
    patch(sender, "CUDA_UNIT_NBYTES", UNIT_NBYTES)
    patch(ring.Ring, "__init__", on_gpu)
    patch(IpcBackend, "endpoint", endpoint)
    registry._endpoints.clear()
