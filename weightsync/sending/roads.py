"""Which way the bytes go: roads are tried with a probe, the first that proves itself is taken."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from weightsync.backends.ipc_sender import IpcOptions, IpcTrainerEngine, Road
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    HandleError,
    SegmentError,
    WeightSyncError,
)
from weightsync.samehost import cuda_handle
from weightsync.sending.fleet import Answer, Fleet, Member, failures, raise_first
from weightsync.weights.source import WeightSource
from weightsync.wire.messages import InitRequest, Request, ShutdownRequest

logger = logging.getLogger(__name__)

_ROAD_ERRORS = (HandleError, SegmentError, BackendUnavailableError)
"""What says that a road cannot work, and not that the call was wrong."""


_GOODBYE_S = 10.0


@dataclass(frozen=True, slots=True)
class Connection:
    """An engine whose road every member has proved; `skipped` says why not a faster one."""

    engine: IpcTrainerEngine
    answers: list[Answer]
    skipped: dict[str, str] = field(default_factory=dict)


def take_road(
    source: WeightSource, fleet: Fleet, options: IpcOptions, *, backend: str
) -> Connection:
    """Connect every member by the fastest road that works for all of them.

    Raises BackendUnavailableError with the reason of each road when none does, and what a member
    raised when the tensors do not fit it.
    """
    skipped: dict[str, str] = {}
    last: WeightSyncError | None = None
    for road, reason in _candidates(source, backend):
        if reason is not None:
            skipped[road] = reason
            continue
        try:
            return Connection(*_try(source, fleet, replace(options, road=road)), skipped)
        except _ROAD_ERRORS as exc:
            skipped[road] = str(exc)
            logger.warning("road %s cannot be taken: %s", road, exc)
            last = exc
    if len(skipped) == 1 and isinstance(last, SegmentError):
        raise last
    reasons = "; ".join(f"{road}: {reason}" for road, reason in skipped.items())
    raise BackendUnavailableError(f"no road to {_targets(fleet)} works: {reasons}") from last


def _candidates(source: WeightSource, backend: str) -> Iterator[tuple[Road, str | None]]:
    if backend not in ("auto", "ipc"):
        raise ConfigError(f"backend must be auto or ipc, not {backend!r}")
    if source_device(source).type == "cuda":
        yield "cuda_ipc", cuda_handle.why_not()
    yield "shared_memory", None


def source_device(source: WeightSource) -> torch.device:
    """Where the source's tensors are, as far as that is known without making them."""
    stable = source.stable_tensors()
    if stable:
        return stable[0].device
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _try(
    source: WeightSource, fleet: Fleet, options: IpcOptions
) -> tuple[IpcTrainerEngine, list[Answer]]:
    engine = IpcTrainerEngine(source, replace(options, device=source_device(source)))
    try:
        answers = offer(engine, fleet, options.timeout_s)
    except BaseException:
        withdraw(engine, fleet, options.timeout_s)
        raise
    return engine, answers


def offer(
    engine: IpcTrainerEngine,
    fleet: Fleet,
    timeout_s: float,
    members: list[Member] | None = None,
) -> list[Answer]:
    """Give members the engine's handles. Raises what the first of them raised."""
    if engine.road == "cuda_ipc":
        # An export that nobody opens is never freed: only a probe is risked on an unproved road.
        probes = fleet.ask(
            lambda _: InitRequest(probe=engine.probe_info()), timeout_s=timeout_s, members=members
        )
        raise_first(probes, "probe")

    def request(member: Member) -> Request:
        return InitRequest(init_info=engine.init_info(member.reader))

    answers = fleet.ask(request, timeout_s=timeout_s, members=members)
    raise_first(answers, "init")
    for answer in answers:
        if answer.reply is not None:
            answer.member.met(answer.reply)  # type: ignore[arg-type]  # an init's reply
    return answers


def withdraw(engine: IpcTrainerEngine, fleet: Fleet, timeout_s: float) -> None:
    """Have every member close what it opened, then free it; who is gone is not missed."""
    answers = fleet.ask(
        ShutdownRequest(sender=engine.sender_id), timeout_s=min(timeout_s, _GOODBYE_S)
    )
    for answer in failures(answers):
        logger.debug("shutdown at %s: %s", answer.member.target, answer.error)
    engine.close()


def _targets(fleet: Fleet) -> str:
    return ", ".join(member.target for member in fleet.members)
