"""How the tensors of one message get to their landing."""

from __future__ import annotations

import threading

from weightsync.backends.base import LoadContext, Received
from weightsync.backends.ipc.handles import receive_handles
from weightsync.errors import TransferError
from weightsync.lifecycle import State, UpdateLifecycle
from weightsync.receiving.gate import ReadWriteGate
from weightsync.receiving.incoming import IncomingUpdate
from weightsync.receiving.landings import LoadTargets
from weightsync.receiving.peers import Senders
from weightsync.specs import Manifest
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import LoadTarget, WeightSink, check_manifest
from weightsync.wire.messages import EmptyUpdate, RegisteredUpdate, UpdateInfo


class Loader:
    """Loads for one receiver; called with its work lock. `state` guards `lifecycle`."""

    def __init__(
        self,
        sink: WeightSink,
        senders: Senders,
        load_targets: LoadTargets,
        gate: ReadWriteGate,
        lifecycle: UpdateLifecycle,
        state: threading.RLock,
        lease_s: float,
    ) -> None:
        self._sink = sink
        self._senders = senders
        self._load_targets = load_targets
        self._gate = gate
        self._lifecycle = lifecycle
        self._state = state
        self._lease_s = lease_s
        self.abort_reason = ""

    def receive(self, incoming: IncomingUpdate, info: UpdateInfo) -> Received:
        """Bring the tensors of one message to their landing. Raises what the engine raises."""
        reception = self._reception(incoming)
        if isinstance(info, EmptyUpdate):
            return Received(Manifest(()))
        if not isinstance(info, RegisteredUpdate):
            return receive_handles(info, self._senders.keys, reception)
        engine = self._senders.get(info.sender)
        incoming.sender = info.sender
        if info.manifest is None:
            check_manifest(self._sink, engine.manifest, partial=incoming.partial)
        return engine.receive_weights(info, reception)

    def _reception(self, incoming: IncomingUpdate) -> LoadContext:
        def open_target(plan: StreamLayout) -> LoadTarget:
            # A session of messages without ids may cut what belongs together: settle looks at all.
            more_follows = incoming.anonymous and not incoming.partial
            check_manifest(self._sink, plan.manifest, partial=True, more_follows=more_follows)
            whole = not incoming.partial and not self._sink.difference(plan.manifest).missing
            return incoming.use(self.load_target(plan, whole=whole))

        def touch() -> None:
            if incoming.load_targets[-1].in_place and not self._lifecycle.dirty:
                self._gate.hold(self._lease_s)
                with self._state:
                    self._lifecycle.touch(incoming.update_id)

        return LoadContext(
            open_target=open_target,
            touch=touch,
            check=lambda: self.check_not_aborted(incoming),
            verification=self._sink.verification,
            lends_views=not getattr(self._sink, "keeps_views", False),
            ties=self._sink.ties,
        )

    def check_not_aborted(self, incoming: IncomingUpdate) -> None:
        """Raise TransferError when the update is being aborted."""
        if self._lifecycle.state is State.ABORTING:
            raise TransferError(f"update {incoming.update_id} ends: {self.abort_reason}")

    def load_target(self, plan: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return the plan's landing; to make one may move the model, so nobody reads meanwhile."""
        known = self._load_targets.find(plan)
        if known is not None or self._gate.held:  # by an update in place, which releases it itself
            return known or self._load_targets.get(plan, whole=whole)
        self._gate.hold(self._lease_s)
        try:
            return self._load_targets.get(plan, whole=whole)
        finally:
            self._gate.release()
