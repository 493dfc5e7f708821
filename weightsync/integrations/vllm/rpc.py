"""Messages between a sender and the workers of a vLLM server, sent through `collective_rpc`.

All workers get the same text; each handles the call of its rank, and returns a dict of text. Errors
are returned as well, never raised. When a worker raises, vLLM leaves the other workers' answers in
its queues, and each later call returns the answers of the call before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from weightsync.errors import ProtocolError, UpdateConflictError
from weightsync.receiver import WeightReceiver
from weightsync.wire import codec, problem
from weightsync.wire.messages import FinishRequest, Reply, Request
from weightsync.wire.struct_types import prepare

BACKEND = "weightsync"
"""The name of our engine in vLLM's configuration."""
METHOD = "weightsync"
"""The name of the worker's RPC method."""


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request: its name and its body as JSON."""

    call: str
    body: str


class Round(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One message to all workers: `calls` by rank. Each answer repeats the `nonce`.

    As in any request unknown fields are refused: an engine must not ignore a pause, for instance.

    `holds` is for the engine's PauseGuard. It announces a pause by `owner`, and has the ids by
    which the workers know that sender, by rank ("" where none is known yet). Empty: the pause is
    over, or will not come. None: no change. `watched` requests from each worker whether that sender
    lives.

    `below` is the path of an adapter, to whose receivers the calls go; with `unload` the adapter is
    removed. `kept` are the versions of all adapters that workers keep: the engine sets it, which
    knows what its requests use. None: no engine of ours passed this round on.

    `parts` are the finishes of the other parts of a set, by the path of each adapter and by rank.
    A worker commits them together with its own call, or none of them.
    """

    nonce: str
    calls: dict[int, Call] = {}
    owner: str = ""
    holds: dict[int, str] | None = None
    watched: dict[int, str] = {}
    below: str = ""
    unload: bool = False
    kept: list[str] | None = None
    parts: dict[str, dict[int, Call]] = {}

    @property
    def adapters(self) -> list[str]:
        """The paths of the adapters to whose receivers this round has calls."""
        return [self.below] if self.below else list(self.parts)


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker after a round, and its `reply` or `problem` as JSON.

    `may_generate`: its weights are one whole version. `sender_lives` answers `watched`. `paused`:
    generation was paused before this round. `held`: by a sender's pause, which the sender of this
    round may end. The engine's PauseGuard sets both; without a guard `paused` is None. `adapters`
    are the versions that requests may use in this worker, by the name of their adapter: vLLM's path
    of each, the newest last. `parts` are the answers of a round's parts, by their paths.
    """

    nonce: str
    rank: int
    world: int
    state: str
    version: int
    apply: str
    may_generate: bool
    paused: bool | None = None
    held: bool = False
    sender_lives: bool = True
    reply: str | None = None
    problem: str | None = None
    adapters: dict[str, list[str]] = {}
    parts: dict[str, WorkerAnswer] = {}


@dataclass(frozen=True, slots=True)
class Part:
    """The receiver of an adapter in a worker, and `base`, that of the worker's model."""

    receiver: WeightReceiver
    base: WeightReceiver

    def handle(self, request: Request) -> Reply:
        """Handle a request to the adapter, unless it would commit the base model with it.

        That takes a pause and a reset of caches, which a round to the base model has. Raises
        UpdateConflictError, and changes nothing.
        """
        if isinstance(request, FinishRequest) and request.update_id is not None:
            update = self.base.open_update
            if update is not None and update.update_id == request.update_id:
                raise UpdateConflictError(
                    f"{request.update_id}: the base model has a part of this set, and waits for "
                    "its own finish, which commits both; connect a sender of the base model",
                    state=self.base.status().state,
                    update_id=request.update_id,
                )
        return self.receiver.dispatch(request)


def lacks_engine(text: str) -> bool:
    """Whether `text` is vLLM's error for workers without our engine.

    The text decides, because vLLM's error has neither a type nor a code.
    """
    return METHOD in text and ("has no attribute" in text or "is not implemented" in text)


def encode_round(sent: Round) -> str:
    """Return a round as JSON."""
    return msgspec.json.encode(sent).decode()


def decode_round(text: object) -> Round:
    """Return the round in a JSON text. Raises ProtocolError where it is invalid."""
    try:
        return msgspec.json.decode(str(text), type=Round)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"this is no valid round of weightsync: {exc}") from exc


