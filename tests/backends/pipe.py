"""A backend of someone else that is built on the ring: relays its chunks through Unix sockets.

The receiver connects for each update, says its number, and reads all chunks. It has a connection
of its own that nobody serves, which ends with the trainer's process.
"""

from __future__ import annotations

import secrets
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import torch

import weightsync as ws
from weightsync.backends.base import Reach, ReaderChanges, Received, decode_payload
from weightsync.backends.ring import Relay, RingShape, RingStream
from weightsync.weights.copying.fingerprint import xxh3
from weightsync.wire.codec import manifest_from_wire

TICK_S = 0.05


class PipeInit(msgspec.Struct, frozen=True):
    address: Annotated[str, msgspec.Meta(pattern="^pipe-[0-9a-f]{32}$")]
    shape: RingShape


class PipeUpdate(msgspec.Struct, frozen=True):
    number: Annotated[int, msgspec.Meta(ge=1)]


class Pipe(ws.Backend):
    """Path `pipe`, between processes of one host."""

    name = "pipe"
    requires = {"ipc": "shared_memory"}  # noqa: RUF012  # as a user writes it

    def reach(self, trainer: Any, receiver: Any) -> Reach:
        why_not = "" if trainer.host == receiver.host else "it is on another host"
        return Reach("pipe", cost=3.0, why_not=why_not)

    def adjust(self, options: Any) -> Any:
        return replace(options, packed=True)

    def trainer_engine(self, source: Any, path: Any, options: Any, bases: Any) -> Any:
        return PipeSender(ws.RingEngine.of(bases))

    def receiver_engine(self, device_keys: Any) -> Any:
        return PipeReceiver()


class PipeSender(ws.TrainerWeightTransferEngine, ReaderChanges):
    """Reads the ring as one more reader, and sends each chunk to all receivers."""

    def __init__(self, ring: ws.RingEngine) -> None:
        self._ring, self._index = ring, ring.add_relay()
        self._address = f"pipe-{secrets.token_hex(16)}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self._address}")
        self._listening.listen()
        self._listening.settimeout(TICK_S)
        self._alive: list[socket.socket] = []
        self._relay: Relay | None = None
        self._number = 0

    def init_payload(self, reader: Any, generation: int) -> PipeInit:
        return PipeInit(self._address, self._ring.shape)

    def base_readers(self, readers: Any) -> list[int]:
        return [self._index] if readers else []

    def begin(self, readers: Any, *, verify: bool, source: Any) -> PipeUpdate:
        self._number += 1
        stream, count = self._ring.stream(self._index), len(readers)
        self._relay = Relay(lambda check: self._send(stream, count, check))
        return PipeUpdate(self._number)

    def _send(self, stream: RingStream, count: int, check: Any) -> None:
        with ExitStack() as kept:
            reading = [kept.enter_context(self._accept(check)) for _ in range(count)]
            for j in range(len(stream.layout.chunks)):
                data, fingerprints = stream.read(j, check)
                for connection in reading:
                    send(connection, memoryview(array("Q", fingerprints)).cast("B"), check)
                    send(connection, data.numpy().data, check)
                stream.release(j)

    def _accept(self, check: Any) -> socket.socket:
        while True:
            check()
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            connection.settimeout(TICK_S)
            number = bytearray(8)
            receive(connection, memoryview(number), check)
            if int.from_bytes(number) == self._number:
                return connection
            if any(number):  # for an update that is over
                connection.close()
            else:
                self._alive.append(connection)

    def transfer(self, check: Any) -> None:
        assert self._relay is not None
        self._relay.finish(check)

    def check(self) -> None:
        if self._relay is not None:
            self._relay.check()

    def cancel(self) -> None:
        if self._relay is not None:
            self._relay.stop()

    def end(self) -> None:
        self.cancel()
        self._relay = None

    @property
    def table_digest(self) -> str | None:
        return self._ring.table_digest

    def close(self) -> None:
        self.end()
        for connection in [*self._alive, self._listening]:
            connection.close()
        self._alive.clear()


class PipeReceiver(ws.WeightTransferEngine):
    """Reads the chunks of an update into memory, compares, and writes them."""

    _alive: socket.socket | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        self._init = decode_payload(init_info.payload, PipeInit)
        self._manifest = manifest_from_wire(init_info.manifest)
        self._lease_s = init_info.lease_s
        with self._connected(0) as connection:
            self._alive = connection.dup()
            self._alive.setblocking(False)

    @contextmanager
    def _connected(self, number: int) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(f"\0{self._init.address}")
                connection.sendall(number.to_bytes(8))
            except OSError as exc:
                raise ws.TransferError(f"the trainer cannot be reached: {exc}") from exc
            connection.settimeout(TICK_S)
            yield connection

    def receive_weights(self, update_info: Any, context: Any) -> Received:
        number = decode_payload(update_info.payload, PipeUpdate).number
        sent = update_info.manifest  # of a part of the model
        layout = self._init.shape.layout(manifest_from_wire(sent) if sent else self._manifest)
        target = context.open_target(layout)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        flat = memory.numpy().data
        table, wrong = array("Q"), list[str]()
        with self._connected(number) as connection:
            for chunk in layout.chunks:
                units = layout.units[chunk.first_unit : chunk.last_unit]
                wanted = array("Q", bytes(8 * len(units) if update_info.verify else 0))
                for part in (memoryview(wanted).cast("B"), flat[chunk.start : chunk.stop]):
                    receive(connection, part, context.check, self._lease_s)
                for unit, value in zip(units, wanted, strict=False):
                    table.append(xxh3(flat[unit.start : unit.stop]))
                    wrong += layout.names(unit) if table[-1] != value else []
        if wrong:
            raise ws.VerificationError(names=wrong)
        specs = layout.manifest.specs
        parts = [
            memory[at : at + spec.nbytes] for at, spec in zip(layout.offsets, specs, strict=True)
        ]
        context.write(layout, target, parts)
        return Received(
            layout.manifest, table.tolist(), "arrived" if update_info.verify else "none"
        )

    def sender_alive(self) -> bool:
        try:
            return self._alive is not None and bool(self._alive.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def shutdown(self) -> None:
        if self._alive is not None:
            self._alive.close()
        self._alive = None


def send(connection: socket.socket, data: memoryview, check: Any) -> None:
    while data:
        check()
        try:
            data = data[connection.send(data) :]
        except TimeoutError:
            continue


def receive(
    connection: socket.socket, into: memoryview, check: Any, timeout_s: float = 5.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while into:
        check()
        try:
            count = connection.recv_into(into)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise ws.TransferTimeout(f"no byte came for {timeout_s:g} s") from None
            continue
        except OSError as exc:
            raise ws.TransferError(f"the connection broke: {exc}") from exc
        if not count:
            raise ws.TransferError("the connection was closed")
        into, deadline = into[count:], time.monotonic() + timeout_s
