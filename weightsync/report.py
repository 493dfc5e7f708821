"""Report of an update, which `send_weights` returns on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from weightsync.errors import shorten

Apply = Literal["staged", "in_place"]
"""Whether an update is staged until its commit, or written into the weights in use."""
Verification = Literal["none", "arrived", "held"]
"""Level of verification of an update; COMPARED defines the levels."""
Rule = Literal["two-phase", "roll-forward"]

COMPARED: Mapping[str, str] = {
    "none": "nothing was compared",
    "arrived": (
        "what came to the receiver has the fingerprint of what the sender read from its source; "
        "what the receiver made of it was not read"
    ),
    "held": (
        "what the update wrote was read back from the memory that it was written to, and has the "
        "fingerprint of what the sender read from its source"
    ),
}
"""Definition of each level of verification, on every path. A delta writes the lines that changed.
docs/concepts.md has the same sentences, and what they do not cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReport:
    """Report of an update on deltas: `sent` as one, or whole, for this `reason`.

    `lines` is the number of 64-byte lines in which the weights changed since the oldest version
    that a receiver held, `share` their share of all lines: these alone were written, and verified
    as the report says. `sampled` is the share of the lines that were read besides: one of each
    tensor, compared with what it was at the last commit, and those of `scrub`, compared with the
    sender's. `nbytes` are the bytes of the delta, and `saved_nbytes` how many fewer than those of
    the model.
    """

    sent: bool = False
    reason: str = ""
    lines: int = 0
    share: float = 0.0
    sampled: float = 0.0
    nbytes: int = 0
    saved_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """Report of an update that sent a model with adapters merged in: what rounding took of them.

    `elements` is the number of elements of the sent tensors that the adapters change, `lost` the
    number of these that have the same value as without adapters: the dtype that is sent has too
    few digits for the sum. An element that the adapters change has a delta other than 0, as peft
    computes it in float32; where peft computes no such delta (DoRA, biases, tuners other than
    LoRA), the element differs in float32.
    """

    elements: int = 0
    lost: int = 0

    @property
    def share(self) -> float:
        """The share of the elements that lost the adapter, from 0 to 1."""
        return self.lost / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """The GPUs between which bytes moved, without the memory of the host, by their UUIDs.

    `peer` says that they are two: the receiver read the memory of the trainer's GPU over NVLink or
    PCIe.
    """

    trainer: str
    receiver: str

    @property
    def peer(self) -> bool:
        """Whether these are two GPUs."""
        return self.trainer != self.receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverReport:
    """Report of one receiver on an update; the fields have the meaning of SyncReport's.

    `seconds` are the receiver's own: `load` until all bytes were in place, of which it waited for
    the sender's for `wait`; `settle` to check the update, and `swap` to put it into use.
    `source` is the receiver from which this one fetched the weights; empty: the sender sent them.
    `peers` has the bytes that it copied from each of several, which hold parts of them.
    `names_nothing`: a hook took the tensors, and returned no names of what it loaded; `verified`
    says then what it was given. `sources` has the bytes that it copied from each rank of the
    trainer, where these send without a gather. `whole`: of a receiver that loads boxes of tensors,
    those that it loads whole because their boxes are not known, with the reasons. `casts`: how many
    tensors it cast itself, as `{"float32 to bfloat16": 3}`. `gpus` has the GPUs of each rank of the
    trainer whose bytes went from GPU to GPU; see GpuPair.
    """

    target: str
    path: str
    apply: Apply
    verified: Verification
    stall_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_extra_nbytes: int = 0
    skipped_paths: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    names_nothing: bool = False
    sources: Mapping[int, int] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    casts: Mapping[str, int] = field(default_factory=dict)
    peers: Mapping[str, int] = field(default_factory=dict)
    gpus: Mapping[int, GpuPair] = field(default_factory=dict)

    @property
    def peer(self) -> bool:
        """Whether it read memory of another GPU than its own."""
        return any(pair.peer for pair in self.gpus.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Report of one update: bytes moved, time by phase, and verification.

    - `nbytes`: bytes of weights. `seconds`: one value per phase, and `total`.
    - `stall_s`: the longest time for which a receiver stopped generation.
    - `path`: `cuda_ipc`, `shared_memory`, `tcp`, `nixl` or `safetensors_file`, joined by `+` where
      receivers differ. `skipped_paths`: for each faster path, the reason why it was not taken.
    - `verified`: the weakest level of all receivers. `none`: nothing was compared. `arrived`: what
      came to the receiver has the fingerprint of what the sender read from its source; what the
      receiver made of it was not read. `held`: what the update wrote was read back from the memory
      that it was written to, and has the fingerprint of what the sender read from its source. Of a
      delta, what it wrote are the lines that changed: `compared` says it in words.
    - `apply`: `staged` or `in_place`.
    - `control_nbytes` and `control_messages`: what the control plane sent to all receivers.
    - `peak_extra_nbytes`: memory that the sender held beyond the model. `written_nbytes`: bytes
      written into buckets, counted once for any number of readers.
    - `not_finite`: names of tensors that hold NaN or infinity, unless `check_finite` is off.
    - `replicas_differ`: names of tensors that several ranks of the trainer hold and that differ
      between them, as `check_replicas` compares them.
    - `gathered`: where several ranks send, the tensors that they gathered, with the reasons; empty
      if each receiver read what it wants from the ranks that hold it.
    - `summed`: where several ranks send, the tensors of which the sum over all ranks was compared
      with that of what each receiver wrote, before the commit; this is done once for each plan.
    - `casts`: with `dtype="receiver"`, how many tensors of the source were cast before they were
      sent, as `{"float32 to bfloat16": 290}`. What receivers cast themselves is in `receivers`.
    - `connect_seconds`: time to connect by phase, if this update connected.
    - `rule`: `two-phase`, or `roll-forward` if a receiver failed that could not go back.
    - `dropped`: the targets that left the fleet, with the reasons.
    - `delta`: whether only changed lines were sent, and what that saved; None where it is off.
    - `merge`: how much of its adapters a merged model lost in rounding; None of other sources.
    """

    version: int
    label: str | None
    update_id: str
    tensors: int
    nbytes: int
    packed: bool
    path: str
    apply: Apply
    verified: Verification
    stall_s: float
    seconds: Mapping[str, float]
    control_nbytes: int
    control_messages: int
    peak_extra_nbytes: int
    written_nbytes: int = 0
    receivers: tuple[ReceiverReport, ...] = ()
    skipped_paths: Mapping[str, str] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    replicas_differ: tuple[str, ...] = ()
    gathered: Mapping[str, str] = field(default_factory=dict)
    summed: int = 0
    casts: Mapping[str, int] = field(default_factory=dict)
    connect_seconds: Mapping[str, float] = field(default_factory=dict)
    rule: Rule = "two-phase"
    dropped: Mapping[str, str] = field(default_factory=dict)
    delta: DeltaReport | None = None
    merge: MergeReport | None = None

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9 bytes) of weights per second, over the whole update."""
        return self.nbytes / self.seconds["total"] / 1e9 if self.seconds["total"] else 0.0

    @property
    def sources(self) -> dict[int, int]:
        """Bytes that the receivers read from each rank of the trainer; empty if they gathered."""
        found: dict[int, int] = {}
        for receiver in self.receivers:
            for rank, nbytes in receiver.sources.items():
                found[rank] = found.get(rank, 0) + nbytes
        return found

    @property
    def peer(self) -> bool:
        """Whether a receiver read memory of another GPU; `receivers[i].gpus` names both."""
        return any(receiver.peer for receiver in self.receivers)

    @property
    def compared(self) -> str:
        """Description of what this update compared: of `verified`, and of a delta also the rest.

        docs/concepts.md says what is not covered.
        """
        delta = self.delta
        if delta is None or not delta.sent:
            return COMPARED[self.verified]
        return (
            f"{COMPARED[self.verified]}; that are {delta.share:.2%} of the lines, which changed, "
            f"and a sample of {delta.sampled:.2%} of all lines was read besides"
        )

    def metrics(self, prefix: str = "sync/") -> dict[str, float]:
        """Return the figures for a logger: `version`, `seconds` in all, `gbps` and `stall_s`.

        `prefix` begins each name.
        """
        figures = {
            "version": self.version,
            "seconds": self.seconds["total"],
            "gbps": self.gbps,
            "stall_s": self.stall_s,
        }
        return {prefix + name: figure for name, figure in figures.items()}

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data, `gbps` and `peer` included."""
        return {**asdict(self), "gbps": self.gbps, "peer": self.peer}

    def to_json(self) -> str:
        """Return the report as one line of JSON; `weightsync plot` reads the lines of a run."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        return (
            f"version {self.version} in {self.seconds['total'] * 1e3:.1f} ms: "
            f"{self.nbytes / 1e6:.1f} MB in {self.tensors} tensors by {self.path} "
            f"{'between GPUs ' if self.peer else ''}"
            f"({'packed' if self.packed else 'unpacked'}, {self.apply}, verified: "
            f"{self.verified}), {self.gbps:.2f} GB/s, stall {self.stall_s * 1e3:.2f} ms"
            f"{self._exceptions}"
        )

    @property
    def _exceptions(self) -> str:
        silent = [one.target for one in self.receivers if one.names_nothing]
        unnamed = f"; the hook named no tensors that it loaded: {shorten(silent)}" if silent else ""
        rolled = "; rolled forward" if self.rule == "roll-forward" else ""
        dropped = "".join(f"; dropped {target}: {why}" for target, why in self.dropped.items())
        skipped = "".join(f"; skipped {path}: {why}" for path, why in self.skipped_paths.items())
        found = shorten(self.not_finite)
        not_finite = f"; NaN or infinity in {found}" if found else ""
        unlike = shorten(self.replicas_differ)
        differ = f"; ranks differ in {unlike}" if unlike else ""
        first = next(iter(self.gathered.items()), None)
        gathered = "" if first is None else f"; gathered {first[0]}: {first[1]}"
        more = f" and {len(self.gathered) - 1} more" if len(self.gathered) > 1 else ""
        return (
            self._delta
            + self._merge
            + gathered
            + more
            + rolled
            + dropped
            + skipped
            + not_finite
            + differ
            + unnamed
        )

    @property
    def _delta(self) -> str:
        if self.delta is None or not self.delta.sent:
            return ""
        return (
            f"; a delta of {self.delta.nbytes / 1e6:.1f} MB, verified in {self.delta.share:.2%} of "
            f"the lines and a sample of {self.delta.sampled:.2%}"
        )

    @property
    def _merge(self) -> str:
        if self.merge is None or not self.merge.lost:
            return ""
        return f"; {self.merge.share:.2%} of the merged elements lost the adapter in rounding"
