"""The rank group: rank 0 broadcasts commands, and every rank executes and replies to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

from msgspec import structs

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.observe import Observers
from weightsync.ranks.comm import (
    CancelledError,
    RankComm,
    compare_arguments,
    compare_manifests,
)
from weightsync.ranks.commands import (
    AnyCommand,
    Begin,
    CommandResult,
    End,
    Finished,
    RankInfo,
    TakeSnapshot,
    Transfer,
    decode_command,
    decode_rank_info,
    decode_result,
    encode,
)
from weightsync.ranks.streams import plan_streams
from weightsync.ranks.watch import LEAST_SILENCE_S
from weightsync.ranks.worker import RankWorker
from weightsync.report import SyncReport
from weightsync.specs import Manifest
from weightsync.weights.sources.base import NamedTensors
from weightsync.wire.problem import from_problem, to_problem


class RankGroup:
    """All ranks of one trainer, directed by rank 0. All ranks construct it together.

    Rank 0 calls `run_on_all` for each command, then `finish`. The other ranks call `serve`
    meanwhile. `version` is the version that rank 0 sent last. `sends_streams`: the receivers are
    connected to the streams of all ranks; known on rank 0 alone. `observers` receive every command
    of rank 0. Raises ManifestMismatchError when the ranks do not send the same tensors.
    """

    def __init__(self, worker: RankWorker, comm: RankComm) -> None:
        self.worker = worker
        self.comm = comm
        self.leads = comm.rank == 0
        self.version = 0
        self.sends_streams = False
        self.observers = Observers()
        self._commanded_at = time.monotonic()
        rank_info = worker.rank_info()
        self.rank_infos = [rank_info] if comm.size == 1 else self._exchange_rank_infos(rank_info)
        if comm.size > 1:
            worker.plan = plan_streams(self.manifest, comm.exchange(worker.describe_holdings()))

    @property
    def manifest(self) -> Manifest:
        """The manifest of the source."""
        return self.worker.source.manifest

    def take_snapshot(self, *, streams: bool) -> None:
        """Have all ranks copy their tensors, and send the copies from now on. Rank 0 only.

        With `streams`, which the first copy decides, each copies the boxes that it sends.
        """
        self.run_on_all(TakeSnapshot(streams=streams))
        self.rank_infos = [structs.replace(info, stable=True) for info in self.rank_infos]

    def run_on_all(
        self, command: AnyCommand, *, check: Callable[[], None] = lambda: None
    ) -> list[CommandResult]:
        """Execute `command` on every rank; return the results in rank order. Rank 0 only.

        `check` raises when rank 0 has to stop a transfer. Raises a rank's error, after all ranks
        have replied.
        """
        with self._observed(command) if self.observers else nullcontext():
            if self.comm.size == 1:
                return [self.worker.do(command, check)]
            self._commanded_at = time.monotonic()
            self.comm.broadcast(encode(command))
            answers, error = self._do(command, check)
            self._agree_on_apart(command, answers, error)
            if error is not None and not isinstance(error, CancelledError):
                raise error
            for name, answer in zip(self.comm.names, answers, strict=True):
                if answer.problem is not None:
                    raise from_problem(answer.problem, peer=f"rank {name}")
            if error is not None:
                raise error
            return answers

    def _agree_on_apart(
        self, command: AnyCommand, answers: Sequence[CommandResult], error: BaseException | None
    ) -> None:
        """Raise on all ranks the error of a step that each did apart: of Begin, or at End.

        One of rank 0's caller is raised there as it is.
        """
        failed = any(answer.is_late for answer in answers)
        if isinstance(command, Begin) and command.goes_on:
            failed = any(answer.problem is not None for answer in answers)
            self.worker.note_late(error)
        if not failed:
            return
        try:
            self.worker.agree_on_late()
        except WeightSyncError:
            if error is not None and self.leads and not self.worker.is_own_error(error):
                raise error from None
            raise

    @contextmanager
    def _observed(self, command: AnyCommand) -> Iterator[None]:
        """Notify the observers of a command, and of the transfers that it begins or ends."""
        name, notify = type(command).__name__.lower(), self.observers.notify
        if isinstance(command, End):
            notify(lambda observer: observer.on_transfer_end())
        try:
            yield
        finally:
            notify(lambda observer: observer.on_command(name))
            if isinstance(command, Begin):
                nbytes = self.manifest.nbytes
                notify(lambda o: o.on_transfer_start(self.worker.progress(), nbytes))

    def check_still_followed(self) -> None:
        """Raise TransferError where the others have given rank 0 up, which was stopped meanwhile.

        Called before receivers commit. Costs nothing shortly after a command.
        """
        if self.comm.size > 1 and time.monotonic() - self._commanded_at > LEAST_SILENCE_S / 2:
            self.comm.check_given_up()

    def transfer_apart(self, *, check: Callable[[], None]) -> None:
        """Transfer on rank 0 after a Begin that `goes_on`, as the others do. Rank 0 only."""
        with self._observed(Transfer()) if self.observers else nullcontext():
            self.worker.transfer_apart(check)

    def check_same_call(self, call: str, arguments: Mapping[str, str]) -> None:
        """Raise on all ranks unless all make the same call, with the same arguments. Collective."""
        compare_arguments(call, arguments, self.comm)

    def finish(
        self,
        version: int,
        *,
        report: SyncReport | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Make the other ranks return from `serve`, with the report or the error. Rank 0 only."""
        self.version = version
        if self.comm.size > 1:
            problem = to_problem(error) if error is not None else None
            self.comm.broadcast(encode(Finished(version=version, report=report, problem=problem)))

    def serve(self) -> Finished:
        """Execute rank 0's commands until its call ends. Raises the error of rank 0's call."""
        own: BaseException | None = None
        while True:
            command = decode_command(self.comm.broadcast())
            if isinstance(command, Finished):
                break
            answers, error = self._do(command, lambda: None)
            if error is not None and not isinstance(error, Exception):
                raise error
            try:
                self._agree_on_apart(command, answers, error)
            except WeightSyncError as exc:
                error = exc
            own = error or own
            if isinstance(command, Begin) and command.goes_on and all_began(answers):
                self.comm.expect()  # the command to end, so that the death of rank 0 is noticed
                with suppress(BaseException):  # it is raised at the End, with the other ranks
                    self.worker.transfer_apart(lambda: None)
        self.version = command.version
        if command.problem is not None:
            raise from_problem(command.problem) from (own and own.__cause__)
        return command

    def close(self) -> None:
        """Free this rank's memory, and leave the group."""
        self.worker.close()
        self.worker.drop_snapshot()
        self.comm.close()

    def _do(
        self, command: AnyCommand, check: Callable[[], None]
    ) -> tuple[list[CommandResult], BaseException | None]:
        """Execute a command on this rank; return all ranks' results, and this rank's error."""
        error: BaseException | None = None
        try:
            answer = self.worker.do(command, check)
        except BaseException as exc:  # noqa: BLE001  # raised by the caller, after the exchange
            error, answer = exc, CommandResult(problem=to_problem(exc))
        return [decode_result(data) for data in self.comm.exchange(encode(answer))], error

    def _exchange_rank_infos(self, rank_info: RankInfo) -> list[RankInfo]:
        compare_manifests(
            self.manifest, self.comm, advice="every rank must give connect() the same model"
        )
        rank_infos = [decode_rank_info(data) for data in self.comm.exchange(encode(rank_info))]
        if len({rank_info.stable for rank_info in rank_infos}) > 1:
            raise ProtocolError(
                "some ranks send tensors that stay where they are, others make them on the fly; "
                "give connect() the same kind of source on every rank"
            )
        return rank_infos


