"""A worker process: one model, or one shard of it, its receiver, and the steps it makes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import msgspec
import torch
import torch.distributed as dist

from weightsync.errors import PeerLostError, TransferCancelled
from weightsync.queues.message_queue import MessageQueue
from weightsync.receiver import WeightReceiver
from weightsync.serve.model import LoadedModel
from weightsync.serve.model_runner import ModelRunner
from weightsync.serve.process_terms import Ready, WorkerTerms
from weightsync.serve.sharded_model import load_for_worker
from weightsync.serve.steps import Step
from weightsync.serve.worker_crew import STEP_SLOT_NBYTES, STEP_SLOTS, step_codec
from weightsync.serve.worker_link import WorkerLink
from weightsync.serve.worker_messages import REPORT_CALL, Hello, WorkerState
from weightsync.wire import codec

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 600.0
COLLECTIVE_TIMEOUT_S = 120.0


class Worker:
    """Makes the steps of its engine core until `stop`."""

    def __init__(self, terms: WorkerTerms, loaded: LoadedModel) -> None:
        self._terms = terms
        self._cancel = threading.Event()
        self._link = WorkerLink(
            terms.rank, core_address=terms.core_address, control_address=terms.control_address
        )
        self.receiver = WeightReceiver(
            loaded.model,
            apply=terms.apply,
            on_pause=self._link.pause,
            on_resume=self._link.resume,
            on_clear_cache=self._link.clear_cache,
            on_hold=self._link.hold,
            on_release=self._release,
        )
        self._runner = ModelRunner(loaded.model, chooses=terms.rank == 0)
        self.card = self._runner.card(loaded.name, terms.model, loaded.tokenizer)
        self._results = MessageQueue(
            1,
            1,
            max_chunk_bytes=STEP_SLOT_NBYTES,
            max_chunks=STEP_SLOTS,
            codec=step_codec(),
            spin_s=0.0,
        )
        hello = Hello(card=self.card, results=self._results.export_handle())
        welcome = self._link.hello(hello, HELLO_TIMEOUT_S)
        self._steps = MessageQueue.create_from_handle(welcome.steps, terms.rank, codec=step_codec())
        self._link.serve(self._handle, self._standing, self.receiver.show_paused)

    def run(self) -> None:
        """Make steps. Raises PeerLostError when the engine core is gone."""
        with suppress(TransferCancelled):
            while True:
                step: Step = self._steps.dequeue(cancel=self._cancel, indefinite=True)
                # No update swaps inside a step: it holds the core first, which waits for this.
                result = self._runner.execute(step, self.receiver.version)
                self._results.enqueue(result, cancel=self._cancel)

    def stop(self) -> None:
        """Have `run` return. Safe in a signal handler."""
        self._cancel.set()

    def close(self) -> None:
        """Let every mapping and queue go."""
        self._link.close()  # first: an update that waits for the core's answer lets go
        self.receiver.close()
        self._steps.close()
        self._results.close()

    def _handle(self, call: str, body: bytes) -> bytes:
        if call == REPORT_CALL:
            return msgspec.json.encode(self.receiver.report())
        return codec.encode(self.receiver.dispatch(codec.decode_request(call, body)))

    def _release(self) -> None:
        self._link.release(msgspec.structs.replace(self._standing(), released=True))

    def _standing(self) -> WorkerState:
        status = self.receiver.status()
        return WorkerState(
            version=status.version,
            weights_id=status.weights_id or "",
            state=status.state,
            why_not="" if status.may_generate else status.detail or status.state,
        )


def worker_main(ready: Ready, terms: WorkerTerms) -> None:
    """Be a worker process until SIGTERM. `ready` takes the encoded ModelCard."""
    with _process_group(terms):
        loaded = load_for_worker(
            terms.model,
            dtype=getattr(torch, terms.dtype),
            shards=terms.size,
            folder=Path(terms.folder) / f"model-{terms.replica}",
        )
        worker = Worker(terms, loaded)

        def on_term(_signal: int, _frame: FrameType | None) -> None:
            worker.stop()

        signal.signal(signal.SIGTERM, on_term)
        try:
            ready(msgspec.msgpack.encode(worker.card))
            worker.run()
        except PeerLostError as exc:
            # Who died first is what the supervisor tells; this one only follows.
            logger.info("%s ends: %s", terms.name, exc)
            raise SystemExit(1) from None
        finally:
            worker.close()


@contextmanager
def _process_group(terms: WorkerTerms) -> Iterator[None]:
    """The collectives of a tensor-parallel replica: Gloo on loopback, meeting in a file."""
    if terms.size == 1:
        yield
        return
    os.environ.update(
        RANK=str(terms.rank),
        LOCAL_RANK=str(terms.rank),
        WORLD_SIZE=str(terms.size),
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{terms.folder}/replica-{terms.replica}",
        rank=terms.rank,
        world_size=terms.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
