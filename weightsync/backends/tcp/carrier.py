"""How the bytes of chunks cross: in the stream of their connection, or by means of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from weightsync.backends.tcp.connection import Check, Connection, Frame
from weightsync.backends.tcp.window import Data, Pieces
from weightsync.errors import TransferError


class Carrier(Protocol):
    """Moves the bytes of chunks between two hosts; one for each engine.

    Heads, fingerprints, requests and signs of life go over the connection in any case. The serving
    side has one thread for each connection, the reading side one in all. Errors are TransferErrors.
    Only one that `lends` is given chunks in several places.
    """

    lends: bool

    def register(self, buckets: Sequence[torch.Tensor]) -> None:
        """Prepare the memory of this process's ring, `uint8[nbytes]` each, for both directions."""

    def lend(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Prepare to send `Pieces` of these tensors, before a host connects; of none: end that.

        Returns False where this memory does not allow it.
        """

    def send_metadata(self, connection: Connection) -> None:
        """Tell a reading host what it needs, after its first request. For the serving side."""

    def receive_metadata(self, connection: Connection, check: Check) -> None:
        """Learn what `send_metadata` tells, after the first request. For the reading side."""

    def send(
        self, connection: Connection, frame: Frame, fingerprints: Sequence[int], data: Data
    ) -> None:
        """Send a chunk; return when `data` may be overwritten."""

    def receive(self, connection: Connection, frame: Frame, into: memoryview, check: Check) -> None:
        """Read the bytes of a chunk into a bucket, after its head and fingerprints were read."""

    def skip(self, connection: Connection, frame: Frame, check: Check) -> None:
        """Drop the bytes of a chunk, after its head and fingerprints were read."""

    def leave(self, connection: Connection) -> None:
        """Forget the other end of a connection. For the reading side."""

    def close(self) -> None:
        """Release the memory and everything else. Idempotent."""


class InStream:
    """The carrier of `tcp`: bytes follow the head of their frame."""

    lends = False

    def register(self, buckets: Sequence[torch.Tensor]) -> None:
        """Nothing to do."""

    def lend(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return False."""
        return False

    def send_metadata(self, connection: Connection) -> None:
        """Nothing to tell."""

    def receive_metadata(self, connection: Connection, check: Check) -> None:
        """Nothing to learn."""

    def send(
        self, connection: Connection, frame: Frame, fingerprints: Sequence[int], data: Data
    ) -> None:
        """Send head, fingerprints and bytes."""
        if isinstance(data, Pieces):
            raise TransferError("a chunk in several places is sent by a carrier that lends")
        connection.send_frame(frame, fingerprints, data)

    def receive(self, connection: Connection, frame: Frame, into: memoryview, check: Check) -> None:
        """Read the bytes that follow."""
        connection.read_data(into, check)

    def skip(self, connection: Connection, frame: Frame, check: Check) -> None:
        """Read the bytes that follow, and drop them."""
        connection.skip(frame.nbytes, check)

    def leave(self, connection: Connection) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to release."""
