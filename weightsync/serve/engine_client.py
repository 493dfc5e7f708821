"""The API server's side of the engine: each request goes to the least busy core; metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import anyio.to_thread
import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from weightsync.errors import NotReadyError, TransportTimeout, WeightSyncError
from weightsync.queues.codec import TensorEncoder
from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.serve.links import DealerLinks
from weightsync.serve.messages import (
    Cancel,
    ClientMessage,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    ModelCard,
    StatsReply,
    StatsRequest,
)
from weightsync.serve.options import CoreAddress, takes_images
from weightsync.serve.requests import RequestError
from weightsync.wire.problem import decode_error

if TYPE_CHECKING:
    from weightsync.queues.tensor_queue import TensorIpcSender


class EngineClient(Protocol):
    """An engine with one or more replicas, used from one event loop."""

    @property
    def card(self) -> ModelCard:
        """The model that is served."""

    def generate(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[EngineOutput, None]:
        """Yield the tokens of requests as they arrive, each completion up to its finish_reason.

        Ends after the last completion. Closing the generator early cancels the requests. The first
        error ends all requests: NotReadyError when the weights may not be used, ConfigError for a
        prompt that the model cannot take, RequestError for an adapter that is not held, and other
        errors of the engine.
        """

    def cancel(self, request_id: str, index: int) -> None:
        """Stop one completion of a request. Its last delta still arrives, as "abort"."""

    async def stats(self) -> list[EngineStats]:
        """Return the statistics of each replica."""


logger = logging.getLogger(__name__)

MAX_MEDIA_IN_FLIGHT = 8
"""The most requests with tensors that one API server sends at once."""
STATS_TIMEOUT_S = 10.0

_events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])


class _Core:
    """One engine core: its tensor queue and its requests from this API server."""

    def __init__(self, index: int, tensors: TensorQueueHandle | None, tensor_ipc: str) -> None:
        self.index = index
        self.in_flight = 0
        self._sender: TensorIpcSender | None = None
        self._encoder = TensorEncoder(tensor_ipc, lambda: self._open(tensors))

    def _open(self, queue: TensorQueueHandle | None) -> TensorIpcSender:
        if queue is None:
            raise NotReadyError("this engine core has no tensor queue", state="READY")
        # It loads torch, which an API server of a text-only model does not need.
        from weightsync.queues.tensor_queue import TensorIpcSender  # noqa: PLC0415 - see above

        self._sender = TensorIpcSender(queue)
        return self._sender

    def frames(self, message: ClientMessage, request_id: str = "") -> list[Any]:
        """Encode a message. The first frame is the request id, readable if the rest is not."""
        return [request_id.encode(), *self._encoder.encode(message, request_id or None)]

    def close(self) -> None:
        """Close the queue."""
        if self._sender is not None:
            self._sender.close()


@dataclass(slots=True)
class _Inbox:
    """Events of one caller's requests that were not read yet.

    `going` are the unfinished completions, by request id and index. `cores` are by request id.
    """

    going: set[tuple[str, int]]
    cores: dict[str, _Core] = field(default_factory=dict)
    items: asyncio.Queue[EngineOutput | Failed] = field(default_factory=asyncio.Queue)


class EngineCoreClient:
    """An EngineClient over ZeroMQ. Open, use and close it in one event loop."""

    def __init__(
        self,
        addresses: Sequence[CoreAddress],
        card: ModelCard,
        *,
        identity: bytes,
        tensor_ipc: str = "torch_shm",
    ) -> None:
        self._card = card
        self._addresses = list(addresses)
        self._identity = identity
        self._links: DealerLinks | None = None
        ipc = tensor_ipc if takes_images(card) else "direct_rpc"
        self._cores = [_Core(i, address.tensors, ipc) for i, address in enumerate(addresses)]
        self._inboxes: dict[str, _Inbox] = {}
        self._stats_replies: dict[int, asyncio.Future[EngineStats]] = {}
        self._next_call = 0
        self._next_core = 0
        self._media = asyncio.Semaphore(MAX_MEDIA_IN_FLIGHT)
        self._closed = False

    async def open(self) -> None:
        """Connect to all cores. Called once, before all other methods."""
        sockets = [address.socket for address in self._addresses]
        self._links = DealerLinks(sockets, self._take, identity=self._identity, peer="engine core")

    @property
    def card(self) -> ModelCard:
        """The model that is served."""
        return self._card

    async def generate(
        self, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the tokens of requests; see EngineClient."""
        if self._closed:
            raise NotReadyError("the server is shutting down; use another one", state="CLOSED")
        going = {(request.request_id, index) for request in requests for index in range(request.n)}
        inbox = _Inbox(going)
        try:
            for request in requests:
                core = inbox.cores[request.request_id] = self._least_busy()
                core.in_flight += 1
                self._inboxes[request.request_id] = inbox
                await self._submit(core, request)
            while going:
                item = await inbox.items.get()
                if isinstance(item, Failed):
                    going.difference_update([key for key in going if key[0] == item.request_id])
                    raise _error_of(item)
                completion = (item.request_id, item.index)
                if completion in going:  # otherwise `stop` has ended it already
                    if item.finish_reason is not None:
                        going.discard(completion)
                    yield item
        finally:
            unfinished = {request_id for request_id, _ in going}
            for request_id, core in inbox.cores.items():
                core.in_flight -= 1
                del self._inboxes[request_id]
                if request_id in unfinished:
                    self._post(core, Cancel(request_id=request_id))

    def cancel(self, request_id: str, index: int) -> None:
        """Stop one completion of a request; see EngineClient."""
        if request_id in self._inboxes:
            core = self._inboxes[request_id].cores[request_id]
            self._post(core, Cancel(request_id=request_id, index=index))

    async def stats(self) -> list[EngineStats]:
        """Return the statistics of each replica. Raises TransportTimeout if one does not reply."""
        return list(await asyncio.gather(*map(self._stats_of, self._cores)))

    def stop(self) -> None:
        """End all requests with the tokens that they have, and refuse new ones."""
        self._closed = True
        for inbox in {id(inbox): inbox for inbox in self._inboxes.values()}.values():
            for request_id, index in inbox.going:
                ended = EngineOutput(request_id=request_id, index=index, finish_reason="abort")
                inbox.items.put_nowait(ended)

    def close(self) -> None:
        """End all requests and close all sockets."""
        self.stop()
        for core in self._cores:
            core.close()
        if self._links is not None:
            self._links.close()

    def _least_busy(self) -> _Core:
        # Round robin among equally busy cores: each API server counts its own requests only.
        self._next_core += 1
        turned = self._cores[self._next_core % len(self._cores) :] + self._cores
        return min(turned[: len(self._cores)], key=lambda core: core.in_flight)

    async def _submit(self, core: _Core, request: EngineRequest) -> None:
        assert self._links is not None
        if request.inputs is None:
            await self._links.send(core.index, core.frames(request, request.request_id))
            return
        async with self._media:
            frames = await anyio.to_thread.run_sync(core.frames, request, request.request_id)
            await self._links.send(core.index, frames)

    async def _stats_of(self, core: _Core) -> EngineStats:
        self._next_call += 1
        call = self._next_call
        reply = self._stats_replies[call] = asyncio.get_running_loop().create_future()
        try:
            self._post(core, StatsRequest(call=call))
            return await asyncio.wait_for(reply, STATS_TIMEOUT_S)
        except TimeoutError:
            raise TransportTimeout(
                f"engine core {core.index} did not reply within {STATS_TIMEOUT_S:g} s"
            ) from None
        finally:
            del self._stats_replies[call]

    def _post(self, core: _Core, message: ClientMessage) -> None:
        assert self._links is not None
        self._links.post(core.index, core.frames(message))

    def _take(self, _core: int, frames: list[bytes]) -> None:
        (body,) = frames
        for event in _events.decode(body):
            if isinstance(event, StatsReply):
                reply = self._stats_replies.get(event.call)
                if reply is not None and not reply.done():
                    reply.set_result(event.stats)
            elif event.request_id in self._inboxes:
                self._inboxes[event.request_id].items.put_nowait(event)


