"""A vLLM server as receivers, one per worker, and the calls to the server's own endpoints."""

from __future__ import annotations

import copy
import enum
import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from weightsync.errors import (
    BackendUnavailableError,
    ConnectError,
    ProtocolError,
    RemoteError,
    WeightSyncError,
)
from weightsync.integrations.engine_control import EngineControl, engine_url, reason_of
from weightsync.integrations.vllm import rpc as vllm_rpc
from weightsync.integrations.vllm.rpc import Call, Round, WorkerAnswer
from weightsync.transports.base import BaseTransport
from weightsync.update.sets import parts_of
from weightsync.wire import codec, problem
from weightsync.wire.messages import (
    CALL_OF,
    AbortRequest,
    FinishRequest,
    LabelRequest,
    PauseRequest,
    Reply,
    Request,
    ResetCacheRequest,
    ResumeRequest,
    StartRequest,
    Status,
    StatusRequest,
    UpdateRequest,
    WakeRequest,
)

SCHEME = "vllm+"
BACKEND = vllm_rpc.BACKEND
_START = (
    'start it with --weight-transfer-config \'{"backend":"weightsync"}\', in an environment in '
    "which weightsync is installed"
)
_DEV_MODE = (
    "its control endpoints exist where it was started with VLLM_SERVER_DEV_MODE=1 (on a private "
    "network: they are not protected)"
)


