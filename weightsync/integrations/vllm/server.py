"""A vLLM server as receivers: one for each of its workers, and the server's own endpoints."""

from __future__ import annotations

import copy
import enum
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransportError,
    WeightSyncError,
)
from weightsync.integrations.vllm import rpc as vllm_door
from weightsync.integrations.vllm.rpc import Call, Round, WorkerAnswer
from weightsync.transports.base import BaseTransport
from weightsync.transports.http import HttpTransport, json_object
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
    StatusRequest,
    UpdateRequest,
)

SCHEME = "vllm+"
BACKEND = "weightsync"
_START = (
    'start it with --weight-transfer-config \'{"backend":"weightsync"}\', in an environment in '
    "which weightsync is installed"
)
_DEV_MODE = (
    "its control endpoints exist where it was started with VLLM_SERVER_DEV_MODE=1 (on a private "
    "network: they are not protected)"
)


class VllmHttpControl(HttpTransport):
    """The verbs of the vLLM server at `url`; see VllmControl."""

    @property
    def sent(self) -> tuple[int, int]:
        """Requests sent so far, and their bytes."""
        return self.sent_messages, self.sent_nbytes

    def greet(self, *, timeout_s: float) -> None:
        """Look before the workers' door is knocked at whether there is one.

        Where there is none a server of several workers would be out of step for good. Raises
        BackendUnavailableError saying how to start it.
        """
        size = self._ask("get_world_size", None, timeout_s)
        if not size or size.get("world_size") == 1:
            return  # a single worker without the method says so, and nothing is lost
        config = self._ask("server_info?config_format=json", None, timeout_s).get("vllm_config")
        if not isinstance(config, dict):
            return
        said = config.get("weight_transfer_config")
        backend = (said or {}).get("backend")
        if backend != BACKEND:
            how = f"with weight transfer backend {backend!r}" if said else "without an engine"
            raise BackendUnavailableError(f"{self.target} was started {how}; {_START}")

    def rpc(self, text: str, *, timeout_s: float) -> object:
        """Call every worker's door."""
        body = {"method": vllm_door.METHOD, "args": [text]}
        return self._ask("collective_rpc", _encode(body), timeout_s).get("results")

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is held."""
        return bool(self._ask("is_paused", None, timeout_s).get("is_paused"))

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Hold generation."""
        self._ask(f"pause?mode={mode}", b"", timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        """Let it go on."""
        self._ask("resume", b"", timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        """Forget what was computed with other weights; requests that wait compute it again."""
        told = self._ask("reset_prefix_cache?reset_running_requests=true", b"", timeout_s)
        if told.get("success") is False:
            raise RemoteError(
                f"{self.target}: reset_prefix_cache forgot nothing, since blocks of it are in use",
                remote_type="HTTP 200",
                remote_message="success: false",
            )

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Tell the server what its weights are called."""
        self._ask("update_weight_version", _encode({"new_version": version}), timeout_s)

    def _ask(self, call: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        """Return the object that the server answers; `body` None makes it a GET."""
        status, answer = self._exchange(call, body, timeout_s)
        if status == 200:
            return json_object(answer)
        verb = call.partition("?")[0]
        if status in (401, 403):
            raise AuthError(f"{self.target} refused {verb} with {status}", status=status)
        if status == 404:
            raise BackendUnavailableError(f"{self.target} has no {verb}: {_DEV_MODE}")
        raise _answered(f"{self.target}: {verb}", status, answer)


def is_vllm(
    url: str, token: str | None, *, verify_tls: bool | str = True, timeout_s: float = 5.0
) -> bool:
    """Ask the server at `url` whether it is vLLM's; one that does not answer is not.

    What is asked is answered by its HTTP process alone, however busy the workers are.
    """
    probe = HttpTransport(url, token, verify_tls=verify_tls)
    try:
        status, answer = probe.get("version", timeout_s=timeout_s)
        return status == 200 and set(json_object(answer)) == {"version"}
    except (TransportError, ProtocolError):
        return False
    finally:
        probe.close()


def plain_url(target: str) -> str | None:
    """Return the URL of a target that says it is vLLM's, else None."""
    if not target.startswith(SCHEME):
        return None
    url = target.removeprefix(SCHEME)
    if urlsplit(url).scheme not in ("http", "https"):
        # What it says instead is not repeated: it may hold a password.
        raise ConfigError("a target of vllm+ is no HTTP URL; give vllm+http://host:port")
    return url


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _answered(what: str, status: int, answer: bytes) -> WeightSyncError:
    text = problem.foreign_reason(answer) or answer[:300].decode("utf-8", "replace")
    if vllm_door.has_no_door(text):
        return BackendUnavailableError(
            f"{what}: the workers of this vLLM have no engine of weightsync; {_START} ({text})"
        )
    hint = ""
    if "Worker failed with error" in text:
        hint = (
            "; if that is about another call, an earlier one raised in one of several workers, and "
            "vLLM's answers are late by one since then: restart the server"
        )
    return RemoteError(
        f"{what} answered {status}: {text}{hint}", remote_type=f"HTTP {status}", remote_message=text
    )


logger = logging.getLogger(__name__)

_GATHER_S = 0.05
_GATHER_UPDATE_S = 2.0
"""How long a round waits for the other workers' requests. Those of an update must not come later:
workers read one ring in step, and the server takes one call at a time."""
_MEND_S = 10.0


class VllmControl(Protocol):
    """The verbs of one vLLM server, whatever carries them. Each raises a WeightSyncError.

    Called from any thread; `rpc` for seconds, in one thread, while others are called in another.
    """

    @property
    def target(self) -> str:
        """How messages name the server."""

    @property
    def sent(self) -> tuple[int, int]:
        """Requests sent so far, and their bytes."""

    def rpc(self, text: str, *, timeout_s: float) -> object:
        """Have every worker answer `text` at its door; return the list of their answers."""

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is held."""

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Hold generation."""

    def resume(self, *, timeout_s: float) -> None:
        """Let it go on."""

    def reset_prefix_cache(self, *, timeout_s: float) -> object:
        """Forget what was computed with other weights. Raises when it has not."""

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Tell the server what its weights are called."""

    def close(self) -> None:
        """Let connections go."""


class _Hold(enum.Enum):
    """What is known of a sender's pause of the server."""

    NONE = "no pause is ours, and the engine expects none of ours"
    UNSURE = "one may be ours: a call about it had no answer yet, or it is of an earlier update"
    OURS = "generation is held, and ours to resume"


class VllmServer:
    """Sends rounds to all workers of one server, and pauses and resumes it around updates."""

    def __init__(self, control: VllmControl, *, timeout_s: float) -> None:
        self.control = control
        self.has_whole = False
        self._whole: VllmServerTransport | None = None
        self._owner = secrets.token_hex(8)
        self._senders: dict[int, str] = {}
        self._answers = self._ask({}, timeout_s=timeout_s)
        self.workers = len(self._answers)
        self._turn = threading.Lock()
        self._rounds: dict[type[Request], _Gathering] = {}
        self._server = threading.RLock()
        self._hold = _Hold.NONE
        self._owes_reset = False
        self._open = self.workers

    def call(self, rank: int, request: Request, *, timeout_s: float) -> WorkerAnswer:
        """Send one worker's request in a round with those of the others; return its answer."""
        with self._turn:
            gathering = self._rounds.get(type(request))
            leads = gathering is None or not gathering.join(rank, request)
            if leads:
                gathering = _Gathering(rank, request, self.workers)
                self._rounds[type(request)] = gathering
        assert gathering is not None
        if leads:
            gathering.wait_for_others()
            with self._turn:
                gathering.close()
                if self._rounds.get(type(request)) is gathering:
                    del self._rounds[type(request)]
            gathering.settle(lambda requests: self._run(requests, timeout_s))
        return gathering.result(rank, timeout_s + _GATHER_UPDATE_S)

    def whole(self) -> VllmServerTransport:
        """Return the transport to the server itself, the same each time."""
        with self._turn:
            if self._whole is None:
                self._whole, self.has_whole = VllmServerTransport(self), True
            return self._whole

    def close_one(self) -> None:
        """A worker's transport is closed; with the last one the control is, but for `whole`."""
        with self._turn:
            self._open -= 1
            last = self._open == 0 and not self.has_whole
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
        return self._tell(requests, timeout_s)

    def _look(self, requests: dict[int, Request], timeout_s: float) -> dict[int, WorkerAnswer]:
        """Ask for the status; not while a pause is on its way, which the answer would not know."""
        with self._server:
            answers = self._tell(requests, timeout_s)
            if self._hold is not _Hold.NONE and not self._is_ours(timeout_s):
                self._announce({}, timeout_s=timeout_s)  # resumed by hand, or started again
            return answers

    def _change(
        self, requests: dict[int, Request], first: Request, timeout_s: float
    ) -> dict[int, WorkerAnswer]:
        """A step that may touch weights in place, or ends an update: no generation in between."""
        ends = isinstance(first, AbortRequest)
        if isinstance(first, StartRequest) or getattr(first, "start", None):
            self._doubt()  # an earlier update's pause may be ended by hand by now
        for rank, request in requests.items():
            self._senders[rank] = _sender_of(request) or self._senders.get(rank, "")
        try:
            if not ends and any(answer.apply != "staged" for answer in self._answers):
                self._pause(requests, timeout_s)
            answers = self._tell(requests, timeout_s)
        except BaseException:
            self._mend(timeout_s)
            raise
        if ends or self._failed(answers):
            self._resume_where_whole(timeout_s)
        return answers

    def _finish(
        self, requests: dict[int, Request], first: FinishRequest, timeout_s: float
    ) -> dict[int, WorkerAnswer]:
        try:
            self._pause(requests, timeout_s)
            # Whatever is heard of it: the workers may have put new weights to use.
            self._owes_reset = self._owes_reset or first.clear_cache
            answers = self._tell(requests, timeout_s)
            if not self._failed(answers) and vllm_door.one_version(self._answers):
                self._reset_if_owed(timeout_s)
                version = first.weight_version or str(self._answers[0].version)
                self.control.set_version(version, timeout_s=timeout_s)
        except BaseException:
            self._mend(timeout_s)
            raise
        self._resume_where_whole(timeout_s)
        return answers

    def _announce(self, holds: dict[int, str], *, timeout_s: float) -> None:
        """Say, right before a pause, whose it will be: it ends with that sender, if not before.

        `holds` has the ids by which workers know us. Empty: it is over, or will not come. What a
        dead sender has paused becomes ours.
        """
        with self._server:
            self._hold = _Hold.UNSURE
            self._answers = self._ask({}, timeout_s=timeout_s, holds=holds)
            if not holds:
                self._hold = _Hold.NONE

    def _pause(self, requests: dict[int, Request], timeout_s: float) -> None:
        """Hold generation, unless it is held: by us from before, or by somebody else for good.

        The engine says of the announcement whether it was paused, since a user may pause it, and
        resume it, at any time before.
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
        """Ask the engine before a pause is taken for ours again."""
        with self._server:
            if self._hold is _Hold.OURS:
                self._hold = _Hold.UNSURE

    def _take(self, timeout_s: float, *, may_be_ours: bool = True) -> bool:
        """After a round: whether a pause was found that is ours to end from now on."""
        if not self._is_ours(timeout_s, may_be_ours=may_be_ours):
            return False
        self._hold = _Hold.OURS
        self._owes_reset = True  # by a sender that is gone, for all that is known
        return True

    def _is_paused(self, timeout_s: float) -> bool:
        """Whether generation was held before the last round; asked where no guard has said it."""
        said = self._answers[0].paused
        return self.control.is_paused(timeout_s=timeout_s) if said is None else said

    def _is_ours(self, timeout_s: float, *, may_be_ours: bool = True) -> bool:
        """Whether it was held by us, or by a dead sender; where no guard says so, it may be."""
        if self._answers[0].paused is None:
            return may_be_ours and self._is_paused(timeout_s)
        return self._answers[0].held

    def _reset_if_owed(self, timeout_s: float) -> None:
        if self._owes_reset:
            self._reset(timeout_s)

    def _reset(self, timeout_s: float) -> None:
        """Have the caches of other weights forgotten; until that is done nothing is resumed."""
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
        """After a call without an answer: ask how the workers stand, and resume if well."""
        try:
            self._doubt()
            self._resume_where_whole(min(timeout_s, _MEND_S))
        except WeightSyncError as exc:
            logger.warning("%s was not resumed: %s", self.control.target, exc)

    def _resume_where_whole(self, timeout_s: float) -> None:
        """Let generation go on, where every worker may compute with the version of all others."""
        with self._server:
            if self._hold is _Hold.NONE:
                return
            if self._hold is _Hold.UNSURE:
                self._answers = self._ask({}, timeout_s=timeout_s)
                self._take(timeout_s)
            if self._hold is _Hold.OURS:
                self._hold = _Hold.UNSURE  # where it stays paused, it may be resumed by hand
                if not vllm_door.one_version(self._answers):
                    standing = vllm_door.standing(self._answers)
                    logger.warning("%s stays paused: %s", self.control.target, standing)
                    return
                self._reset_if_owed(timeout_s)
                self.control.resume(timeout_s=timeout_s)
            self._announce({}, timeout_s=timeout_s)

    @staticmethod
    def _failed(answers: dict[int, WorkerAnswer]) -> bool:
        return any(answer.problem is not None for answer in answers.values())

    def _tell(self, requests: dict[int, Request], timeout_s: float) -> dict[int, WorkerAnswer]:
        self._answers = self._ask(requests, timeout_s=timeout_s)
        return {answer.rank: answer for answer in self._answers}

    def _ask(
        self, requests: dict[int, Request], *, timeout_s: float, holds: dict[int, str] | None = None
    ) -> list[WorkerAnswer]:
        calls = {
            rank: Call(call=CALL_OF[type(request)], body=codec.encode(request).decode())
            for rank, request in requests.items()
        }
        told = Round(nonce=secrets.token_hex(8), calls=calls, owner=self._owner, holds=holds)
        results = self.control.rpc(vllm_door.encode_round(told), timeout_s=timeout_s)
        return vllm_door.decode_answers(told, results, peer=self.control.target)


class _Gathering:
    """Requests of one kind to several workers that become one round."""

    def __init__(self, rank: int, request: Request, workers: int) -> None:
        self._requests = {rank: request}
        self._workers = workers
        self._closed = False
        self._joined = threading.Condition()
        self._done = threading.Event()
        self._answers: dict[int, WorkerAnswer] = {}
        self._error: BaseException | None = None
        self._wait_s = _GATHER_UPDATE_S if isinstance(request, UpdateRequest) else _GATHER_S

    def join(self, rank: int, request: Request) -> bool:
        """Take part, unless it is too late or this worker does already."""
        with self._joined:
            if self._closed or rank in self._requests:
                return False
            self._requests[rank] = request
            self._joined.notify_all()
            return True

    def wait_for_others(self) -> None:
        """Give the others time to join; all of them are there at once in nearly every case."""
        with self._joined:
            self._joined.wait_for(lambda: len(self._requests) == self._workers, self._wait_s)

    def close(self) -> None:
        """Nobody joins any more."""
        with self._joined:
            self._closed = True

    def settle(self, run: Callable[[dict[int, Request]], dict[int, WorkerAnswer]]) -> None:
        """Make the round, for all who take part."""
        try:
            self._answers = run(dict(sorted(self._requests.items())))
        except BaseException as exc:  # noqa: BLE001  # raised in every thread that takes part
            self._error = exc
        finally:
            self._done.set()

    def result(self, rank: int, timeout_s: float) -> WorkerAnswer:
        """Return the answer of one worker; raise what the round raised."""
        if not self._done.wait(timeout_s * 2):
            raise ConnectError("another worker's call did not come back")
        if self._error is not None:
            raise _copy(self._error)
        if rank not in self._answers:
            raise RemoteError(
                f"this vLLM has no worker {rank} any more: it was started again with fewer",
                remote_type="vLLM",
                remote_message="",
            )
        return self._answers[rank]


class VllmWorkerTransport(BaseTransport):
    """A Transport to one worker of a vLLM server.

    `weight_checker` names vLLM's own parameters, each worker its shards.
    """

    def __init__(
        self, server: VllmServer, rank: int, whole: VllmServerTransport | None = None
    ) -> None:
        name = server.control.target
        super().__init__(name if server.workers == 1 else f"{name}#worker-{rank}")
        self._server = server
        self._whole = whole
        self._rank = rank

    @property
    def round(self) -> object:
        """What it has in common with the server's other workers: all of them answer, or none."""
        return self._server

    @property
    def whole(self) -> VllmServerTransport:
        """The transport to the server itself, one for all workers; who asks for it closes it."""
        if self._whole is None:
            self._whole = self._server.whole()
        return self._whole

    @property
    def sent_nbytes(self) -> int:
        """Bytes of requests: counted at `whole`, or else at the server's first worker."""
        return self._sent[1]

    @property
    def sent_messages(self) -> int:
        """Requests, counted there too."""
        return self._sent[0]

    @property
    def _sent(self) -> tuple[int, int]:
        counts = self._rank == 0 and not self._server.has_whole
        return self._server.control.sent if counts else (0, 0)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""
        self._check_open()
        answer = self._server.call(self._rank, request, timeout_s=timeout_s)
        if answer.problem is not None:
            raise problem.from_problem(
                msgspec.json.decode(answer.problem, type=problem.Problem), peer=self._target
            )
        if answer.reply is None:
            raise ProtocolError(f"{self._target}: its worker was told something and said nothing")
        return codec.decode_reply(CALL_OF[type(request)], answer.reply.encode())

    def close(self) -> None:
        """Refuse further calls; with the last of the server's workers its connections close."""
        if not self._closed:
            super().close()
            self._server.close_one()


class VllmServerTransport(BaseTransport):
    """A Transport to a vLLM server, which says how many workers it has now; nothing else."""

    def __init__(self, server: VllmServer) -> None:
        super().__init__(server.control.target)
        self._control = server.control
        self.paths = worker_paths(server.workers)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all requests to the server."""
        return self._control.sent[1]

    @property
    def sent_messages(self) -> int:
        """All requests to the server."""
        return self._control.sent[0]

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Answer a StatusRequest with that of the first worker; see Transport.call."""
        if not isinstance(request, StatusRequest):
            raise ProtocolError(f"{self._target}: this is for its workers to answer")
        server = VllmServer(self._control, timeout_s=timeout_s)
        status = VllmWorkerTransport(server, 0, self).call(request, timeout_s=timeout_s)
        return msgspec.structs.replace(status, workers=list(worker_paths(server.workers)))

    def expand(self, paths: Sequence[str]) -> list[VllmWorkerTransport]:
        """Return a transport to every worker; see Transport."""
        server = VllmServer(self._control, timeout_s=_MEND_S)
        if worker_paths(server.workers) != tuple(paths):
            raise ConnectError(f"{self._target} was started again meanwhile; connect again")
        server.has_whole = True
        return [VllmWorkerTransport(server, rank, self) for rank in range(server.workers)]

    def close(self) -> None:
        """Let the connections to the server go."""
        self._control.close()


def worker_paths(workers: int) -> tuple[str, ...]:
    """How the workers of a server are told apart."""
    return tuple(f"worker-{rank}" for rank in range(workers))


def worker_transports(control: VllmControl, *, timeout_s: float) -> list[VllmWorkerTransport]:
    """Return a transport to every worker of a server. Raises what its first answer raises."""
    server = VllmServer(control, timeout_s=timeout_s)
    return [VllmWorkerTransport(server, rank) for rank in range(server.workers)]


def _sender_of(request: Request) -> str:
    """Return the id by which a worker knows who sent this to it; none where it says none."""
    said = request.update_info if isinstance(request, UpdateRequest) else request
    return getattr(said, "sender", None) or ""


def _copy(error: BaseException) -> BaseException:
    """One error, raised in several threads, must not be changed by each of them."""
    return copy.copy(error) if isinstance(error, WeightSyncError) else error
