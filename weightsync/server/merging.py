"""What the workers of one server answered, as one answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from weightsync.update.lifecycle import State
from weightsync.wire.messages import Status, StepReply
from weightsync.wire.offers import Owner

T = TypeVar("T")

_LEAST_READY_FIRST = (
    State.TORN,
    State.ABORTING,
    State.JOINING,
    State.UPDATING,
    State.PREPARED,
    State.READY,
)
_WEAKEST_FIRST = ("none", "arrived", "held")


def merge_statuses(statuses: Mapping[str, Status]) -> Status:
    """Return the status of all workers, by path, as one: that of the least ready.

    They may generate only where all may, with one version.
    """
    held = list(statuses.values())
    versions = {(status.version, status.weights_id) for status in held}
    instances = " ".join(status.instance for status in held).encode()
    prepared = {status.prepared_version for status in held}
    return Status(
        instance=hashlib.blake2b(instances, digest_size=8).hexdigest(),
        protocol=min(status.protocol for status in held),
        state=_least_ready(status.state for status in held),
        version=min(status.version for status in held),
        may_generate=len(versions) == 1 and all(status.may_generate for status in held),
        apply="in_place" if any(status.apply == "in_place" for status in held) else "staged",
        verification=_weakest(status.verification for status in held),
        label=_common([status.label for status in held]),
        update_id=next((status.update_id for status in held if status.update_id), None),
        last_finished=_common([status.last_finished for status in held]),
        weights_id=_common([status.weights_id for status in held]),
        prepared_version=prepared.pop() if len(prepared) == 1 else None,
        manifest_digest=_common([status.manifest_digest for status in held]),
        busy=any(status.busy for status in held),
        orphaned=any(status.orphaned for status in held),
        paused=any(status.paused for status in held),
        detail=_reasons(statuses),
        device_keys=list(dict.fromkeys(key for status in held for key in status.device_keys)),
        ledger=[
            replace(
                entry,
                name=f"{name}: {entry.name}",
                unreleased=[f"{name}: {late}" for late in entry.unreleased],
            )
            for name, status in statuses.items()
            for entry in status.ledger
        ],
        workers=list(statuses),
        senders=_paths(held),
        owner=max((s.owner for s in held if s.owner), key=_standing, default=None),
    )


def merge_steps(replies: Sequence[StepReply]) -> StepReply:
    """Return where all workers stand after a step, and what it cost the slowest."""
    phases = sorted({phase for reply in replies for phase in reply.seconds})
    return StepReply(
        state=_least_ready(reply.state for reply in replies),
        version=min(reply.version for reply in replies),
        update_id=next((reply.update_id for reply in replies if reply.update_id), None),
        apply="in_place" if any(reply.apply == "in_place" for reply in replies) else "staged",
        verified=_weakest(reply.verified for reply in replies),
        nbytes=max(reply.nbytes for reply in replies),
        stall_s=max(reply.stall_s for reply in replies),
        peak_extra_nbytes=sum(reply.peak_extra_nbytes for reply in replies),
        seconds={p: max(reply.seconds.get(p, 0.0) for reply in replies) for p in phases},
        table_digest=_common([reply.table_digest for reply in replies]),
    )


def _least_ready(states: Iterable[str]) -> str:
    return min(states, key=lambda state: _LEAST_READY_FIRST.index(State(state)))


def _weakest(levels: Iterable[str]) -> str:
    return min(levels, key=_WEAKEST_FIRST.index)


def _paths(held: Sequence[Status]) -> dict[str, str]:
    """Return every sender's path, or paths, where it reaches workers by several."""
    ids = dict.fromkeys(sender for status in held for sender in status.senders)
    found = {s: {status.senders[s] for status in held if s in status.senders} for s in ids}
    return {sender: ", ".join(sorted(paths)) for sender, paths in found.items()}


def _standing(owner: Owner) -> tuple[bool, int]:
    return owner.alive, owner.term


def _common(values: Sequence[T | None]) -> T | None:
    """Return what all say, or None."""
    return values[0] if all(value == values[0] for value in values) else None


def _reasons(statuses: Mapping[str, Status]) -> str:
    """Say which workers may not generate and why, or that they hold different versions."""
    reasons = [
        f"{name}: {status.detail or status.state}"
        for name, status in statuses.items()
        if not status.may_generate
    ]
    if len({(status.version, status.weights_id) for status in statuses.values()}) > 1:
        versions = ", ".join(
            f"{name} {status.version} of update {status.weights_id or 'none'}"
            for name, status in statuses.items()
        )
        reasons.append(
            f"the workers hold different weights ({versions}); a full update heals this: call "
            "send_weights()"
        )
    return "; ".join(reasons)
