"""The sender waits for its GPU before a reader may read what it wrote, verified or not.

Host memory counts as a GPU's here, and the order of copies, waits and publications is looked at.
tests/gpu/test_slow_kernels.py compares bytes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from tests.gpu.receiver_process import EveryDtype
from tests.weights.fused_cases import HostKernel
from weightsync.backends import ring
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.ring import ProbeMemory
from weightsync.shm.ring import RingWriter
from weightsync.weights.copying import fused
from weightsync.weights.copying.copy_plan import DeviceCopyUnit
from weightsync.weights.sources.base import ModuleSource
from weightsync.weights.sources.packer import Packer

pytestmark = pytest.mark.usefixtures("shm_clean")

BUCKET_NBYTES = 192 << 10
verifications = pytest.mark.parametrize("verify", [False, True], ids=["unverified", "verified"])


class Flowing(ModuleSource):
    """Tensors made on the way."""

    def stable_tensors(self) -> None:
        return None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies, waits of the host, and publications, in order."""
    happened: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            happened.append("wait")

    class Launch:
        def wait(self) -> None:
            happened.append("wait")

        def wait_on_stream(self) -> None:
            happened.append("a stream waits")

    class CopyStream:
        def run(self, copy: Callable[[], object]) -> Launch:
            copy()
            happened.append("copy")
            return Launch()

    def kernel_of(units: Sequence[DeviceCopyUnit], *, among: int) -> HostKernel | None:
        return HostKernel() if units and len(units) == among else None

    make, write, publish = Packer.__init__, Packer._write, RingWriter.publish

    def on_a_gpu(packer: Packer, *args: Any, **kwargs: Any) -> None:
        make(packer, *args, **kwargs)
        packer._on_host = False

    def noted_write(packer: Packer, *args: Any) -> None:
        write(packer, *args)
        happened.append("copy")

    def noted_publish(writer: RingWriter, chunk: int) -> None:
        publish(writer, chunk)
        happened.append("publish")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(fused, "_stream_of", lambda _: CopyStream())
    monkeypatch.setattr(fused, "kernel_of", kernel_of)
    monkeypatch.setattr(Packer, "__init__", on_a_gpu)
    monkeypatch.setattr(Packer, "_write", noted_write)
    monkeypatch.setattr(RingWriter, "publish", noted_publish)
    monkeypatch.setattr(ring, "ProbeMemory", lambda _: ProbeMemory())
    return happened


def engine_of(source: ModuleSource, *, packed: bool) -> IpcTrainerEngine:
    cpu = torch.device("cpu")
    options = TransferOptions(packed=packed, device=cpu, bucket_nbytes=BUCKET_NBYTES)
    return IpcTrainerEngine(source, options, "cuda_ipc")


@verifications
@pytest.mark.parametrize("source", [ModuleSource, Flowing], ids=["stable", "flowing"])
def test_a_bucket_is_published_when_its_copies_are_complete(
    log: list[str], source: type[ModuleSource], verify: bool
) -> None:
    with closing(engine_of(source(EveryDtype("cpu")), packed=True)) as engine:
        engine.begin([], verify=verify)
        engine.transfer(lambda: None)
        chunks = len(engine.stream(0).layout.chunks)
    assert chunks > 4
    assert log.count("publish") == chunks
    before = [log[i - 1] for i, what in enumerate(log) if what == "publish"]
    assert before == ["wait"] * chunks
    assert log.count("copy") >= chunks


@verifications
def test_registered_memory_is_complete_before_readers_are_told(
    log: list[str], verify: bool
) -> None:
    with closing(engine_of(ModuleSource(EveryDtype("cpu")), packed=False)) as engine:
        engine.begin([], verify=verify)  # its payload is in the message that starts the readers
        assert log == ["wait"]
