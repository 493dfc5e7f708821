"""Resumes a vLLM engine when the sender that paused it is gone; runs in the engine's process.

It also keeps an engine paused that wakes up without weights, after vLLM's sleep of level 2.

A killed trainer cannot resume the engine that it paused, and a process beside it may be killed with
it. An engine is paused and resumed in the process of vLLM's `EngineCore`, which loads our plugin.
The plugin reads every round of a sender, and checks through the workers whether the sender lives.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import Queue
from typing import Any, Protocol

import msgspec

from weightsync.errors import NotReadyError, ProtocolError
from weightsync.integrations.vllm import rpc as vllm_rpc
from weightsync.integrations.vllm.rpc import Round, WorkerAnswer

logger = logging.getLogger(__name__)

CHECK_S = 0.5
"""Seconds between two checks of the sender that paused the engine."""
LEASE_S = 5.0
"""How long a pause lasts without a round of its owner, while workers do not know that sender.

Also how long after a dead owner's last round its call to pause may arrive. A pause that a user
makes in this time looks the same, and is ended.
"""

Rpc = Callable[..., Any]


class Engine(Protocol):
    """The part of vLLM's EngineCore that is used, in its loop's thread except for `input_queue`."""

    scheduler: Any
    input_queue: Queue[Any]
    model_executor: Any
    vllm_config: Any

    def is_running(self) -> bool:
        """Whether the engine is not shutting down; called from another thread."""

    def is_scheduler_paused(self) -> bool:
        """Whether generation is paused."""

    def resume_scheduler(self) -> None:
        """Resume generation."""

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Reset the prefix cache. Returns False where blocks are in use."""

    def _send_error_outputs_to_client(self, req_ids: list[str], client_index: int) -> None:
        """Reply to requests with an error."""


