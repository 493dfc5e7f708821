"""The backend between hosts: each reads from the host before it, over TCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weightsync.backends.base import (
    Backend,
    Endpoint,
    Reach,
    TrainerWeightTransferEngine,
    TransferOptions,
    Trial,
    WeightTransferEngine,
)
from weightsync.backends.registry import get_backend
from weightsync.backends.ring import RingEngine
from weightsync.weights.sources.base import WeightSource

if TYPE_CHECKING:
    from weightsync.backends.tcp.carrier import Carrier

TCP_COST = 5.0
BUCKET_NBYTES = 4 << 20
_RING_NBYTES, _FEWEST_BUCKETS = 32 << 20, 4
_MANY_STREAMS, _SMALL_BUCKET_NBYTES = 8, 1 << 20
"""Ranks that send, above which the buckets of their rings are small by default."""


class TcpBackend(Backend):
    """Path `tcp`: a rank sends to the first host, and each host to the next one.

    That is rank 0, which sends what all have gathered, or every rank, which sends its own boxes:
    then each host has a ring for each rank, and the ranks begin with different hosts.
    """

    name: ClassVar[str] = "tcp"
    requires: ClassVar[Mapping[str, str]] = {"ipc": "shared_memory"}

    def endpoint(self, device: torch.device) -> Any:
        """Return that the streams of several ranks are read."""
        return {"streams": True}

    def takes_streams(self, receiver: Endpoint) -> bool:
        """Whether a receiver says so: one of an older version does not."""
        return isinstance(receiver.facts, Mapping) and receiver.facts.get("streams") is True

    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
        """Return the path. The receiver's connection shows whether it works.

        All ranks have the same: where one sends for all, the core takes rank 0.
        """
        return [Reach("tcp", TCP_COST)]

    def adjust(self, options: TransferOptions) -> TransferOptions:
        """Set `packed`, and the same buckets for every ring of the sender: one table fits all.

        Of many ranks that send the rings are smaller: each receiving host has one for each.
        """
        most = BUCKET_NBYTES if options.streams <= _MANY_STREAMS else _SMALL_BUCKET_NBYTES
        bucket_nbytes = options.bucket_nbytes or most
        ring_nbytes = _RING_NBYTES // options.streams
        fitting = max(ring_nbytes // max(bucket_nbytes, most), _FEWEST_BUCKETS)
        return replace(
            options,
            packed=True,
            bucket_nbytes=bucket_nbytes,
            num_buckets=options.num_buckets or fitting,
        )

    def trainer_engine(
        self,
        source: WeightSource,
        path: str,
        options: TransferOptions,
        bases: Mapping[str, TrainerWeightTransferEngine],
    ) -> TrainerWeightTransferEngine:
        """Return the engine that reads the ring of `ipc`, or the source."""
        # Each half is imported only where it is used.
        from weightsync.backends.tcp.trainer import TcpTrainerEngine  # noqa: PLC0415

        return TcpTrainerEngine(source, RingEngine.of(bases), options, self.make_carrier)

    def receiver_engine(self, device_keys: Sequence[str]) -> WeightTransferEngine:
        """Return the engine that feeds its host, or reads the ring of a receiver that does."""
        from weightsync.backends.tcp.receiver import (  # noqa: PLC0415  # as above
            TcpStreamsEngine,
            TcpWeightTransferEngine,
        )

        def make() -> TcpWeightTransferEngine:
            reads_ring = get_backend("ipc").receiver_engine(device_keys)
            return TcpWeightTransferEngine(reads_ring, self.make_carrier)

        return TcpStreamsEngine(make)

    def make_carrier(self) -> Carrier:
        """Return the carrier of one engine, which moves the bytes of chunks."""
        from weightsync.backends.tcp.carrier import InStream  # noqa: PLC0415  # as above

        return InStream()

    def trials(self) -> Sequence[Trial]:
        """Return one trial, over loopback. It does not show whether another host is reached."""
        remedy = "check the loopback interface (ip link set lo up) and firewalls"
        return [Trial(path=self.name, remedy=remedy)]

    @contextmanager
    def offer_trial(self, path: str) -> Iterator[Any]:
        """Serve chunks on loopback."""
        from weightsync.backends.tcp.trial import serve_chunks  # noqa: PLC0415  # as above

        with closing(self.make_carrier()) as carrier, serve_chunks(carrier) as offer:
            yield offer

    def read_trial(self, path: str, offer: Any) -> str:
        """Read the chunks, as a receiver on another host does, and compare their fingerprints."""
        from weightsync.backends.tcp.trial import NBYTES, read_chunks  # noqa: PLC0415  # as above

        with closing(self.make_carrier()) as carrier:
            nbytes_per_s = read_chunks(carrier, offer)
        return f"{NBYTES >> 20} MiB read at {nbytes_per_s / 1e9:.1f} GB/s"
