"""A sender's pause of a vLLM engine ends with the sender: watched in the engine's own process.

A trainer that is killed cannot resume the engine that it has paused, and a process beside it may be
killed with it. The process of vLLM's `EngineCore` is where an engine is paused and resumed, and it
loads our plugin: it hears every round of a sender, and asks the workers whether the sender lives.
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

from weightsync.errors import ProtocolError
from weightsync.integrations.vllm import rpc as vllm_door
from weightsync.integrations.vllm.rpc import Round, WorkerAnswer

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often the workers are asked whether the sender that paused the engine lives."""
LEASE_S = 5.0
"""How long a pause without a word of its owner lasts, where workers do not know that sender yet."""

Rpc = Callable[..., Any]


class Engine(Protocol):
    """What is used of vLLM's EngineCore; all of it in the thread of its loop, but `input_queue`."""

    scheduler: Any
    input_queue: Queue[Any]

    def is_running(self) -> bool:
        """Whether it is not being shut down; asked from another thread."""

    def is_scheduler_paused(self) -> bool:
        """Whether generation is held."""

    def resume_scheduler(self) -> None:
        """Let it go on."""

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Forget what was computed with other weights. False when it has not."""

    def _send_error_outputs_to_client(self, req_ids: list[str], client_index: int) -> None:
        """Answer requests with an error."""


class PauseGuard:
    """Knows which sender has paused one engine, and resumes the engine when that sender is gone.

    `rpc` asks the workers; `utility` and `refused` are vLLM's words for a call of a method in the
    loop, and for a request that ended with an error. `note`, `let_go` and `look` are called in the
    engine's loop, between its steps. A pause that was there before a sender's is a user's, and
    is kept.
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

    def note(self, text: object, results: Sequence[dict[str, Any]]) -> None:
        """A round was answered. Add to the answers whether it found a pause, and a sender's."""
        told = vllm_door.decode_round(text)
        paused = self._engine.is_scheduler_paused()
        ours = told.owner == self._owner != ""
        for result in results:
            result["paused"] = paused
        if told.holds:
            if paused and not ours and (not self._owner or not self._is_gone()):
                return  # by a user, or by another sender that lives
            inherited, self._owner = bool(self._owner), told.owner
            ours = ours or inherited
            self._holds = told.holds
            if self._timer is None:
                self._look_later()
        elif told.holds is not None and ours:
            self.let_go()
        for result in results:
            result["held"] = paused and ours
        if told.owner == self._owner:
            self._heard = time.monotonic()

    def let_go(self) -> None:
        """A pause is over, or will not come: the next without an announcement is a user's."""
        self._owner, self._holds = "", {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> Future[None]:
        """Resume the engine if the sender that paused it is gone.

        The result is never done, since nobody waits for it: vLLM answers a call when it is.
        """
        try:
            if self._owner and self._is_gone():
                self._end_pause()
        except Exception:
            logger.exception("whether the sender of a pause lives could not be found out")
        if self._owner:
            self._look_later()
        return Future()

    def _is_gone(self) -> bool:
        """Whether the owner of the pause is gone; one that workers do not know yet has a lease."""
        if not any(self._holds.values()):
            return time.monotonic() - self._heard > LEASE_S
        return not all(answer.sender_lives for answer in self._ask(self._holds))

    def _end_pause(self) -> None:
        if self._engine.is_scheduler_paused():
            answers = self._ask({})
            if not vllm_door.one_version(answers):
                self._refuse_requests(answers)
                return
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                return  # it may have new weights, and caches of old ones: the next look tries again
            self._engine.resume_scheduler()
            logger.warning(
                "the sender that had paused this engine is gone: generation goes on with version "
                "%d of its weights",
                answers[0].version,
            )
        self.let_go()

    def _refuse_requests(self, answers: Iterable[WorkerAnswer]) -> None:
        """Fail the requests that wait: nobody knows whether another sender will come."""
        by_client = defaultdict(list)
        for request in self._engine.scheduler.finish_requests(None, self._refused):
            by_client[request.client_index].append(request.request_id)
        for client, ids in by_client.items():
            self._engine._send_error_outputs_to_client(ids, client)
            logger.error(
                "%d requests are refused: the sender that had paused this engine died in the "
                "middle of an update (%s); a full update heals it: call send_weights() again",
                len(ids),
                vllm_door.standing(answers),
            )

    def _ask(self, watched: dict[int, str]) -> list[WorkerAnswer]:
        told = Round(nonce=secrets.token_hex(8), watched=watched)
        text = vllm_door.encode_round(told)
        results = self._rpc(self._engine, vllm_door.METHOD, None, (text,), None)
        return vllm_door.decode_answers(told, results, peer="this engine")

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # An engine without a queue is called by its own process, which is the trainer's.
        if hasattr(self._engine, "input_queue"):
            self._timer = threading.Timer(LOOK_S, self._call_look)
            self._timer.daemon = True
            self._timer.start()

    def _call_look(self) -> None:
        if self._engine.is_running():
            self._engine.input_queue.put_nowait((self._utility, (0, -1, "weightsync_look", ())))


def install(core: Any, *, utility: Any, refused: Any) -> None:
    """Have every engine of the class `core` end the pauses of senders that are gone.

    May be repeated. `core` is vLLM's EngineCore, or one that stands in for it in a test.
    """
    if hasattr(core, "weightsync_look"):
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
        if method == vllm_door.METHOD and isinstance(results, list) and len(args) == 1:
            try:
                guard(self).note(args[0], results)
            except (ProtocolError, TypeError, msgspec.MsgspecError) as exc:
                logger.warning("a round of a sender could not be read: %s", exc)
        return results

    @functools.wraps(resume)
    def resume_scheduler(self: Any) -> None:
        was_paused = self.is_scheduler_paused()
        resume(self)
        if was_paused:
            guard(self).let_go()

    core.collective_rpc, core.resume_scheduler = collective_rpc, resume_scheduler
    core.weightsync_look = lambda engine: guard(engine).look()
