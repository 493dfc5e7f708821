"""All rivals of the comparison by name, and their memory. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rivals.contract import Rival

# The trainer's parameters, and those that the plain copy beside it writes.
TRAINER_MODELS = 2.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A rival's module, its title in tables, and its memory in multiples of the model.

    `delta`: it is there for workloads of which few values change between updates.
    """

    module: str
    title: str
    ways: tuple[str, ...]
    option: str = ""
    fixed_models: float = 0.0
    reader_models: float = 1.0
    chunk_nbytes: int = 0
    delta: bool = False

    def peak_nbytes(self, nbytes: int, readers: int) -> int:
        """Return an estimate of the memory of all processes at once, the models included."""
        models = TRAINER_MODELS + self.fixed_models + readers * self.reader_models
        return int(models * nbytes) + (1 + readers) * min(self.chunk_nbytes, nbytes)

    @property
    def ours(self) -> bool:
        """Whether this is weightsync."""
        return self.module == "ours"

    def make(self) -> Callable[[], Rival]:
        """Import the rival, and return its constructor."""
        made: type[Rival] = importlib.import_module(f"benchmarks.rivals.{self.module}").Trainer
        return lambda: made(self.option)


VERIFIED = ("not verified", "verified")
_OURS = Entry(module="ours", title="weightsync", ways=VERIFIED)
# A staged module has two arenas, made while its own memory still exists.
_STAGED = replace(_OURS, reader_models=3.0)
# Sums of all lines, and buckets; a copy of the model for codings.
_DELTA = replace(_STAGED, ways=VERIFIED[1:], fixed_models=1.3, delta=True)

RIVALS: dict[str, Entry] = {
    "weightsync/unpacked/staged": replace(
        _STAGED,
        option="unpacked,module,staged,off",
        title="weightsync, unpacked, staged",
        fixed_models=1.0,
    ),
    "weightsync/unpacked/in_place": replace(
        _OURS,
        option="unpacked,module,in_place,off",
        title="weightsync, unpacked, in place",
        fixed_models=1.0,
    ),
    "weightsync/packed/staged": replace(
        _STAGED, option="packed,module,staged,off", title="weightsync, packed, staged"
    ),
    "weightsync/packed/in_place": replace(
        _OURS, option="packed,module,in_place,off", title="weightsync, packed, in place"
    ),
    "weightsync/unpacked/hook": replace(
        _OURS,
        option="unpacked,hook,in_place,off",
        title="weightsync, unpacked, hook in place",
        fixed_models=1.0,
    ),
    "weightsync/packed/hook": replace(
        _OURS, option="packed,hook,in_place,off", title="weightsync, packed, hook in place"
    ),
    "weightsync/packed/hook_staged": replace(
        _STAGED, option="packed,hook,staged,off", title="weightsync, packed, hook staged"
    ),
    "weightsync/tcp": replace(
        _STAGED,
        option="tcp,module,staged,off",
        title="weightsync, as if to another host (TCP)",
    ),
    "torch_queue/file_descriptor": Entry(
        module="torch_queue",
        option="file_descriptor",
        title="torch.multiprocessing queue, file_descriptor",
        ways=("shared once", "copied each time"),
        fixed_models=2.0,
    ),
    "torch_queue/file_system": Entry(
        module="torch_queue",
        option="file_system",
        title="torch.multiprocessing queue, file_system",
        ways=("shared once", "copied each time"),
        fixed_models=2.0,
    ),
    "ray_store": Entry(
        module="ray_store", title="Ray object store, put and get", ways=("dict",), fixed_models=2.5
    ),
    "gloo": Entry(module="gloo", title="Gloo broadcast", ways=("per tensor", "flat buckets")),
    "tmpfs": Entry(
        module="tmpfs", title="safetensors file in tmpfs", ways=("whole file",), fixed_models=1.0
    ),
    "http_body": Entry(
        module="http_body",
        title="HTTP body",
        ways=("safetensors", "streamed"),
        fixed_models=2.0,
        reader_models=3.0,
    ),
    "packed_rpc": Entry(
        module="packed_rpc",
        title="packed IPC re-enacted (a fresh buffer; RPC and clone per chunk)",
        ways=("1 GiB bucket",),
        chunk_nbytes=GIB,
    ),
    "delta/weightsync/off": replace(
        _DELTA, option="unpacked,module,staged,off", title="weightsync, the whole model"
    ),
    "delta/weightsync/auto": replace(
        _DELTA, option="unpacked,module,staged,auto", title='weightsync, `delta="auto"`'
    ),
    "delta/weightsync/always": replace(
        _DELTA, option="unpacked,module,staged,always", title='weightsync, `delta="always"`'
    ),
    "delta/weightsync/tcp": replace(
        _DELTA,
        option="tcp,module,staged,always",
        title='weightsync, `delta="always"`, as if to another host',
        fixed_models=2.3,
    ),
    "delta/http_body": Entry(
        module="delta_body",
        title="HTTP body",
        ways=(
            "indices of 32 bits and values (TRL)",
            "gaps of 16 bits and xor of values, zstd 1 (NeMo RL)",
            "gaps of rows and columns and values, zstd 1 (PULSE)",
            "xor of whole tensors, zstd 1 (SkyRL)",
        ),
        fixed_models=2.0,
        reader_models=1.5,
        delta=True,
    ),
}
