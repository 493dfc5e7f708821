"""One update as a receiver lives it: its landings, what arrived, and how it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from weightsync.backends.base import Received
from weightsync.errors import ManifestMismatchError, ProtocolError, VerificationError
from weightsync.lifecycle import UpdateLifecycle
from weightsync.specs import Manifest, union
from weightsync.weights.fingerprint import table_digest
from weightsync.weights.sink import Apply, LoadTarget, Verification, WeightSink
from weightsync.wire.messages import StepReply

_STRENGTH: tuple[Verification, ...] = ("none", "arrived", "held")


@dataclass(slots=True)
class IncomingUpdate:
    """What one update has brought so far."""

    update_id: str
    sender: str | None
    partial: bool
    anonymous: bool = False
    manifest_digest: str | None = None
    committing: bool = False
    load_targets: list[LoadTarget] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    levels: set[Verification] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def use(self, load_target: LoadTarget) -> LoadTarget:
        """Take part in this update; the first time it begins."""
        if load_target in self.load_targets:
            self.load_targets.remove(load_target)  # what came last is committed last
        else:
            load_target.begin()
        self.load_targets.append(load_target)
        return load_target

    def note(self, received: Received) -> None:
        """Add what one message brought."""
        self.manifests.append(received.manifest)
        self.fingerprints += received.fingerprints
        self.levels.add(received.verified)
        self.tied.update(received.tied)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that arrived."""
        return sum(manifest.nbytes for manifest in self.manifests)

    @property
    def verified(self) -> Verification:
        """The weakest proof of any part."""
        return min(self.levels, key=_STRENGTH.index, default="none")

    @property
    def table_digest(self) -> str | None:
        """Names the fingerprints of everything that arrived, in order; None without any."""
        return table_digest(self.fingerprints) if self.fingerprints else None

    @property
    def apply(self) -> Apply:
        """How the weights land: in place if any of them does."""
        return (
            "in_place"
            if any(load_target.in_place for load_target in self.load_targets)
            else "staged"
        )

    @property
    def extra_nbytes(self) -> int:
        """What the landings hold beside the model."""
        return sum(load_target.peak_extra_nbytes for load_target in self.load_targets)

    def validate(self, sink: WeightSink, offered: Manifest | None) -> None:
        """Everything was sent: raise ManifestMismatchError for tensors that never came."""
        for load_target in self.load_targets:
            load_target.validate()
        self._check_ties(sink)
        announced = self.manifest_digest
        if announced is not None and len(self.manifests) == 1 and not self.partial:
            digest = self.manifests[0].digest
            if digest != announced:
                raise ProtocolError(
                    f"update {self.update_id} was announced with manifest {announced}, what came "
                    f"is {digest}; send what was announced"
                )
        wanted = sink.manifest or offered
        if self.partial:
            return
        if wanted is None:
            if not any(manifest.specs for manifest in self.manifests):
                raise ProtocolError(
                    f"update {self.update_id} brought no tensors; send them with update_weights "
                    "before it is finished"
                )
            sink.difference(union(self.manifests, sink.ties)).check(partial=False)
            return
        if any(not sink.difference(m).missing for m in self._whole_ones(sink)):
            return
        arrived = {name for manifest in self.manifests for name in manifest.index}
        missing = [name for name, names in wanted.places().items() if arrived.isdisjoint(names)]
        if missing:
            raise ManifestMismatchError(missing=missing)

    def _check_ties(self, sink: WeightSink) -> None:
        """Two names of one tensor came in several messages: raise where their bytes differ."""
        wrong = [
            f"{name}: offered as {name} and {alias} with other bytes, wanted as one tied tensor"
            for alias, name in sink.ties.items()
            if alias in self.tied and self.tied.get(name, self.tied[alias]) != self.tied[alias]
        ]
        if wrong:
            raise ManifestMismatchError(mismatched=wrong)

    def _whole_ones(self, sink: WeightSink) -> list[Manifest]:
        """Without a declared manifest no single message can be known to be whole."""
        return self.manifests if sink.manifest is not None else []

    def check_digest(self, expected: str | None) -> None:
        """Raise VerificationError unless the sender's table is the one that was compared with."""
        if expected is not None and self.table_digest not in (None, expected):
            raise VerificationError(
                f"the sender's fingerprints are named {expected}, those found beside the data "
                f"{self.table_digest}: the table was changed on the way; send the update again"
            )

    def reply(self, lifecycle: UpdateLifecycle, stall_s: float) -> StepReply:
        """Say what arrived so far, and where the receiver stands."""
        return StepReply(
            state=lifecycle.state.value,
            version=lifecycle.version,
            update_id=self.update_id,
            apply=self.apply,
            verified=self.verified,
            nbytes=self.nbytes,
            stall_s=stall_s,
            peak_extra_nbytes=self.extra_nbytes,
            seconds=dict(self.seconds),
            table_digest=self.table_digest,
        )

    def timed(self, phase: str, started: float) -> None:
        """Add the seconds since `started` to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
