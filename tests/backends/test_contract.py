"""The built-in backends, and that of docs/writing-a-backend.md, keep the contract of backends."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from tests import children
from tests.docs.pages import blocks
from weightsync.backends import registry
from weightsync.backends.base import Backend
from weightsync.backends.ipc.lending import Lent
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.ipc.transfer import IncomingTransfer
from weightsync.backends.nixl.carrier import NixlCarrier
from weightsync.testing import BackendContract
from weightsync.weights.copying.copy_plan import Memory
from weightsync.wire.codec import decode_payload

children.load_beforehand("weightsync.testing.backend_contract", "pytest")
PAGE = "docs/writing-a-backend.md"
MODULE = "spool_of_the_page"


def flip_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit of every bucket that a trainer has filled, before it is published."""
    genuine = IpcTrainerEngine.transfer

    def transfer(engine: Any, check: Callable[[], None]) -> None:
        writer, buckets = engine._writer, engine.buckets
        publish = writer.publish

        def flip(chunk: int) -> None:
            buckets[chunk % len(buckets)][5] ^= 1
            publish(chunk)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "publish", flip)
            genuine(engine, check)

    monkeypatch.setattr(IpcTrainerEngine, "transfer", transfer)


def flip_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit of the trainer's memory, as the receiver sees it."""
    genuine = IncomingTransfer._from_storages

    def from_storages(transfer: Any, load_target: Any) -> Generator[None, None, None]:
        seen = [tensor.clone() for tensor in transfer._opened.registered.tensors]
        seen[0][5] ^= 1
        memory = Memory(seen)
        lent = Lent([], memory, ())  # what a hook is given
        transfer._opened = dataclasses.replace(
            transfer._opened, registered=memory, copy_plans={}, lent=[lent]
        )
        yield from genuine(transfer, load_target)

    monkeypatch.setattr(IncomingTransfer, "_from_storages", from_storages)


class Quick(BackendContract):
    """A timeout that tells one that is stopped from one that is busy, with ten others at work."""

    timeout_s = 3.0
    context = children.CONTEXT


@pytest.mark.usefixtures("shm_clean")
class TestIpcPacked(Quick):
    backend = "ipc"
    options: ClassVar[Mapping[str, Any]] = {"packed": True}

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flip_buckets(monkeypatch)


@pytest.mark.usefixtures("shm_clean")
class TestIpcUnpacked(Quick):
    backend = "ipc"
    options: ClassVar[Mapping[str, Any]] = {"packed": False}
    streams = False

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flip_registered_memory(monkeypatch)


@pytest.mark.usefixtures("shm_clean")
class TestTcp(Quick):
    backend = "tcp"

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flip_buckets(monkeypatch)


@pytest.mark.usefixtures("shm_clean")
class TestNixl(BackendContract):
    """The real NIXL, over UCX's TCP; its agent takes seconds to start."""

    backend = "nixl"
    context = children.CONTEXT
    timeout_s = 12.0

    @pytest.fixture(autouse=True)
    def over_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        monkeypatch.setenv("UCX_LOG_LEVEL", "error")

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flip a bit of every chunk that a host has read."""
        genuine = NixlCarrier.receive

        def receive(self: Any, connection: Any, frame: Any, into: memoryview, check: Any) -> None:
            genuine(self, connection, frame, into, check)
            into[5] ^= 1

        monkeypatch.setattr(NixlCarrier, "receive", receive)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page's backend as a module, which child processes import as well."""
    written = [block for block in blocks(PAGE) if block.language == "python"]
    backend, (test,) = written[:4], [b for b in written if "BackendContract" in b.text]
    path = tmp_path_factory.mktemp("page") / f"{MODULE}.py"
    path.write_text("\n".join(block.text for block in [*backend, test]), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setattr(registry, "_registered", dict(registry._registered))
        yield importlib.import_module(MODULE)
        del sys.modules[MODULE]


@pytest.fixture
def spool(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's module, with a directory of the test's own."""
    monkeypatch.setattr(registry, "_endpoints", {})
    monkeypatch.setenv("SPOOL_DIRECTORY", str(tmp_path))
    yield page
    page.SpoolSender().close()  # which removes what a killed one left
    assert [path.name for path in tmp_path.iterdir()] == ["id"]


class TestSpool(Quick):
    """Runs with the page's own fault."""

    @pytest.fixture(autouse=True)
    def named(self, spool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "backend", spool.Spool, raising=False)
        self.page = spool

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page.TestSpool.corrupt(self, monkeypatch)


def contract_of(made: type[Backend]) -> BackendContract:
    class Made(Quick):
        backend = made

    return Made()


def test_a_backend_that_reuses_memory_of_a_hook_is_found(spool: Any) -> None:
    class Receiver(spool.SpoolReceiver):  # type: ignore[misc]  # a class of the page
        def __init__(self) -> None:
            self.kept: dict[int, torch.Tensor] = {}

        def _read(self, file: Any, offset: int, nbytes: int) -> Any:
            fresh = super()._read(file, offset, nbytes)
            return self.kept.setdefault(offset, fresh).copy_(fresh)

    class Reusing(spool.Spool):  # type: ignore[misc]  # as above
        name = "reusing"

        def receiver_engine(self, device_keys: Any) -> Any:
            return Receiver()

    with pytest.raises(AssertionError, match="was reused"):
        contract_of(Reusing).test_memory_that_a_hook_keeps_is_not_reused()


def test_a_backend_for_two_readers_with_lists_in_its_payload_is_right(spool: Any) -> None:
    class Init(msgspec.Struct, frozen=True):
        directory: str
        hints: list[dict[str, str]]

    class Sender(spool.SpoolSender):  # type: ignore[misc]  # a class of the page
        def init_payload(self, reader: int, generation: int) -> Any:
            return Init(self._directory.name, [{"any": "thing"}])

    class Receiver(spool.SpoolReceiver):  # type: ignore[misc]  # as above
        def init_transfer_engine(self, init_info: Any) -> None:
            init = decode_payload(init_info.payload, Init)
            plain = {"directory": init.directory}
            super().init_transfer_engine(msgspec.structs.replace(init_info, payload=plain))

    class Two(spool.Spool):  # type: ignore[misc]  # as above
        name = "two"
        max_readers = 2

        def trainer_engine(self, *_: Any) -> Any:
            return Sender()

        def receiver_engine(self, device_keys: Any) -> Any:
            return Receiver()

    contract = contract_of(Two)
    contract.test_several_receivers_hold_the_same()
    contract.test_a_payload_from_elsewhere_is_refused()