class PauseGuard:
    """Tracks the sender that paused one engine, and resumes the engine when that sender is gone.

    `rpc` calls the workers. `utility` and `refused` are vLLM's constants for a method call in the
    engine's loop, and for a request that ended with an error. `note`, `forget_owner` and
    `check_owner` are called in that loop, between steps. A pause that precedes a sender's is a
    user's, and stays.
    """

    def __init__(self, engine: Engine, rpc: Rpc, *, utility: Any, refused: Any) -> None:
        self._engine = engine
        self._rpc = rpc
        self._utility = utility
        self._refused = refused
        self._owner = ""
        self._holds: dict[int, str] = {}
        self._heard = 0.0
        self._timer: threading.Timer | None = None
        self.awaits_weights = False
        """Whether the engine woke up without weights, and is paused until it has some."""

    def note(self, text: object, results: Sequence[dict[str, Any]]) -> None:
        """Read an answered round; set `paused` and `held` in its answers."""
        round_ = vllm_rpc.decode_round(text)
        paused = self._engine.is_scheduler_paused()
        ours = round_.owner == self._owner != ""
        for result in results:
            result["paused"] = paused
        if round_.holds:
            if paused and not ours and (not self._owner or not self._is_gone(time.monotonic())):
                return  # paused by a user, or by another live sender
            inherited, self._owner = bool(self._owner), round_.owner
            ours = ours or inherited
            self._holds = round_.holds
            if self._timer is None:
                self._look_later()
        elif round_.holds is not None and ours:
            self.forget_owner()
        for result in results:
            result["held"] = paused and ours
        if round_.owner == self._owner:
            self._heard = time.monotonic()

    def forget_owner(self) -> None:
        """Forget the owner: its pause is over, or will not come."""
        self._owner, self._holds = "", {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check_owner(self, asked: float) -> Future[None]:
        """Resume the engine if the sender that paused it is gone.

        `asked` is the time at which the check was queued: every call that came before is done,
        however long the engine was busy. Returns a future that is never done: vLLM replies to a
        call when its future is done, and no client waits for this one.
        """
        try:
            if self._owner and self._is_gone(asked):
                self._end_pause(asked)
        except Exception:
            logger.exception("cannot check whether the sender that paused this engine lives")
        if self._owner:
            self._look_later()
        return Future()

    def lacks_weights(self) -> bool:
        """Whether the workers have our engine, and no whole weights, as after a sleep of level 2.

        The engine then awaits them. Called before an engine resumes that wakes up.
        """
        transfer = getattr(self._engine.vllm_config, "weight_transfer_config", None)
        if getattr(transfer, "backend", None) != vllm_rpc.BACKEND:
            return False
        answers = self._run_round({})
        self.awaits_weights = not vllm_rpc.one_version(answers)
        if self.awaits_weights:
            logger.warning(
                "this engine is awake without weights (%s): requests wait for send_weights()",
                vllm_rpc.standing(answers),
            )
        return self.awaits_weights

    def resume_whole(self) -> None:
        """Resume the engine that awaits weights, where it has them now. Called after a round."""
        if not self.awaits_weights or self._engine.model_executor.is_sleeping:
            return
        if vllm_rpc.one_version(self._run_round({})):
            self._engine.resume_scheduler()

    def refuse_request(self) -> None:
        """Raise NotReadyError where the caller of a request would wait in vain for weights."""
        if self.awaits_weights and not hasattr(self._engine, "input_queue"):
            raise NotReadyError(
                "this vLLM is awake without weights, which its sleep of level 2 discarded: call "
                'send_weights(); or wake_up(tags=["scheduling"]), if other code has loaded some',
                state="TORN",
            )

    def _is_gone(self, asked: float) -> bool:
        """Whether the owner of the pause is gone; one that no worker knows yet has LEASE_S."""
        if not any(self._holds.values()):
            return asked - self._heard > LEASE_S
        return not all(answer.sender_lives for answer in self._run_round(self._holds))

    def _end_pause(self, asked: float) -> None:
        if self._engine.is_scheduler_paused():
            answers = self._run_round({})
            if not vllm_rpc.one_version(answers):
                self._refuse_requests(answers)
                return
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                return  # the cache may be of older weights: the next check tries again
            self._engine.resume_scheduler()
            logger.warning(
                "the sender that paused this engine is gone: generation continues with version "
                "%d of its weights",
                answers[0].version,
            )
        elif asked - self._heard < LEASE_S:
            return  # its call to pause may be on its way
        self.forget_owner()

    def _refuse_requests(self, answers: Iterable[WorkerAnswer]) -> None:
        """Fail the waiting requests: it is unknown whether another sender will connect."""
        by_client = defaultdict(list)
        for request in self._engine.scheduler.finish_requests(None, self._refused):
            by_client[request.client_index].append(request.request_id)
        for client, ids in by_client.items():
            self._engine._send_error_outputs_to_client(ids, client)
            logger.error(
                "%d requests are refused: the sender that paused this engine died in the middle of "
                "an update (%s); a full update repairs the weights: call send_weights() again",
                len(ids),
                vllm_rpc.standing(answers),
            )

    def _run_round(self, watched: dict[int, str]) -> list[WorkerAnswer]:
        round_ = Round(nonce=secrets.token_hex(8), watched=watched)
        text = vllm_rpc.encode_round(round_)
        results = self._rpc(self._engine, vllm_rpc.METHOD, None, (text,), None)
        return vllm_rpc.decode_answers(round_, results, peer="this engine")

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # An engine without a queue runs in the trainer's process, and ends with it.
        if hasattr(self._engine, "input_queue"):
            self._timer = threading.Timer(CHECK_S, self._call_check)
            self._timer.daemon = True
            self._timer.start()

    def _call_check(self) -> None:
        if self._engine.is_running():
            self._engine.input_queue.put_nowait(
                (self._utility, (0, -1, "weightsync_check_owner", (time.monotonic(),)))
            )


def install(core: Any, *, utility: Any, refused: Any) -> None:
    """Add a PauseGuard to every engine of the class `core`. Idempotent.

    `core` is vLLM's EngineCore, or a substitute in a test.
    """
    if hasattr(core, "weightsync_check_owner"):
        return
    rpc, resume = core.collective_rpc, core.resume_scheduler

    def guard(engine: Any) -> PauseGuard:
        if not hasattr(engine, "_weightsync_guard"):
            engine._weightsync_guard = PauseGuard(engine, rpc, utility=utility, refused=refused)
        found: PauseGuard = engine._weightsync_guard
        return found

    @functools.wraps(rpc)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = rpc(self, method, timeout, args, kwargs)
        if method == vllm_rpc.METHOD and isinstance(results, list) and len(args) == 1:
            try:
                guard(self).note(args[0], results)
                guard(self).resume_whole()
            except (ProtocolError, TypeError, msgspec.MsgspecError) as exc:
                logger.warning("cannot read a sender's round: %s", exc)
        return results

    @functools.wraps(resume)
    def resume_scheduler(self: Any) -> None:
        if getattr(self, "_weightsync_wakes", False) and guard(self).lacks_weights():
            return
        guard(self).awaits_weights = False
        was_paused = self.is_scheduler_paused()
        resume(self)
        if was_paused:
            guard(self).forget_owner()

    core.collective_rpc, core.resume_scheduler = collective_rpc, resume_scheduler
    _watch_wakes(core, guard)
    core.weightsync_check_owner = lambda engine, asked: guard(engine).check_owner(asked)


def _watch_wakes(core: Any, guard: Callable[[Any], PauseGuard]) -> None:
    """Have engines that wake up without weights await them; see `install`."""
    wake, add = core.wake_up, core.add_request

    @functools.wraps(wake)
    def wake_up(self: Any, tags: Sequence[str] | None = None, **options: Any) -> Any:
        """Wake the engine; "scheduling" alone resumes it whatever it holds, as its user says."""
        self._weightsync_wakes = tags is None or any(tag != "scheduling" for tag in tags)
        try:
            return wake(self, tags, **options)
        finally:
            self._weightsync_wakes = False

    @functools.wraps(add)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard(self).refuse_request()
        return add(self, *args, **kwargs)

    core.wake_up, core.add_request = wake_up, add_request
