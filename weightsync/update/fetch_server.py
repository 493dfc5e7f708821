"""The source of a fetch: a receiver that sends the weights in use to receivers that ask for them.

The receiver that fetches makes all calls: what it is sent are the replies to `fetch_weights`. So it
needs no address, and any transport to the source will do.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import combinations, starmap

import torch

from weightsync.backends.base import TransferOptions
from weightsync.backends.registry import choose_backends
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ManifestMismatchError,
    NotReadyError,
    ProtocolError,
    SourceBusyError,
    TransferTimeout,
    VerificationError,
    WeightSyncError,
)
from weightsync.ranks.comm import RankComm, alone
from weightsync.ranks.group import RankGroup
from weightsync.ranks.relayed import RelayedComm
from weightsync.ranks.worker import RankWorker
from weightsync.report import SyncReport
from weightsync.transports.polled import PolledTransport, joint_turn
from weightsync.update.coordinator import Coordinator
from weightsync.update.fleet import Fleet
from weightsync.update.incoming import InUse
from weightsync.update.paths import PathSelector
from weightsync.update.session import ReceiverSession
from weightsync.weights.copying.rank_streams import cut_box, index_in
from weightsync.weights.copying.reshard import has_common
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sources.exchange import decode_holdings, encode_holdings
from weightsync.weights.sources.holdings import Holdings
from weightsync.wire.messages import FetchReply, FetchRequest
from weightsync.wire.problem import to_problem

logger = logging.getLogger(__name__)

MAX_FETCHES = 8
"""Receivers that fetch from one receiver at the same time."""
_KEPT_S = 60.0
"""How long the outcome of a fetch is kept, for calls that are repeated."""
_READING_S = 60.0
_WORDS_TIMEOUT_FACTOR = 10.0
"""How much longer than for progress a source waits for the words of others, which may transfer."""
_NO_GATHER = (
    "this receiver holds parts of tensors, and the one that fetches cannot read them from several "
    "sources, so that nothing was fetched; fetch from a receiver that holds whole tensors"
)


class FetchServer:
    """Answers the `fetch_weights` calls of any number of receivers. Thread-safe.

    `instance` is the id of the receiver whose `session` it is.
    """

    def __init__(self, session: ReceiverSession, instance: str) -> None:
        self._session = session
        self._instance = instance
        self._lock = threading.Lock()
        self._fetches: dict[str, _Fetch] = {}
        self._closed = False

    def answer(self, request: FetchRequest) -> FetchReply:
        """Answer one call. Raises SourceBusyError where too many receivers fetch."""
        with self._lock:
            if self._closed:
                raise ProtocolError("this receiver is closed; fetch from another one")
            self._forget()
            fetch = self._fetches.get(request.fetch_id)
            if fetch is None:
                if request.turn:
                    raise ProtocolError(f"fetch {request.fetch_id} is over; begin another one")
                if sum(other.ended_at is None for other in self._fetches.values()) >= MAX_FETCHES:
                    raise SourceBusyError(
                        f"{MAX_FETCHES} receivers fetch from this one already; fetch from another, "
                        "or later",
                        state=self._session.lifecycle.state.value,
                    )
                fetch = _Fetch(self._session, self._instance, request)
                self._fetches[request.fetch_id] = fetch
                fetch.thread.start()
        return fetch.transport.take(request)

    def close(self, wait_s: float = 0.0) -> None:
        """Give up all fetches. Idempotent.

        Raises TransferTimeout where one still reads the weights after `wait_s` seconds, unless that
        is 0.
        """
        with self._lock:
            self._closed = True
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.transport.close()
        deadline = time.monotonic() + wait_s
        for fetch in fetches if wait_s else ():
            fetch.thread.join(max(0.0, deadline - time.monotonic()))
            if fetch.thread.is_alive():
                raise TransferTimeout(
                    f"another receiver still fetches the weights of this one after {wait_s:g} s"
                )

    def _forget(self) -> None:
        before = time.monotonic() - _KEPT_S
        for fetch_id, fetch in list(self._fetches.items()):
            if fetch.ended_at is not None and fetch.ended_at < before:
                del self._fetches[fetch_id]


class _Fetch:
    """One fetch: sends the weights in use in a thread, through `transport`."""

    def __init__(self, session: ReceiverSession, instance: str, request: FetchRequest) -> None:
        self.ended_at: float | None = None
        joint = None if request.reply is None else joint_turn(request.reply)
        self._joint_id = None if joint is None else joint.weights_id
        self.transport = PolledTransport(request.address, self._check_free, joint)
        self._session = session
        self._instance = instance
        self._request = request
        self.thread = threading.Thread(
            target=self._run, name="weightsync-fetch-server", daemon=True
        )

    def _run(self) -> None:
        try:
            reply = FetchReply(report=self._send())
        except Exception as exc:
            if not isinstance(exc, WeightSyncError):
                logger.exception("the weights could not be sent to a receiver that fetches them")
            reply = FetchReply(problem=to_problem(exc))
        self.ended_at = time.monotonic()  # first: with the reply the receiver may fetch again
        self.transport.end(reply)

    def _send(self) -> SyncReport | None:
        """Send the weights in use, with other sources where the fetch is joint."""
        self._check_free()
        mailbox = self.transport.mailbox
        with self._session.reading(_READING_S):
            source = WeightsInUse(self._session, self._instance, parts=mailbox is not None)
        joins = self._request.weights_id is not None
        wanted = self._request.weights_id or self._joint_id
        if wanted is not None and source.weights_id != wanted:
            raise ProtocolError(
                f"this receiver does not use the weights {wanted} as they were sent: it uses "
                f"{source.weights_id}"
            )
        backends, unusable = choose_backends(self._request.backend)
        options = TransferOptions(adopt=False, timeout_s=self._request.timeout_s)
        timeout_s = _WORDS_TIMEOUT_FACTOR * options.timeout_s
        # Whatever other ranks this process has.
        ranks = alone() if mailbox is None else RelayedComm(mailbox, timeout_s=timeout_s)
        if mailbox is not None:
            source.cut_with(ranks)
        worker = RankWorker(source, options, ranks, backends, "off")
        worker.address = self.transport.local_address
        group = RankGroup(worker, ranks)
        if not group.leads:
            with closing(group):
                return group.serve().report
        with closing(group), closing(self._fleet(group)) as fleet:
            if joins:  # as part of a fleet, it may not generate with older weights
                fleet.version = source.version
            paths = PathSelector(fleet, options, backends, ordered=False, unusable=unusable)
            coordinator = Coordinator(fleet, paths, takeover=False)
            report: SyncReport | None = None
            failed: BaseException | None = None
            try:
                coordinator.membership.connect()
                if mailbox is not None:
                    _check_spanning(group, paths)
                report = coordinator.send(
                    source.version, source.label, rewind=True, weights_id=source.weights_id
                )
            except VerificationError as exc:
                failed = exc
                if not source.changed:
                    raise
                failed = SourceBusyError("this receiver replaced the weights meanwhile")
                raise failed from exc
            except BaseException as exc:
                failed = exc
                raise
            finally:
                with suppress(WeightSyncError):
                    coordinator.membership.disconnect(leaves=True)
                with suppress(WeightSyncError):
                    group.finish(source.version, report=report, error=failed)
            return report

    def _check_free(self) -> None:
        """Raise SourceBusyError where this would slow down an update of other receivers."""
        session = self._session
        if session.senders.feeds_others:
            raise SourceBusyError(
                "this receiver passes an update on to others; fetch from another one, or after it",
                state=session.lifecycle.state.value,
                update_id=session.lifecycle.update_id,
            )

    def _fleet(self, group: RankGroup) -> Fleet:
        timeout_s = self._request.timeout_s
        return Fleet(group, [self.transport], timeout_s=timeout_s, drops=False, yields=True)


class WeightsInUse:
    """WeightSource of the weights that a receiver uses now. Made while they are read.

    They stay in use, and an update may replace them at any time: `changed` then has their names.
    Where they are not those of an update as they were sent, `weights_id` is an id of their own: the
    sender of that update must not build on them.

    With `parts`, it is one of several sources, and what it holds of each tensor are `holdings`.

    Raises ConfigError where the receiver keeps no whole copy, or no parts, SourceBusyError where
    they are being overwritten.
    """

    def __init__(self, session: ReceiverSession, instance: str, *, parts: bool = False) -> None:
        lifecycle = session.lifecycle
        self._session = session
        self.version, self.label = lifecycle.version, lifecycle.label
        starts, is_open = session.starts, session.open_update is not None
        targets, weights_id = session.load_targets, lifecycle.weights_id
        found = targets.parts_in_use(weights_id) if parts else targets.in_use(weights_id)
        self._places = found.places
        self._bases: list[torch.Tensor] | None = None
        self.manifest, self._tensors = found.manifest, found.tensors
        self.weights_id = (
            lifecycle.weights_id if found.as_sent else _own_id(session, instance, found)
        )
        self._stays = found.stays
        # An update may have begun while the tensors were looked at.
        is_open = is_open or session.open_update is not None or session.starts != starts
        if is_open and not found.stays:
            raise SourceBusyError(
                "this receiver is in an update, which overwrites the weights that others could "
                "fetch; fetch after it",
                state=lifecycle.state.value,
                update_id=lifecycle.update_id,
            )
        if found.is_copy and not found.as_sent:
            raise ConfigError(
                "the load_weights hook of this receiver has changed the tensors that it was given, "
                "which others could fetch; fetch from another receiver, or after the next update"
            )
        self._held = lifecycle.weights_id, self.version, 0 if self._stays else starts

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by name. Raises ConfigError where these are parts."""
        if self._places is not None:
            raise ConfigError(_NO_GATHER)
        for spec, tensor in zip(self.manifest.specs, self._tensors, strict=True):
            yield spec.name, tensor

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the tensors, None where these are parts."""
        return None if self._places is not None else self._tensors

    def holdings(self) -> Holdings | None:
        """Return the parts that this receiver holds, None where it holds whole tensors."""
        if self._places is None:
            return None
        names = [self.manifest.specs[index].name for index, _ in self._places]
        boxes = [box for _, box in self._places]
        bases = None if self._bases is None else lambda: self._bases or ()
        return Holdings(names, boxes, lambda: self._tensors, bases=bases)

    def cut_with(self, ranks: RankComm) -> None:
        """Cut the parts where those of other sources of other cuts begin or end. Collective.

        All have verified the same update, so that elements which several have are equal: as equal
        boxes they are replicas.
        """
        held = self.holdings()
        assert held is not None
        assert self._places is not None
        boxes_of: dict[int, dict[Slice, None]] = defaultdict(dict)
        for told in map(decode_holdings, ranks.exchange(encode_holdings(held, self.manifest))):
            if told.digest != self.manifest.digest:
                return  # the ranks compare their manifests next, and raise
            for index, box in told.listed():
                boxes_of[index][box] = None
        known: dict[tuple[Slice, ...], bool] = {}
        places: list[tuple[int, Slice]] = []
        tensors: list[torch.Tensor] = []
        bases: list[torch.Tensor] = []
        for (index, box), tensor in zip(self._places, self._tensors, strict=True):
            all_boxes = tuple(boxes_of[index])
            if all_boxes not in known:
                known[all_boxes] = any(starmap(has_common, combinations(all_boxes, 2)))
            parts = [part for part, _ in cut_box(box, all_boxes)] if known[all_boxes] else [box]
            for part in parts:
                places.append((index, part))
                tensors.append(tensor if part == box else tensor[index_in(box, part)])
                bases.append(tensor)
        if len(places) > len(self._places):
            self._places, self._tensors, self._bases = places, tensors, bases

    @property
    def device_types(self) -> frozenset[str]:
        """The types of the devices of the tensors."""
        return frozenset(tensor.device.type for tensor in self._tensors)

    @property
    def changed(self) -> list[str]:
        """The names of all tensors where these are not in use any more. Waits for a commit."""
        session = self._session
        try:
            with session.reading(_READING_S):
                held = session.lifecycle.weights_id, session.lifecycle.version
                same = (*held, 0 if self._stays else session.starts) == self._held
        except NotReadyError:
            same = False
        return [] if same else [spec.name for spec in self.manifest.specs]


def _check_spanning(group: RankGroup, paths: PathSelector) -> None:
    """Raise an error unless each source sends its own parts: receivers never gather for others."""
    if group.sends_streams:
        return
    why_not = group.worker.plan.why_not
    if why_not:
        raise ManifestMismatchError(f"the parts of these sources do not make a model: {why_not}")
    raise BackendUnavailableError(f"{_NO_GATHER}: {paths.why_gathered}")


def _own_id(session: ReceiverSession, instance: str, found: InUse) -> str:
    """Return an id of weights that are no sender's: the same for all workers that fetch them."""
    held = (session.lifecycle.weights_id, session.lifecycle.version, session.starts, found.token)
    return f"of {instance}-{hashlib.blake2b(repr(held).encode(), digest_size=8).hexdigest()}"
