"""All ranks of one trainer as one: rank 0 commands, every rank does its part and answers."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.errors import ProtocolError
from weightsync.report import SyncReport
from weightsync.sending.agreement import compare_manifests
from weightsync.sending.call_off import CancelledError
from weightsync.sending.commands import (
    AnyCommand,
    CommandResult,
    Finished,
    RankInfo,
    decode_command,
    decode_rank_info,
    decode_result,
    encode,
)
from weightsync.sending.feeder import RankWorker
from weightsync.sending.ranks import RankComm
from weightsync.sending.watch import Observers
from weightsync.specs import Manifest
from weightsync.wire.problem import from_problem, to_problem


class RankGroup:
    """The feeders of all ranks. Made on every rank, by all of them together.

    Rank 0 calls `tell` as often as it needs and then `done`; the others call `follow` meanwhile,
    and know from `version` what rank 0 said last. `watch` is told of what rank 0 tells.
    Raises ManifestMismatchError when the ranks do not send the same tensors.
    """

    def __init__(self, feeder: RankWorker, ranks: RankComm) -> None:
        self.feeder = feeder
        self.ranks = ranks
        self.leads = ranks.rank == 0
        self.version = 0
        self.watch = Observers()
        card = feeder.card()
        self.cards = [card] if ranks.size == 1 else self._exchange_cards(card)

    @property
    def manifest(self) -> Manifest:
        """What is sent."""
        return self.feeder.source.manifest

    def tell(
        self, command: AnyCommand, *, check: Callable[[], None] = lambda: None
    ) -> list[CommandResult]:
        """Have every rank do `command`; return their answers in rank order.

        `check` raises when rank 0 should give up a transfer. Raises what a rank raised, once all
        have answered.
        """
        if not self.watch:
            return self._tell(command, check)
        with self.watch.command(command):
            return self._tell(command, check)

    def _tell(self, command: AnyCommand, check: Callable[[], None]) -> list[CommandResult]:
        if self.ranks.size == 1:
            return [self.feeder.do(command, check)]
        self.ranks.broadcast(encode(command))
        answers, error = self._do(command, check)
        if error is not None and not isinstance(error, CancelledError):
            raise error
        for name, answer in zip(self.ranks.names, answers, strict=True):
            if answer.problem is not None:
                raise from_problem(answer.problem, peer=f"rank {name}")
        if error is not None:
            raise error
        return answers

    def meet(self, call: str) -> None:
        """Raise ProtocolError on all ranks unless all make the same call."""
        if self.ranks.size == 1:
            return
        calls = [body.decode() for body in self.ranks.exchange(call.encode())]
        if len(set(calls)) > 1:
            names = self.ranks.names
            made = ", ".join(f"rank {n} {c}" for n, c in zip(names, calls, strict=True))
            raise ProtocolError(
                f"the trainer's ranks make different calls: {made}; every rank has to make the "
                "same calls on its sender, in the same order"
            )

    def done(
        self,
        version: int,
        *,
        report: SyncReport | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Let the other ranks return from `follow`, with the report or the error."""
        self.version = version
        if self.ranks.size > 1:
            problem = to_problem(error) if error is not None else None
            self.ranks.broadcast(encode(Finished(version=version, report=report, problem=problem)))

    def follow(self) -> Finished:
        """Do what rank 0 tells until its call is over. Raises what rank 0's caller sees raised."""
        own: BaseException | None = None
        while True:
            command = decode_command(self.ranks.broadcast())
            if isinstance(command, Finished):
                break
            _, error = self._do(command, lambda: None)
            if error is not None and not isinstance(error, Exception):
                raise error
            own = error or own
        self.version = command.version
        if command.problem is not None:
            raise from_problem(command.problem) from (own and own.__cause__)
        return command

    def close(self) -> None:
        """Free what this rank holds and leave the group."""
        self.feeder.close()
        self.ranks.close()

    def _do(
        self, command: AnyCommand, check: Callable[[], None]
    ) -> tuple[list[CommandResult], BaseException | None]:
        """Do this rank's part, and tell the others how it went."""
        error: BaseException | None = None
        try:
            answer = self.feeder.do(command, check)
        except BaseException as exc:  # noqa: BLE001  # raised by the caller, after the exchange
            error, answer = exc, CommandResult(problem=to_problem(exc))
        return [decode_result(data) for data in self.ranks.exchange(encode(answer))], error

    def _exchange_cards(self, card: RankInfo) -> list[RankInfo]:
        compare_manifests(
            self.manifest, self.ranks, advice="every rank must give connect() the same model"
        )
        cards = [decode_rank_info(data) for data in self.ranks.exchange(encode(card))]
        if len({card.stable for card in cards}) > 1:
            raise ProtocolError(
                "some ranks send tensors that stay where they are, others make them on the fly; "
                "give connect() the same kind of source on every rank"
            )
        return cards