def _error_of(failed: Failed) -> WeightSyncError:
    if not failed.unknown_model:
        return decode_error(failed.problem, peer="engine")
    why = str(decode_error(failed.problem))
    return RequestError(why, status=404, param="model", code="model_not_found")


METRICS_TIMEOUT_S = 2.0

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_SHOWN: tuple[tuple[_Family, str, str, Callable[[EngineStats], float]], ...] = (
    (GaugeMetricFamily, "requests_running", "Completions at work.", lambda s: s.running),
    (GaugeMetricFamily, "requests_waiting", "Completions that wait.", lambda s: s.waiting),
    (CounterMetricFamily, "requests", "Prompts to be completed.", lambda s: s.requests_total),
    (CounterMetricFamily, "tokens", "Tokens generated.", lambda s: s.tokens_total),
    (
        GaugeMetricFamily,
        "tokens_per_second",
        "Tokens generated, by the last seconds.",
        lambda s: s.tokens_per_s,
    ),
)


def engine_metrics(engine: EngineClient) -> Callable[[], Awaitable[list[Metric]]]:
    """Return a function that reads all replicas' metrics, for `weight_router(more_metrics=)`.

    It returns no metrics for an engine that does not reply in time, so that the metrics of the
    weights are shown in any case.
    """

    async def read_metrics() -> list[Metric]:
        try:
            stats = await asyncio.wait_for(engine.stats(), METRICS_TIMEOUT_S)
        except (TimeoutError, WeightSyncError) as exc:
            logger.info("the engine has no metrics: %s", str(exc) or "it does not answer")
            return []
        return list(metrics_of(stats))

    return read_metrics


def metrics_of(replicas: Sequence[EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of all replicas, with the replica's index as label."""
    for kind, name, text, read in _SHOWN:
        metric = kind(f"weightsync_{name}", text, labels=["replica"])
        for index, stats in enumerate(replicas):
            metric.add_metric([str(index)], read(stats))
        yield metric