def all_began(answers: Iterable[CommandResult]) -> bool:
    """Whether every rank has begun an update, and all of the same kind."""
    listed = list(answers)
    begun = all(answer.problem is None and not answer.moved for answer in listed)
    return begun and are_alike(listed)


def are_alike(answers: Iterable[CommandResult]) -> bool:
    """Whether all ranks have begun to send a delta, or none has."""
    return len({answer.delta is None for answer in answers}) == 1


class FollowerUpdate:
    """An update block on a rank other than 0. `send` has to be called as often as on rank 0.

    `last_report` is the report of rank 0, after the block. `over` is True when rank 0 has ended the
    block with an error.
    """

    def __init__(self, group: RankGroup) -> None:
        self.last_report: SyncReport | None = None
        self.over = False
        self._group = group

    def send(self, named_tensors: NamedTensors) -> None:
        """Provide these tensors, which rank 0 or this rank sends to its receivers."""
        self._group.worker.pairs = named_tensors
        try:
            self._group.serve()
        except BaseException:
            self.over = True
            raise
        finally:
            self._group.worker.pairs = None


@contextmanager
def following(group: RankGroup) -> Iterator[FollowerUpdate]:
    """Run an update block on a rank other than 0, and report its outcome to rank 0.

    After an error in the block the update commits on no receiver.
    """
    followed = FollowerUpdate(group)
    group.serve()
    try:
        yield followed
    except BaseException as exc:
        if not followed.over:
            group.worker.fault = exc
            try:
                with suppress(WeightSyncError):
                    group.serve()
            finally:
                group.worker.fault = None
        raise
    followed.last_report = group.serve().report