class VllmHttpControl(EngineControl):
    """A VllmControl of the server at `url`."""

    def is_kind(self, *, timeout_s: float) -> bool:
        return self.request("version", None, timeout_s).keys() == {"version"}

    def greet(self, *, timeout_s: float) -> None:
        """Check that the workers have our engine, before the first RPC to them.

        An RPC that raises in one of several workers breaks every later one. Raises
        BackendUnavailableError, which says how to start the server.
        """
        size = self.request("get_world_size", None, timeout_s)
        if not size or size.get("world_size") == 1:
            return  # a single worker without the method says so, and nothing is lost
        info = self.request("server_info?config_format=json", None, timeout_s)
        config = info.get("vllm_config")
        if not isinstance(config, dict):
            return
        transfer = config.get("weight_transfer_config")
        backend = (transfer or {}).get("backend")
        if backend != BACKEND:
            how = f"with weight transfer backend {backend!r}" if transfer else "without an engine"
            raise BackendUnavailableError(f"{self.target} was started {how}; {_START}")

    def rpc(self, text: str, *, timeout_s: float) -> object:
        body = {"method": vllm_rpc.METHOD, "args": [text]}
        return self.request("collective_rpc", body, timeout_s).get("results")

    def is_paused(self, *, timeout_s: float) -> bool:
        return bool(self.request("is_paused", None, timeout_s).get("is_paused"))

    def pause(self, mode: str, *, timeout_s: float) -> None:
        self.request(f"pause?mode={mode}", {}, timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self.request("resume", {}, timeout_s)

    def wake_up(self, tags: Sequence[str] | None, *, timeout_s: float) -> None:
        query = "&".join(f"tags={tag}" for tag in tags or ())
        self.request(f"wake_up?{query}", {}, timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        """Reset the prefix cache; running requests compute theirs again."""
        self.request("reset_prefix_cache?reset_running_requests=true", {}, timeout_s)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        self.request("update_weight_version", {"new_version": version}, timeout_s)

    def _error(self, call: str, status: int, answer: bytes) -> WeightSyncError:
        if status == 404:
            return BackendUnavailableError(f"{self.target} has no {call}: {_DEV_MODE}")
        if status == 200 and call == "reset_prefix_cache":  # with "success": false
            return cache_in_use(self.target)
        error = super()._error(call, status, answer)
        if vllm_rpc.lacks_engine(str(error)):
            return BackendUnavailableError(
                f"{self.target}: {call}: the workers of this vLLM have no engine of weightsync; "
                f"{_START} ({reason_of(answer)})"
            )
        if "Worker failed with error" in str(error):
            error.args = (
                f"{error}; if that is about another call, an earlier one raised in one of several "
                "workers, and vLLM's answers are late by one since then: restart the server",
            )
        return error


is_vllm = VllmHttpControl.serves


def cache_in_use(target: str) -> RemoteError:
    """Return the error of a server or engine whose prefix cache was not reset."""
    return RemoteError(
        f"{target}: reset_prefix_cache forgot nothing, since blocks of it are in use",
        remote_type="vLLM",
        remote_message="success: false",
    )


def plain_url(target: str) -> str | None:
    """Return the URL of a target `vllm+http://…`; None for another target."""
    return engine_url(target, SCHEME) if target.startswith(SCHEME) else None


logger = logging.getLogger(__name__)

_GATHER_S = 0.05
_GATHER_UPDATE_S = 10.0
"""The time that a round waits for the other workers' requests. Those of an update must not come
later: the workers read one ring together, and the server takes one call at a time. On a machine
whose processors are all taken they may come seconds apart."""
_MEND_S = 10.0
_NO_PARTS: Mapping[str, Mapping[int, Request]] = {}


class VllmControl(Protocol):
    """Calls to one vLLM server or engine. Each raises WeightSyncError.

    Called from any thread. `rpc` may take seconds, while another thread makes other calls.
    """

    @property
    def target(self) -> str:
        """The server's name in messages."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the bodies of requests sent so far."""

    @property
    def sent_messages(self) -> int:
        """Requests sent so far."""

    def rpc(self, text: str, *, timeout_s: float) -> object:
        """Call the RPC method of every worker with `text`; return the list of their answers."""

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is paused."""

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Pause generation."""

    def resume(self, *, timeout_s: float) -> None:
        """Resume generation."""

    def wake_up(self, tags: Sequence[str] | None, *, timeout_s: float) -> object:
        """Wake up what sleeps of these tags, None: all."""

    def reset_prefix_cache(self, *, timeout_s: float) -> object:
        """Reset the prefix cache. Raises RemoteError where blocks are in use."""

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Set the version of the server's weights."""

    def close(self) -> None:
        """Close the connections."""


class _Hold(enum.Enum):
    """The state of this sender's pause of the server."""

    NONE = "no pause is ours, and none is announced"
    UNSURE = "a pause may be ours: a call about it had no reply, or an earlier update made it"
    OURS = "generation is paused, and this sender resumes it"


class VllmServer:
    """Sends rounds to all workers of one server, and pauses it for updates."""

    below = ""
    """The path of the receivers below the server; empty for those of the model itself."""

    def __init__(
        self, control: VllmControl, *, timeout_s: float, whole: VllmServerTransport | None = None
    ) -> None:
        self.control = control
        self._whole = whole
        self._adapters: dict[str, VllmAdapter] = {}
        self._owner = secrets.token_hex(8)
        self._senders: dict[int, str] = {}
        self._answers = self._run_round({}, timeout_s=timeout_s)
        self.workers = len(self._answers)
        self._gathered = threading.Condition()
        self._gatherings: dict[type[Request], _Gathering] = {}
        self._began: str | None = None
        self._server = threading.RLock()
        self._hold = _Hold.NONE
        self._owes_reset = False
        self._open = self.workers

    def call(self, rank: int, request: Request, *, timeout_s: float) -> WorkerAnswer:
        """Send one worker's request in a round with those of the others; return its answer."""
        kind = type(request)
        if isinstance(request, UpdateRequest | StartRequest):
            self._began = request.update_id
        of_set = self._of_set(request)
        with self._gathered:
            gathering = self._gatherings.get(kind)
            if gathering is None or rank in gathering.requests:
                gathering = self._gatherings[kind] = _Gathering()
            requests = gathering.requests
            requests[rank] = request
            leads = len(requests) == 1
            self._gathered.notify_all()
            if leads:  # the other workers' requests nearly always come at the same time
                long = of_set or isinstance(request, UpdateRequest)
                wait_s = _GATHER_UPDATE_S if long else _GATHER_S
                self._gathered.wait_for(lambda: len(requests) == self.workers, wait_s)
                if self._gatherings.get(kind) is gathering:
                    del self._gatherings[kind]  # later requests are of another round
        if leads and of_set:
            _finish_together(of_set, self, gathering, timeout_s)
        elif leads:
            try:
                gathering.answers.set_result(self._run(gathering.by_rank, timeout_s))
            except BaseException as exc:  # noqa: BLE001  # raised below, in every thread
                gathering.answers.set_exception(exc)
        return self._answer(gathering, rank, 2 * (timeout_s + _GATHER_UPDATE_S))

    def _of_set(self, request: Request) -> str:
        """Return the id of the update where this finish comes with those of other parts; else "".

        A sender that goes on for a dead one did not begin the update, and finishes its part alone.
        So does one that repeats a finish which the workers have answered: they have decided.
        """
        if not isinstance(request, FinishRequest) or request.update_id is None:
            return ""
        of_set = parts_of(request.update_id) > 1 and request.update_id == self._began
        return request.update_id if of_set else ""

    @staticmethod
    def _answer(gathering: _Gathering, rank: int, timeout_s: float) -> WorkerAnswer:
        """Return one worker's answer in a round. Raises the round's error."""
        try:
            error = gathering.answers.exception(timeout_s)
        except TimeoutError as exc:
            raise ConnectError("another worker's call did not return") from exc
        if error is not None:
            # Several threads raise it, and each adds to its own.
            raise copy.copy(error) if isinstance(error, WeightSyncError) else error
        answer = gathering.answers.result().get(rank)
        if answer is None:
            raise RemoteError(
                f"this server has no worker {rank} any more: it was restarted with fewer",
                remote_type="vLLM",
                remote_message="",
            )
        return answer

    def whole(self) -> VllmServerTransport:
        """Return the transport to the server itself, the same in each call."""
        with self._gathered:
            if self._whole is None:
                self._whole = VllmServerTransport(self)
            return self._whole

    def adapter(self, path: str) -> VllmAdapter:
        """Return the receivers of an adapter in all workers, the same object in each call."""
        with self._gathered:
            if path not in self._adapters:
                self._adapters[path] = VllmAdapter(self.control, path, timeout_s=_MEND_S)
            return self._adapters[path]

    def again(self, *, timeout_s: float, whole: VllmServerTransport) -> VllmServer:
        """Return the same receivers with the workers that the server has now."""
        return VllmServer(self.control, timeout_s=timeout_s, whole=whole)

    def open_one(self) -> None:
        """Note that there is one more transport to a worker."""
        with self._gathered:
            self._open += 1

    def close_one(self) -> None:
        """Note that a worker's transport closed. After the last one, close the control."""
        with self._gathered:
            self._open -= 1
            last = self._open == 0 and self._whole is None  # `whole` closes it otherwise
        if last:
            self.control.close()

    def _run(self, requests: dict[int, Request], timeout_s: float) -> dict[int, WorkerAnswer]:
        first = next(iter(requests.values()))
        if isinstance(first, FinishRequest):
            return self._finish(requests, first, timeout_s)
        if isinstance(first, UpdateRequest | StartRequest | AbortRequest):
            return self._change(requests, first, timeout_s)
        if isinstance(first, PauseRequest):
            self.control.pause(first.mode, timeout_s=timeout_s)
        elif isinstance(first, ResumeRequest):
            self._reset_if_owed(timeout_s)
            self.control.resume(timeout_s=timeout_s)
            self._announce({}, timeout_s=timeout_s)
        elif isinstance(first, ResetCacheRequest):
            self._reset(timeout_s)
        elif isinstance(first, LabelRequest):
            self.control.set_version(first.new_version, timeout_s=timeout_s)
        elif isinstance(first, StatusRequest):
            return self._look(requests, timeout_s)
        elif isinstance(first, WakeRequest):
            # Workers say what the engine has woken: their own receivers wake nothing.
            self.control.wake_up(first.tags, timeout_s=timeout_s)
            return self._look(dict.fromkeys(requests, StatusRequest()), timeout_s)
        return self._send(requests, timeout_s)

    def _look(self, requests: dict[int, Request], timeout_s: float) -> dict[int, WorkerAnswer]:
        """Send a status request; not while a pause begins, which its answer would not show."""
        with self._server:
            answers = self._send(requests, timeout_s)
            if self._hold is not _Hold.NONE and not self._is_ours(timeout_s):
                # A user resumed it, or restarted the server.
                self._announce({}, timeout_s=timeout_s)
            return answers

    def _change(
        self, requests: dict[int, Request], first: Request, timeout_s: float
    ) -> dict[int, WorkerAnswer]:
        """Run a step that may write weights in place, with generation paused, or that aborts."""
        ends = isinstance(first, AbortRequest)
        if isinstance(first, StartRequest) or getattr(first, "start", None):
            self._doubt()  # a user may have ended an earlier update's pause
        for rank, request in requests.items():
            self._senders[rank] = _sender_of(request) or self._senders.get(rank, "")
        try:
            if not ends and any(answer.apply != "staged" for answer in self._answers):
                self._pause(requests, timeout_s)
            answers = self._send(requests, timeout_s)
        except BaseException:
            self._mend(timeout_s)
            raise
        if ends or self._failed(answers):
            self._resume_where_whole(timeout_s)
        return answers

    def finish_parts(
        self, parts: dict[str, dict[int, Request]], timeout_s: float
    ) -> dict[str, dict[int, WorkerAnswer]]:
        """Send the finishes of a set's parts, by their paths, in one round; return the answers.

        By the server of the model where that is one of the parts: generation is paused meanwhile.
        """
        own, others = parts.get("", {}), {path: each for path, each in parts.items() if path}
        if len(parts) == 1:
            return {self.below: self._run(own or others[self.below], timeout_s)}
        first = next(iter(own.values()), None)
        if isinstance(first, FinishRequest):
            answers = self._finish(own, first, timeout_s, others)
        else:
            answers = self._send({}, timeout_s, others)
        of_parts = {
            path: {rank: answer.parts[path] for rank, answer in answers.items()} for path in others
        }
        return {"": answers, **of_parts}

    def left_by_the_dead(self, update_id: str, timeout_s: float) -> list[int]:
        """Return the workers whose model is PREPARED in this update of a sender that is dead."""
        answers = self._look(dict.fromkeys(range(self.workers), StatusRequest()), timeout_s)
        found = []
        for rank, answer in answers.items():
            if answer.reply is None:
                continue
            status = codec.decode_reply(CALL_OF[StatusRequest], answer.reply.encode())
            if isinstance(status, Status) and status.update_id == update_id:
                found += [rank] if status.state == "PREPARED" and status.orphaned else []
        return found

    def _finish(
        self,
        requests: dict[int, Request],
        first: FinishRequest,
        timeout_s: float,
        parts: Mapping[str, Mapping[int, Request]] = _NO_PARTS,
    ) -> dict[int, WorkerAnswer]:
        try:
            self._pause(requests, timeout_s)
            # Even if the call fails: the workers may have put the new weights into use.
            self._owes_reset = self._owes_reset or first.clear_cache
            answers = self._send(requests, timeout_s, parts)
            if not self._failed(answers) and vllm_rpc.one_version(self._answers):
                self._reset_if_owed(timeout_s)
                version = first.weight_version or str(self._answers[0].version)
                self.control.set_version(version, timeout_s=timeout_s)
        except BaseException:
            self._mend(timeout_s)
            raise
        self._resume_where_whole(timeout_s)
        return answers

    def _announce(self, holds: dict[int, str], *, timeout_s: float) -> None:
        """Announce a pause to the engine's guard, which ends it when this sender dies.

        `holds` has the ids by which the workers know this sender. Empty: the pause is over, or will
        not come. The pause of a dead sender becomes ours.
        """
        with self._server:
            self._hold = _Hold.UNSURE
            self._answers = self._run_round({}, timeout_s=timeout_s, holds=holds)
            if not holds:
                self._hold = _Hold.NONE

    def _pause(self, requests: dict[int, Request], timeout_s: float) -> None:
        """Pause generation, unless it is paused already: by this sender, or by a user.

        The reply to the announcement says whether the engine was paused, because a user may pause
        and resume it at any time before.
        """
        with self._server:
            if self._hold is _Hold.OURS:
                return
            may_be_ours = self._hold is _Hold.UNSURE
            self._announce(dict.fromkeys(requests, "") | self._senders, timeout_s=timeout_s)
            if self._take(timeout_s, may_be_ours=may_be_ours):
                return
            if self._is_paused(timeout_s):
                self._announce({}, timeout_s=timeout_s)
                return
            self.control.pause("keep", timeout_s=timeout_s)
            self._hold = _Hold.OURS

    def _doubt(self) -> None:
        """Note that the engine has to confirm our pause before we rely on it."""
        with self._server:
            if self._hold is _Hold.OURS:
                self._hold = _Hold.UNSURE

    def _take(self, timeout_s: float, *, may_be_ours: bool = True) -> bool:
        """After a round: take over a pause that is ours to end; return whether there is one."""
        if not self._is_ours(timeout_s, may_be_ours=may_be_ours):
            return False
        self._hold = _Hold.OURS
        self._owes_reset = True  # a sender that is gone may have made it
        return True

    def _is_paused(self, timeout_s: float) -> bool:
        """Whether generation was paused before the last round, by the guard if there is one."""
        paused = self._answers[0].paused
        return self.control.is_paused(timeout_s=timeout_s) if paused is None else paused

    def _is_ours(self, timeout_s: float, *, may_be_ours: bool = True) -> bool:
        """Whether the pause is ours, or a dead sender's; without a guard: whether it may be."""
        if self._answers[0].paused is None:
            return may_be_ours and self._is_paused(timeout_s)
        return self._answers[0].held

    def _reset_if_owed(self, timeout_s: float) -> None:
        if self._owes_reset:
            self._reset(timeout_s)

    def _reset(self, timeout_s: float) -> None:
        """Reset the prefix cache. While that fails, generation is not resumed."""
        try:
            self.control.reset_prefix_cache(timeout_s=timeout_s)
        except WeightSyncError as exc:
            if self._owes_reset:
                exc.args = (f"{exc}; {self._stale(min(timeout_s, _MEND_S))}", *exc.args[1:])
            raise
        self._owes_reset = False

    def _stale(self, timeout_s: float) -> str:
        try:
            paused = self.control.is_paused(timeout_s=timeout_s)
        except WeightSyncError:
            paused = True
        stays = "it stays paused" if paused else "and it cannot be paused: have it generate nothing"
        return (
            f"{self.control.target} may hold new weights, and caches of the old ones; {stays} "
            "until send_weights() has gone through"
        )

    def _mend(self, timeout_s: float) -> None:
        """After a failed call: resume generation if all workers have one whole version."""
        try:
            self._doubt()
            self._resume_where_whole(min(timeout_s, _MEND_S))
        except WeightSyncError as exc:
            logger.warning("%s was not resumed: %s", self.control.target, exc)

    def _resume_where_whole(self, timeout_s: float) -> None:
        """Resume generation if all workers have the same whole version."""
        with self._server:
            if self._hold is _Hold.NONE:
                return
            if self._hold is _Hold.UNSURE:
                self._answers = self._run_round({}, timeout_s=timeout_s)
                self._take(timeout_s)
            if self._hold is _Hold.OURS:
                self._hold = _Hold.UNSURE  # if it stays paused, a user may resume it
                if not vllm_rpc.one_version(self._answers):
                    standing = vllm_rpc.standing(self._answers)
                    logger.warning("%s stays paused: %s", self.control.target, standing)
                    return
                self._reset_if_owed(timeout_s)
                self.control.resume(timeout_s=timeout_s)
            self._announce({}, timeout_s=timeout_s)

    @staticmethod
    def _failed(answers: dict[int, WorkerAnswer]) -> bool:
        return any(answer.problem is not None for answer in answers.values())

    def _send(
        self,
        requests: dict[int, Request],
        timeout_s: float,
        parts: Mapping[str, Mapping[int, Request]] = _NO_PARTS,
    ) -> dict[int, WorkerAnswer]:
        self._answers = self._run_round(requests, timeout_s=timeout_s, parts=parts)
        return {answer.rank: answer for answer in self._answers}

    def _run_round(
        self,
        requests: dict[int, Request],
        *,
        timeout_s: float,
        holds: dict[int, str] | None = None,
        parts: Mapping[str, Mapping[int, Request]] = _NO_PARTS,
    ) -> list[WorkerAnswer]:
        return self._exchange(
            Round(
                nonce=secrets.token_hex(8),
                calls=_calls(requests),
                owner=self._owner,
                holds=holds,
                below="" if parts else self.below,
                parts={path: _calls(of_part) for path, of_part in parts.items()},
            ),
            timeout_s,
        )

    def _exchange(self, sent: Round, timeout_s: float) -> list[WorkerAnswer]:
        results = self.control.rpc(vllm_rpc.encode_round(sent), timeout_s=timeout_s)
        return vllm_rpc.decode_answers(sent, results, peer=self.control.target)


class VllmAdapter(VllmServer):
    """Sends rounds to the receivers of one adapter in all workers, which need no pause."""

    def __init__(
        self,
        control: VllmControl,
        path: str,
        *,
        timeout_s: float,
        whole: VllmServerTransport | None = None,
    ) -> None:
        self.below = path
        super().__init__(control, timeout_s=timeout_s, whole=whole)

    def again(self, *, timeout_s: float, whole: VllmServerTransport) -> VllmServer:
        """Return the same receivers with the workers that the server has now."""
        return VllmAdapter(self.control, self.below, timeout_s=timeout_s, whole=whole)

    def unload(self, timeout_s: float) -> None:
        """Have all workers forget the adapter."""
        sent = Round(nonce=secrets.token_hex(8), below=self.below, unload=True)
        self._exchange(sent, timeout_s)

    def _run(self, requests: dict[int, Request], timeout_s: float) -> dict[int, WorkerAnswer]:
        first = next(iter(requests.values()))
        update_id = first.update_id if isinstance(first, FinishRequest) else None
        if update_id is None or parts_of(update_id) == 1:
            return self._send(requests, timeout_s)
        # Of a dead sender's set: the base model waits with its adapter, for one who finishes both.
        base = VllmServer(self.control, timeout_s=timeout_s)
        left = base.left_by_the_dead(update_id, timeout_s)
        if not left:
            return self._send(requests, timeout_s)
        finishes: dict[int, Request] = {rank: FinishRequest(update_id=update_id) for rank in left}
        return base.finish_parts({"": finishes, self.below: requests}, timeout_s)[self.below]


class _Gathering:
    """Requests of one type to several workers, by rank, and the future of their one round."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.answers: Future[dict[int, WorkerAnswer]] = Future()

    @property
    def by_rank(self) -> dict[int, Request]:
        """The requests, in the order of the ranks."""
        return dict(sorted(self.requests.items()))


def _calls(requests: Mapping[int, Request]) -> dict[int, Call]:
    return {
        rank: Call(call=CALL_OF[type(request)], body=codec.encode(request).decode())
        for rank, request in requests.items()
    }


_Meeting = dict[str, tuple[VllmServer, _Gathering]]
_meetings: dict[tuple[str, str], _Meeting] = {}
"""The parts of sets that wait for others, by the server's name and the update's id: in this process
are the senders of all parts of a set."""
_met = threading.Condition()


def _finish_together(
    update_id: str, server: VllmServer, gathering: _Gathering, timeout_s: float
) -> None:
    """Send the finishes of a set's parts to one server in one round, and set what comes of them.

    A worker handles one round at a time, and would wait in the first for the others. The thread of
    the part that comes last sends them. Where one does not come, the others are sent by themselves:
    the workers answer what became of the set, and commit no part alone.
    """
    key = server.control.target, update_id
    with _met:
        meeting = _meetings.setdefault(key, {})
        meeting[server.below] = server, gathering
        if len(meeting) == parts_of(update_id):
            del _meetings[key]
            _met.notify_all()
        elif _met.wait_for(lambda: _meetings.get(key) is not meeting, _GATHER_UPDATE_S):
            return  # another thread sends this part, too
        else:
            del meeting[server.below]
            if not meeting:
                del _meetings[key]
            meeting = {server.below: (server, gathering)}
    leader, _ = meeting.get("", (server, gathering))
    try:
        requests = {path: of_part.by_rank for path, (_, of_part) in meeting.items()}
        answers = leader.finish_parts(requests, timeout_s)
        for path, (each, of_part) in meeting.items():
            each._began = None
            of_part.answers.set_result(answers[path])
    except BaseException as exc:  # noqa: BLE001  # raised in every thread that waits for an answer
        for _, of_part in meeting.values():
            if not of_part.answers.done():
                of_part.answers.set_exception(exc)


class VllmWorkerTransport(BaseTransport):
    """A Transport to one worker of a vLLM server. `whole` counts the requests to the server.

    `weight_checker` names vLLM's own parameters, each worker its shards.
    """

    def __init__(self, server: VllmServer, rank: int) -> None:
        name = server.control.target + (f"/{server.below}" if server.below else "")
        super().__init__(name if server.workers == 1 else f"{name}#worker-{rank}")
        self._server = server
        self._rank = rank

    @property
    def round(self) -> object:
        """The same object for all workers of the server; see Transport."""
        return self._server

    @property
    def whole(self) -> VllmServerTransport:
        """The transport to the server itself, one for all workers. Its user closes it."""
        return self._server.whole()

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""
        self._check_open()
        answer = self._server.call(self._rank, request, timeout_s=timeout_s)
        if answer.problem is not None:
            raise problem.from_problem(
                msgspec.json.decode(answer.problem, type=problem.Problem), peer=self._target
            )
        if answer.reply is None:
            raise ProtocolError(f"{self._target}: its worker got a request and returned no reply")
        return codec.decode_reply(CALL_OF[type(request)], answer.reply.encode())

    def below(self, path: str) -> VllmWorkerTransport:
        """Return the transport to this worker's receiver of an adapter, in place of this one."""
        server = self._server.adapter(path)
        super().close()  # the connections go on
        return VllmWorkerTransport(server, self._rank)

    def twin(self) -> VllmWorkerTransport:
        """Return another transport to this worker, over the same connections; see BaseTransport."""
        self._server.open_one()
        return VllmWorkerTransport(self._server, self._rank)

    def unload(self, timeout_s: float) -> None:
        """Have the server forget the adapter whose receiver this is; see BaseTransport."""
        if not isinstance(self._server, VllmAdapter):
            super().unload(timeout_s)
            return
        self._server.unload(timeout_s)

    def close(self) -> None:
        """Refuse further calls; with the server's last worker, close its connections."""
        if not self._closed:
            super().close()
            self._server.close_one()


class VllmServerTransport(BaseTransport):
    """A Transport to a vLLM server itself; its status lists the server's present workers."""

    def __init__(self, server: VllmServer) -> None:
        super().__init__(server.control.target)
        self._control = server.control
        self._again = server.again
        self.paths = worker_paths(server.workers)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all requests to the server."""
        return self._control.sent_nbytes

    @property
    def sent_messages(self) -> int:
        """All requests to the server."""
        return self._control.sent_messages

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Return the status of the first worker. Raises ProtocolError for other requests."""
        if not isinstance(request, StatusRequest):
            raise ProtocolError(f"{self._target}: only its workers handle this request")
        server = self._again(timeout_s=timeout_s, whole=self)
        status = VllmWorkerTransport(server, 0).call(request, timeout_s=timeout_s)
        return msgspec.structs.replace(status, workers=list(worker_paths(server.workers)))

    def expand(self, paths: Sequence[str]) -> list[VllmWorkerTransport]:
        """Return a transport to every worker; see Transport."""
        server = self._again(timeout_s=_MEND_S, whole=self)
        if worker_paths(server.workers) != tuple(paths):
            raise ConnectError(f"{self._target} was restarted meanwhile; connect again")
        return [VllmWorkerTransport(server, rank) for rank in range(server.workers)]

    def close(self) -> None:
        """Close the connections to the server."""
        self._control.close()


def worker_paths(workers: int) -> tuple[str, ...]:
    """Return the paths of a server's workers."""
    return tuple(f"worker-{rank}" for rank in range(workers))


def worker_transports(control: VllmControl, *, timeout_s: float) -> list[VllmWorkerTransport]:
    """Return a transport to every worker of a server. Raises as the first round does."""
    server = VllmServer(control, timeout_s=timeout_s)
    return [VllmWorkerTransport(server, rank) for rank in range(server.workers)]


def _sender_of(request: Request) -> str:
    """Return the sender's id in a request, empty where it has none."""
    source = request.update_info if isinstance(request, UpdateRequest) else request
    return getattr(source, "sender", None) or ""
