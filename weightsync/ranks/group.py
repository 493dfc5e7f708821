"""The rank group: rank 0 broadcasts commands, and every rank executes and replies to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

import msgspec
from msgspec import structs

from weightsync.errors import ProtocolError, TransferCancelled, WeightSyncError
from weightsync.observe import Observers
from weightsync.ranks.comm import (
    CancelledError,
    RankComm,
    compare_arguments,
    compare_manifests,
    digest_of_call,
)
from weightsync.ranks.commands import (
    AgreeOnLate,
    AnyCommand,
    Begin,
    CommandResult,
    Compare,
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
        self._call: tuple[str, Mapping[str, str]] = "", {}
        self._words_before: int | None = None  # this call, which the ranks make or have made last
        self._reply = b""  # with which this rank, not 0, waits for the next command
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
            answer, error = self._answer(command, check)
            try:
                answers = self._decode_results(self.comm.collect(encode(answer)))
                if _failed_apart(command, answers):
                    self._agree_on_late(error)
            except WeightSyncError:
                if not isinstance(error, Exception | None):  # an interrupt comes out as one
                    raise error from None
                raise
            if error is not None and not isinstance(error, CancelledError):
                raise error
            for name, one in zip(self.comm.names, answers, strict=True):
                if one.problem is not None:
                    raise from_problem(one.problem, peer=f"rank {name}")
            if error is not None:
                raise error
            return answers

    def _decode_results(self, replies: Iterable[bytes]) -> list[CommandResult]:
        """Return the results of all ranks. Raises ProtocolError where a rank has left its call."""
        found = []
        for name, reply in zip(self.comm.names, replies, strict=True):
            try:
                found.append(decode_result(reply))
            except msgspec.MsgspecError as exc:
                raise ProtocolError(
                    f"rank {name} left its call on the sender, and made another one; every rank "
                    "has to make the same calls, in the same order"
                ) from exc
        return found

    def _agree_on_late(self, error: BaseException | None) -> None:
        """Raise the error on which the ranks agree; one of rank 0's caller as it is."""
        self.comm.broadcast(encode(AgreeOnLate()))
        try:
            self.worker.agree_on_late()
        except WeightSyncError:
            if error is not None and not self.worker.is_own_error(error):
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
        """Transfer after a Begin `apart`, on all ranks. Rank 0 only, which raises its own error."""
        with self._observed(Transfer()) if self.observers else nullcontext():
            try:
                self.comm.broadcast(encode(Transfer()))
                # The others begin to wait for the End before they transfer: this notices a death
                # until then. A later one is noticed by the receivers that read from that rank, and
                # by the next word of this one.
                self.comm.expect()
                self.worker.transfer_apart(check)
            except BaseException as exc:
                self.worker.skip_transfer(exc)
                raise

    def check_same_call(self, call: str, arguments: Mapping[str, str]) -> None:
        """Raise on all ranks unless all make the same call, with the same arguments. Collective.

        The others wait for rank 0 when they `serve` next, and raise there.
        """
        if self.comm.size == 1:
            return
        while self._is_in_call and not self.comm.broken:
            self._end_left_call()
        self._words_before = self.comm.words
        own = digest_of_call(call, arguments)
        self._call, self._reply = (call, arguments), own
        if self.leads and any(digest != own for digest in self.comm.collect(own)):
            self.comm.broadcast(encode(Compare()))
            compare_arguments(call, arguments, self.comm)

    @property
    def _is_in_call(self) -> bool:
        """Whether this rank is in a call that rank 0 has not ended, as far as this rank knows.

        Told by what it has heard, so that no interrupt comes between that and this.
        """
        if self._words_before is None:
            return False
        if self.comm.words == self._words_before:
            return True
        heard = self._heard
        return not isinstance(heard, Compare) and not (
            isinstance(heard, Finished) and not heard.goes_on
        )

    @property
    def _heard(self) -> AnyCommand | None:
        """The last command, as far as this rank has heard it; None before the first."""
        return decode_command(self.comm.heard) if self.comm.heard else None

    def _end_left_call(self) -> None:
        """End the call that an interrupt made this rank leave, in which the others still are.

        With an error, unless its bytes have been sent: the tensors may be others now.
        """
        left = TransferCancelled("a rank left the call, by an interrupt")
        if self.leads:
            self.finish(self.version, error=left)
            return
        words = self.comm.words
        self.worker.fault = left
        try:
            if isinstance(self._heard, Transfer) and self.worker.is_apart:
                self.worker.skip_transfer(left)
            self.serve()
        except WeightSyncError:
            if self.comm.words == words:
                raise
        finally:
            self.worker.fault = None

    def finish(
        self,
        version: int,
        *,
        report: SyncReport | None = None,
        error: BaseException | None = None,
        goes_on: bool = False,
    ) -> None:
        """Make the other ranks return from `serve`, with the report or the error. Rank 0 only.

        `goes_on` where they `serve` again in the same call of the user.
        """
        self.version = version
        if self.comm.size > 1:
            problem = to_problem(error) if error is not None else None
            finished = Finished(version=version, report=report, problem=problem, goes_on=goes_on)
            self.comm.broadcast(encode(finished))

    def serve(self) -> Finished:
        """Execute rank 0's commands until its call ends. Raises the error of rank 0's call."""
        own: BaseException | None = None
        while True:
            reply, self._reply = self._reply, b""
            command = decode_command(self.comm.broadcast(reply=reply))
            match command:
                case Finished():
                    break
                case Compare():
                    compare_arguments(*self._call, self.comm)
                case AgreeOnLate():
                    try:
                        self.worker.agree_on_late()
                    except WeightSyncError as exc:
                        own = exc
                case Transfer() if self.worker.is_apart:
                    self.comm.expect()  # the command to end, so that the death of rank 0 is noticed
                    try:
                        with suppress(Exception):  # raised at the End, with the other ranks
                            self.worker.transfer_apart(lambda: None)
                    except BaseException as exc:  # an interrupt: they hear of it at the End, too
                        self.worker.skip_transfer(exc)
                        with suppress(WeightSyncError):
                            self.serve()
                        raise
                case _:
                    answer, error = self._answer(command, lambda: None)
                    if error is not None and not isinstance(error, Exception):
                        self.comm.expect(encode(answer))  # the next call of this rank ends this one
                        raise error
                    self._reply = encode(answer)
                    own = error or own
        self.version = command.version
        if command.problem is not None:
            raise from_problem(command.problem) from (own and own.__cause__)
        return command

    def close(self) -> None:
        """Free this rank's memory, and leave the group."""
        self.worker.close()
        self.worker.drop_snapshot()
        self.comm.close()

    def _answer(
        self, command: AnyCommand, check: Callable[[], None]
    ) -> tuple[CommandResult, BaseException | None]:
        """Execute a command on this rank; return its result, and its error."""
        error: BaseException | None = None
        try:
            answer = self.worker.do(command, check)
        except BaseException as exc:  # noqa: BLE001  # raised by the caller, after the reply
            error, answer = exc, CommandResult(problem=to_problem(exc))
        if isinstance(command, Begin) and command.apart:
            self.worker.note_late(error)
        return answer, error

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


def are_alike(answers: Iterable[CommandResult]) -> bool:
    """Whether all ranks have begun to send a delta, or none has."""
    return len({answer.delta is None for answer in answers}) == 1


def _failed_apart(command: AnyCommand, answers: Iterable[CommandResult]) -> bool:
    """Whether a rank has failed in a step that each did apart, before it replied."""
    if isinstance(command, Begin) and command.apart:
        return any(answer.problem is not None for answer in answers)
    return any(answer.is_late for answer in answers)


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
