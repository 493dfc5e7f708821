"""The trial of a backend between hosts: a process reads chunks that another one serves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import torch

from weightsync.backends.base import decode_payload
from weightsync.backends.tcp.carrier import Carrier
from weightsync.backends.tcp.connection import Connection, FrameKind, Request, nothing
from weightsync.backends.tcp.payload import SECRET_NBYTES
from weightsync.backends.tcp.server import ChunkServer
from weightsync.backends.tcp.window import ChunkWindow
from weightsync.errors import TransferError
from weightsync.shm.addresses import LOOPBACK
from weightsync.shm.store_order import order_stores
from weightsync.weights.copying.fingerprint import mix64

PATIENCE_S = 10.0
_CHUNKS, _CHUNK_NBYTES = 4, 8 << 20
NBYTES = _CHUNKS * _CHUNK_NBYTES


class Offer(msgspec.Struct, frozen=True):
    """Where the chunks are served, and the secret of the server."""

    port: int
    secret: bytes


@contextmanager
def serve_chunks(carrier: Carrier) -> Iterator[Offer]:
    """Serve chunks of random bytes to one reader. Raises BackendUnavailableError, ConnectError."""
    order_stores()  # the ring of a host needs it
    secret = os.urandom(SECRET_NBYTES)
    chunks = list(torch.randint(256, (_CHUNKS, _CHUNK_NBYTES), dtype=torch.uint8))
    carrier.register(chunks)
    with (
        closing(ChunkWindow(_CHUNKS, PATIENCE_S)) as window,
        closing(ChunkServer(LOOPBACK, secret, window, PATIENCE_S, carrier)) as server,
    ):
        window.begin(1, _CHUNKS, [[0]])
        for number, chunk in enumerate(chunks):
            window.offer(number, chunk.numpy().data, [mix64(chunk)])
        yield Offer(server.port, secret)


def read_chunks(carrier: Carrier, payload: Any) -> float:
    """Read the chunks of an offer and return the rate in bytes per second.

    Raises TransferError where bytes differ or do not arrive.
    """
    offer = decode_payload(payload, Offer)
    chunks = list(torch.zeros(_CHUNKS, _CHUNK_NBYTES, dtype=torch.uint8))
    carrier.register(chunks)
    fingerprints = []
    with closing(Connection.open(LOOPBACK, offer.port, offer.secret, 0, PATIENCE_S)) as connection:
        connection.send_request(Request(1, 0, is_next=False))
        carrier.receive_metadata(connection, nothing)
        begun = 0.0
        for chunk in chunks:
            frame = connection.next_frame(nothing)
            if frame.kind is not FrameKind.CHUNK or frame.nbytes != _CHUNK_NBYTES:
                raise TransferError(f"the other process sent {frame}, and no chunk")
            fingerprints += connection.read_fingerprints(frame, nothing)
            carrier.receive(connection, frame, chunk.numpy().data, nothing)
            begun = begun or time.perf_counter()  # the first read also connects
        seconds = time.perf_counter() - begun
    if fingerprints != [mix64(chunk) for chunk in chunks]:
        raise TransferError("the bytes that arrived differ from the bytes that were sent")
    return (NBYTES - _CHUNK_NBYTES) / seconds
