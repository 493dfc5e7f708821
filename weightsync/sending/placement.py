"""Which rank could feed which receiver, and how: every way, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weightsync.errors import ConfigError
from weightsync.sending.commands import RankInfo
from weightsync.sending.fleet import Member

Backend = Literal["auto", "ipc", "distributed"]
PathName = Literal["cuda_ipc", "shared_memory", "distributed"]
BACKENDS: tuple[Backend, ...] = ("auto", "ipc", "distributed")


@dataclass(frozen=True, slots=True)
class Candidate:
    """The rank that feeds a receiver, and the path."""

    rank: int
    path: PathName


def check_backend(backend: str, *, packed: bool | None = None) -> None:
    """Raise ConfigError for a backend that there is not, or that cannot send so."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "distributed" and packed is False:
        raise ConfigError("the distributed backend streams: leave packed out, or say True")


def candidates(member: Member, cards: Sequence[RankInfo], backend: str) -> list[Candidate]:
    """Return the ways to a member, fastest first; why one is not among them goes to `skipped`.

    The keys are hints: a probe decides.
    """
    found: list[Candidate] = []
    if backend != "distributed":
        found += _cuda_ipc(member, cards)
        found += _shared_memory(member, cards)
    if backend != "ipc":
        found.append(Candidate(0, "distributed"))
    return found


def _cuda_ipc(member: Member, cards: Sequence[RankInfo]) -> list[Candidate]:
    on_gpu = [rank for rank, card in enumerate(cards) if card.on_gpu]
    if not on_gpu:
        return []
    same = [rank for rank in on_gpu if cards[rank].keys[0] in member.keys]
    if not same:
        member.skipped["cuda_ipc"] = (
            f"the receiver is on {', '.join(member.keys)}, the trainer's GPUs are "
            f"{', '.join(cards[rank].keys[0] for rank in on_gpu)}"
        )
        return []
    refused = cards[same[0]].no_cuda_ipc
    if refused is not None:
        member.skipped["cuda_ipc"] = refused
        return []
    return [Candidate(same[0], "cuda_ipc")]


def _shared_memory(member: Member, cards: Sequence[RankInfo]) -> list[Candidate]:
    same_host = [rank for rank, card in enumerate(cards) if card.keys[-1] in member.keys]
    if not same_host:
        hosts = sorted({card.keys[-1] for card in cards})
        member.skipped["shared_memory"] = (
            f"the receiver is on host {member.host or 'unknown'}, the trainer on {', '.join(hosts)}"
        )
        return []
    same_gpu = [rank for rank in same_host if cards[rank].keys[0] in member.keys]
    return [Candidate((same_gpu or same_host)[0], "shared_memory")]


def assign(wishes: dict[Member, list[Candidate]]) -> dict[Member, Candidate]:
    """Choose for every member the first of its ways that its rank can offer to all it feeds.

    A rank has one ring: on the GPU for `cuda_ipc`, on the host for the other two.
    """
    chosen = {member: left[0] for member, left in wishes.items()}
    on_host = {way.rank for way in chosen.values() if way.path != "cuda_ipc"}
    for member, way in chosen.items():
        others = [other for other in wishes[member] if other.path == "shared_memory"]
        if way.path == "cuda_ipc" and way.rank in on_host and others:
            member.skipped["cuda_ipc"] = (
                f"rank {way.rank} feeds another receiver from host memory, and one ring serves all"
            )
            chosen[member] = others[0]
    return chosen