def find_adapter_round(text: object) -> Round | None:
    """Return the round in a text if it is one to the receivers of adapters; None for others.

    Also for what is no round: every worker has to answer that, or vLLM is out of step.
    """
    try:
        found = decode_round(text)
    except ProtocolError:
        return None
    return found if found.adapters else None


def answer_round(
    sent: Round,
    receiver: WeightReceiver,
    handle: Callable[[Request], Reply],
    *,
    rank: int,
    world: int,
    parts: Mapping[str, Part] | None = None,
) -> dict[str, Any]:
    """Answer a round in one worker, whose request `handle` handles; return plain data.

    An error of the request is part of the answer. `parts` are the receivers of the round's parts,
    by their paths; raises ProtocolError for a part's call that is no finish.
    """
    parts = parts or {}
    for path, part in parts.items():
        of_part = sent.parts[path].get(rank)
        if of_part is not None:
            finish = codec.decode_request(of_part.call, of_part.body.encode())
            if not isinstance(finish, FinishRequest):
                raise ProtocolError(f"{path}: a part of a set has a {of_part.call}, not a finish")
            part.receiver.announce_finish(finish)
    call, reply, wrong = sent.calls.get(rank), None, None
    if call is not None:
        try:
            request = codec.decode_request(call.call, call.body.encode())
            reply = codec.encode(handle(request)).decode()
        except Exception as exc:  # noqa: BLE001  # returned to the sender, which raises it
            wrong = problem.encode_problem(problem.to_problem(exc)).decode()
    status, watched = receiver.status(), sent.watched.get(rank)
    answer = WorkerAnswer(
        nonce=sent.nonce,
        rank=rank,
        world=world,
        state=status.state,
        version=status.version,
        apply=status.apply,
        may_generate=status.may_generate,
        sender_lives=not watched or receiver.sender_alive(watched),
        reply=reply,
        problem=wrong,
    )
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    for path, part in parts.items():  # committed with the call above, if there was one
        plain["parts"][path] = answer_round(
            Round(nonce=sent.nonce, calls=sent.parts[path]),
            part.receiver,
            part.handle,
            rank=rank,
            world=world,
        )
    return plain


def is_refusal(result: object) -> bool:
    """Whether a worker's answer is that of a round that it could not decode."""
    return isinstance(result, dict) and set(result) - {"paused", "held"} == {"problem"}


def encode_refusal(exc: Exception) -> dict[str, str]:
    """Return the answer to a round that could not be decoded, as plain data."""
    return {"problem": problem.encode_problem(problem.to_problem(exc)).decode()}


def decode_answers(sent: Round, results: object, *, peer: str) -> list[WorkerAnswer]:
    """Return the answers of all workers, sorted by rank.

    Raises ProtocolError where the answers belong to another call, or some are missing, and the
    error of a worker that could not decode the round.
    """
    plain = results if isinstance(results, list) else []
    for result in plain:
        if is_refusal(result):
            wrong = msgspec.json.decode(result["problem"], type=problem.Problem)
            raise problem.from_problem(wrong, peer=peer)
    try:
        answers = [msgspec.convert(result, WorkerAnswer) for result in plain]
    except msgspec.ValidationError as exc:
        raise ProtocolError(
            f"{peer}: a worker answered what weightsync's engine never does ({exc}); were they "
            'started with --weight-transfer-config \'{"backend":"weightsync"}\'?'
        ) from exc
    if any(answer.nonce != sent.nonce for answer in answers):
        raise ProtocolError(
            f"{peer}: its workers' answers belong to an earlier call. vLLM leaves answers behind "
            "when a call raises in one of several workers; restart the server"
        )
    answers.sort(key=lambda answer: answer.rank)
    worlds = {answer.world for answer in answers}
    if not answers or worlds != {len(answers)}:
        raise ProtocolError(
            f"{peer}: {len(answers)} of {max(worlds, default=0)} workers answered; a server with "
            "data parallel replicas shows only the first of them: start one server per replica, "
            "and name them all"
        )
    return answers


def one_version(answers: Iterable[WorkerAnswer]) -> bool:
    """Whether all workers may generate, with the same version."""
    answers = list(answers)
    return len({answer.version for answer in answers}) == 1 and all(
        answer.may_generate for answer in answers
    )


def standing(answers: Iterable[WorkerAnswer]) -> str:
    """Return the state of each worker, for messages."""
    return ", ".join(f"worker {a.rank} is {a.state} at {a.version}" for a in answers)


prepare(Round, WorkerAnswer)
