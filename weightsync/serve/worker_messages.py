"""Messages between workers and their engine core, except steps and their results."""

from __future__ import annotations

import msgspec

from weightsync.queues.message_queue import QueueHandle
from weightsync.serve.engine_messages import PauseMode
from weightsync.serve.steps import ModelCard

REPORT_CALL = "worker_report"
"""The call for a worker's report, in addition to the calls of weightsync.wire."""


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the messages that are distinguished by their field `kind`."""


# To the engine core.


class Hello(_Tagged, frozen=True, kw_only=True, tag="hello"):
    """A worker has loaded its model. It sends its results through the queue `results`."""

    card: ModelCard
    results: QueueHandle
    version: int = 0


class Hold(_Tagged, frozen=True, kw_only=True, tag="hold"):
    """Start no step until this worker releases. Done(call) follows when no step is in progress."""

    call: int


class WorkerState(_Tagged, frozen=True, kw_only=True, tag="worker_state"):
    """The weights of a worker, and the reason why they may not be used ("": they may).

    `weights_id` distinguishes weights of the same version. `released` ends a Hold.
    """

    version: int
    weights_id: str = ""
    state: str = "READY"
    why_not: str = ""
    released: bool = False


class ClearCacheCall(_Tagged, frozen=True, kw_only=True, tag="clear_cache"):
    """Drop the prompts that older weights have read. Done(call) follows."""

    call: int


class PauseCall(_Tagged, frozen=True, kw_only=True, tag="pause"):
    """Pause generation. Done(call) follows when the pause is in effect, which depends on `mode`."""

    call: int
    mode: PauseMode


class ResumeCall(_Tagged, frozen=True, kw_only=True, tag="resume"):
    """Resume generation. Done(call) follows."""

    call: int


Notice = Hello | Hold | WorkerState | ClearCacheCall | PauseCall | ResumeCall


# From the engine core.


class Welcome(_Tagged, frozen=True, kw_only=True, tag="welcome"):
    """The reply to Hello. The worker reads its steps from the queue `steps`."""

    steps: QueueHandle


class Done(_Tagged, frozen=True, kw_only=True, tag="done"):
    """The reply to a call, with the problem document of its error if it failed."""

    call: int
    problem: bytes | None = None


class PauseState(_Tagged, frozen=True, kw_only=True, tag="pause_state"):
    """Whether generation is paused; sent to all workers of the replica."""

    paused: bool


CoreMessage = Welcome | Done | PauseState
