"""The engine core's side of the links to its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import msgspec
import zmq

from weightsync.errors import ProtocolError, TransferTimeout
from weightsync.queues.codec import MessageCodec
from weightsync.queues.message_queue import MessageQueue
from weightsync.serve import links
from weightsync.serve.messages import (
    CoreMessage,
    Done,
    Hello,
    ModelCard,
    NewRows,
    SampledToken,
    SamplingParams,
    Step,
    StepResult,
    WorkerMessage,
)
from weightsync.shm.wait import HEARTBEAT_TIMEOUT_FACTOR

STEP_SLOT_NBYTES = 1 << 20
STEP_SLOTS = 4
POLL_S = 0.05
"""How often a core that waits for a worker handles other messages."""
SILENCE_S = 60.0
"""How long a worker may send no message during a step."""

_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def step_codec() -> MessageCodec:
    """Return the codec of steps and their results."""
    codec = MessageCodec()
    for kind in (Step, NewRows, SamplingParams, StepResult, SampledToken):
        codec.register(kind)
    return codec


def step_queue(readers: int) -> MessageQueue:
    """Make a queue of steps for several workers, or of one worker's results for its core."""
    return MessageQueue(
        readers,
        readers,
        max_chunk_bytes=STEP_SLOT_NBYTES,
        max_chunks=STEP_SLOTS,
        codec=step_codec(),
        spin_s=0.0,
    )


def worker_identity(rank: int) -> bytes:
    """Return the ZeroMQ identity of a worker."""
    return b"worker-%d" % rank


class WorkerGroup:
    """All workers of one replica. `socket` is the bound ROUTER socket for their messages.

    One broadcast queue carries steps to all workers; each worker has its own queue for results.
    """

    def __init__(self, socket: zmq.Socket[bytes], hellos: dict[int, Hello]) -> None:
        self.socket = socket
        self.card: ModelCard = hellos[0].card
        self._steps = step_queue(len(hellos))
        self._results: list[MessageQueue] = []
        self._message_at: dict[int, float] = {}
        try:
            for rank in sorted(hellos):
                results = hellos[rank].results
                self._results.append(
                    MessageQueue.create_from_handle(results, 0, codec=step_codec())
                )
                steps = self._steps.export_handle()
                self.send(rank, Done(call=hellos[rank].call, steps=steps))
        except BaseException:
            self.close()
            raise

    @classmethod
    def gather(cls, socket: zmq.Socket[bytes], size: int, *, timeout_s: float) -> Self:
        """Wait for the Hello of all `size` workers. Raises TransferTimeout naming the late ones."""
        deadline = time.monotonic() + timeout_s
        hellos: dict[int, Hello] = {}
        while len(hellos) < size:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0 or not socket.poll(left_ms):
                late = ", ".join(str(rank) for rank in range(size) if rank not in hellos)
                raise TransferTimeout(
                    f"worker {late} of {size} did not load the model within {timeout_s:g} s"
                )
            frames = socket.recv_multipart()
            with links.dropped("a worker"):
                rank, message = _decoded(frames)
                if isinstance(message, Hello):
                    hellos[rank] = message
        return cls(socket, hellos)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self._results)

    def make(self, step: Step, meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        """Make a step on all workers; return the result of rank 0.

        `meanwhile` is called every POLL_S during the wait: it should read `messages`, and ends the
        wait if it raises. Raises PeerLostError for a worker that died. Raises TransferTimeout for a
        worker that sent no message for SILENCE_S, or has no result after HEARTBEAT_TIMEOUT_FACTOR
        times as long. Raises ProtocolError when the workers used different weights.
        """
        self._steps.enqueue(step)
        begun = time.monotonic()
        results = [self._result(rank, begun, meanwhile) for rank in range(self.size)]
        first = results[0]
        outcomes = {(result.number, result.version, tuple(result.refused)) for result in results}
        if len(outcomes) > 1:
            raise ProtocolError(
                f"workers made step {step.number} differently "
                f"(step, version, refused): {sorted(outcomes)}"
            )
        return first

    def messages(self) -> Iterable[tuple[int, WorkerMessage]]:
        """Yield the messages that have arrived."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            found: list[tuple[int, WorkerMessage]] = []
            with links.dropped("a worker"):
                found.append(_decoded(frames))
            for worker, message in found:
                self._message_at[worker] = time.monotonic()
                yield worker, message

    def send(self, worker: int, message: CoreMessage) -> None:
        """Send a message to one worker."""
        self.socket.send_multipart([worker_identity(worker), msgspec.msgpack.encode(message)])

    def send_to_all(self, message: CoreMessage) -> None:
        """Send a message to every worker."""
        for rank in range(self.size):
            self.send(rank, message)

    def close(self) -> None:
        """Close all queues."""
        self._steps.close()
        for queue in self._results:
            queue.close()

    def _result(self, rank: int, begun: float, meanwhile: Callable[[], None]) -> StepResult:
        while True:
            try:
                return cast(StepResult, self._results[rank].dequeue(POLL_S))
            except TransferTimeout:
                meanwhile()
                now = time.monotonic()
                silent_s = now - max(begun, self._message_at.get(rank, begun))
                if silent_s > SILENCE_S or now - begun > HEARTBEAT_TIMEOUT_FACTOR * SILENCE_S:
                    raise TransferTimeout(
                        f"worker {rank} did not make its step within {now - begun:.0f} s, and "
                        f"sent its last message {silent_s:.0f} s ago; is its process stopped?"
                    ) from None


def _decoded(frames: list[Any]) -> tuple[int, WorkerMessage]:
    identity, body = frames
    return int(identity.rpartition(b"-")[2]), _decoder.decode(body)
