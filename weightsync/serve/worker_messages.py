"""What workers say to their engine core beside steps: that they are there, and that they swap."""

from __future__ import annotations

import msgspec

from weightsync.queues.message_queue import QueueHandle
from weightsync.serve.engine_messages import PauseMode
from weightsync.serve.steps import ModelCard

REPORT_CALL = "worker_report"
"""What API servers ask a worker beside the calls of the wire."""


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of what is told apart by its `kind`."""


# To the engine core.


class Hello(_Tagged, frozen=True, kw_only=True, tag="hello"):
    """A worker has loaded its model; its results come by `results`."""

    card: ModelCard
    results: QueueHandle
    version: int = 0


class Hold(_Tagged, frozen=True, kw_only=True, tag="hold"):
    """Begin no step until this worker's next Standing; `call` comes back when none is at work."""

    call: int


class WorkerState(_Tagged, frozen=True, kw_only=True, tag="standing"):
    """Which weights a worker holds now, and why they may not be used (empty: they may).

    `weights_id` tells weights of one version apart. `released` gives a Hold back.
    """

    version: int
    weights_id: str = ""
    state: str = "READY"
    why_not: str = ""
    released: bool = False


class ClearCacheCall(_Tagged, frozen=True, kw_only=True, tag="clear_cache"):
    """Drop what older weights left in caches; `call` comes back when it is done."""

    call: int


class PauseCall(_Tagged, frozen=True, kw_only=True, tag="pause"):
    """Hold generation until Resume; `call` comes back when what `mode` waits for is over."""

    call: int
    mode: PauseMode


class ResumeCall(_Tagged, frozen=True, kw_only=True, tag="resume"):
    """Go on."""

    call: int


Notice = Hello | Hold | WorkerState | ClearCacheCall | PauseCall | ResumeCall


# From the engine core.


class Welcome(_Tagged, frozen=True, kw_only=True, tag="welcome"):
    """Steps come by `steps`."""

    steps: QueueHandle


class Done(_Tagged, frozen=True, kw_only=True, tag="done"):
    """The answer to a call, or the problem document of what failed."""

    call: int
    problem: bytes | None = None


class PauseState(_Tagged, frozen=True, kw_only=True, tag="pause_state"):
    """Whether generation is paused now; said to all workers of the replica."""

    paused: bool


CoreWord = Welcome | Done | PauseState
