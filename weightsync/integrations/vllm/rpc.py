"""What a sender and the workers of a vLLM server say to each other, through `collective_rpc`.

One text goes to all workers, each takes what is addressed to its rank and answers with a dict of
text. Errors are answers too: a worker that raised would leave those of the others in the queues of
a server with several, where each later call would be answered by the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from weightsync.errors import ProtocolError
from weightsync.wire import problem
from weightsync.wire.struct_types import prepare

METHOD = "weightsync"
"""The worker's method that is called."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its name and its body as JSON."""

    call: str
    body: str


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all workers are told at once: `calls` by rank; `nonce` comes back with each answer.

    `holds` is for the engine's guard: `owner` pauses the server, or is about to. It has the ids by
    which workers know that sender, by rank ("" where none is known yet). Empty: its pause is over,
    or will not come. None leaves that as it is. `watched` asks each worker whether that sender
    lives.
    """

    nonce: str
    calls: dict[int, Call] = {}
    owner: str = ""
    holds: dict[int, str] | None = None
    watched: dict[int, str] = {}


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker stands afterwards, and its `reply` or `problem` as JSON.

    `may_generate`: its model is whole. `sender_lives` answers `watched`. `paused`: generation was
    held before this round; `held`: by a sender's pause, and whoever made the round may end it. Both
    come from the engine's guard; without one `paused` is None.
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


def has_no_door(text: str) -> bool:
    """Whether this is what vLLM says of a call to workers that have no engine of ours.

    Its message is all there is to go by: it has no type, and no code of its own.
    """
    return METHOD in text and ("has no attribute" in text or "is not implemented" in text)


def encode_round(told: Round) -> str:
    """Return the text of a round."""
    return msgspec.json.encode(told).decode()


def decode_round(text: object) -> Round:
    """Return the round that a text holds. Raises ProtocolError when it is none."""
    try:
        return msgspec.json.decode(str(text), type=Round)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"a worker's door takes a round of ours; this is none: {exc}") from exc


def encode_answer(answer: WorkerAnswer) -> dict[str, Any]:
    """Return an answer as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    return plain


def encode_refusal(exc: Exception) -> dict[str, str]:
    """Return, as plain data, the answer to a round that could not be read."""
    return {"problem": problem.encode_problem(problem.to_problem(exc)).decode()}


def decode_answers(told: Round, results: object, *, peer: str) -> list[WorkerAnswer]:
    """Return every worker's answer, by rank.

    Raises ProtocolError where they are of another call, or not of all workers; and what a worker
    says that could not read the round.
    """
    plain = results if isinstance(results, list) else []
    for result in plain:
        if isinstance(result, dict) and set(result) - {"paused", "held"} == {"problem"}:
            wrong = msgspec.json.decode(result["problem"], type=problem.Problem)
            raise problem.from_problem(wrong, peer=peer)
    try:
        answers = [msgspec.convert(result, WorkerAnswer) for result in plain]
    except msgspec.ValidationError as exc:
        raise ProtocolError(
            f"{peer}: a worker answered what weightsync's engine never does ({exc}); were they "
            'started with --weight-transfer-config \'{"backend":"weightsync"}\', and the same '
            "version of weightsync?"
        ) from exc
    if any(answer.nonce != told.nonce for answer in answers):
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
    """Whether every worker may compute with the version of all others."""
    answers = list(answers)
    return len({answer.version for answer in answers}) == 1 and all(
        answer.may_generate for answer in answers
    )


def standing(answers: Iterable[WorkerAnswer]) -> str:
    """Say how workers stand."""
    return ", ".join(f"worker {a.rank} is {a.state} at {a.version}" for a in answers)


def addressed(told: Round, rank: int) -> Call | None:
    """Return what a round says to the worker of this rank."""
    calls: Mapping[int, Call] = told.calls
    return calls.get(rank)


prepare(Round, WorkerAnswer)
