"""A private torch.distributed group: the only file that knows ProcessGroupGloo and TCPStore."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Work as TorchWork

from weightsync.errors import BackendUnavailableError, ConnectError, TransferError, TransferTimeout
from weightsync.shm.addresses import source_address

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """`call`, begun in a daemon thread, which it keeps for as long as it lasts.

    What comes too late is dropped there.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weightsync-ask", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether it still waits."""
        return self._thread.is_alive()

    def result(self, timeout_s: float | None) -> T:
        """Return what the call returns, or raise what it raises; TimeoutError after `timeout_s`."""
        self._thread.join(timeout_s)
        with self._lock:
            self._given_up = True
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its frames hold it
            if not self._answer:
                raise TimeoutError(f"no answer within {timeout_s or 0:g} s")
            return self._answer.pop()

    def _run(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            answer = call()
        except BaseException as exc:  # noqa: BLE001 # raised where the result is waited for
            self._error = exc
            return
        with self._lock:
            if not self._given_up:
                self._answer.append(answer)


_ports: set[int] = set()


def keep_from_children(port: int) -> None:
    """Children forked from now on have no socket at this local TCP port."""
    _ports.add(port)


def let_children_have(port: int) -> None:
    """The port is no longer ours. Idempotent."""
    _ports.discard(port)


def _close_in_child() -> None:
    if not _ports:
        return
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if _local_port(fd) in _ports:
            # Not closed: torch would later close whatever got the number.
            os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
    _ports.clear()


def _local_port(fd: int) -> int | None:
    with suppress(OSError):
        if not Path(f"/proc/self/fd/{fd}").readlink().name.startswith("socket:"):
            return None
        ours = socket.socket(fileno=fd)
        try:
            if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM:
                return int(ours.getsockname()[1])
        finally:
            ours.detach()
    return None


os.register_at_fork(after_in_child=_close_in_child)


_DATA_LANES = 2
HEADER_LANE = _DATA_LANES
"""A lane is a connection with a thread of Gloo's own. Heads overtake the bytes before them."""

_LANES = _DATA_LANES + 1
_POLL_S = 0.01
_BREAK_S = 0.001
_GRACE_S = 0.3
_ANSWER_S = 3.0
"""How long the store of another host may take to answer: it has nothing else to do."""
_BROKEN = "broken"
_LATE, _LOST = "late", "lost"
_FOREVER = timedelta(days=365)
_KEEPALIVE_S = 10


def data_lane(chunk: int) -> int:
    """Which lane a chunk takes: two of them keep a link busier than one (measured: 1.2 times)."""
    return chunk % _DATA_LANES


class _PointToPoint(Protocol):
    """The methods of ProcessGroupGloo that torch's own type stubs leave out."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> TorchWork: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> TorchWork: ...


class Work:
    """A send or receive at work; its tensor is in use until `wait` returned."""

    def __init__(self, work: TorchWork) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done. A timeout breaks the whole group, as every failure does.

        Raises TransferTimeout or TransferError without a name: the caller knows whose it was.
        """
        limit = _FOREVER if timeout_s is None else timedelta(seconds=timeout_s)
        try:
            self._work.wait(limit)
        except RuntimeError as exc:
            text = str(exc).partition("\n")[0]
            if "Timed out" in text:
                raise TransferTimeout(f"nothing moved for {timeout_s:g} s") from exc
            raise TransferError(_reason(text)) from exc


class LivenessSocket:
    """A connection to the sender's store that carries nothing: it ends when the sender does."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        try:
            self._socket = socket.create_connection((address, port), timeout=timeout_s)
        except OSError as exc:
            raise ConnectError(f"{address}:{port} cannot be reached: {exc}") from exc
        for option, value in (
            (socket.TCP_KEEPIDLE, _KEEPALIVE_S),
            (socket.TCP_KEEPINTVL, _KEEPALIVE_S),
            (socket.TCP_KEEPCNT, 3),
        ):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setblocking(False)

    def holds(self) -> bool:
        """Whether the other end is there, as far as is known; never waits."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Let go. Idempotent."""
        self._socket.close()


class GroupRendezvous:
    """Where the members of one epoch find each other: a store, and who has come.

    `host` binds and serves it; `reach` connects to it. Keys of another epoch are never seen. torch
    writes a page to stderr when it finds the server gone, so the lifeline is looked at before. One
    that is there, but silent, would hold a caller for ever. So a question to it takes at most 3 s,
    and further ones return at once until that one is answered. A method may ask several at a time.
    """

    def __init__(
        self,
        store: TCPStore,
        address: str,
        port: int,
        epoch: int,
        lifeline: LivenessSocket | None = None,
    ) -> None:
        self.lifeline = lifeline
        self.address = address
        self.port = port
        self._server = store
        self._epoch = epoch
        self._unanswered: BoundedCall[Any] | None = None
        self._asking = threading.Lock()
        self._ended = False
        self.store = PrefixStore(f"weightsync/{epoch}", store)

    @classmethod
    def host(cls, address: str, *, epoch: int, timeout_s: float) -> GroupRendezvous:
        """Bind a free port of `address`, and serve the store there. Raises ConnectError."""
        require_gloo()
        family = _family(address)
        try:
            with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as bound:
                bound.bind((address, 0))
                bound.listen(1024)
                port = bound.getsockname()[1]
                store = _store(address, port, timeout_s, listen_fd=bound.detach())
                keep_from_children(port)
        except OSError as exc:
            raise ConnectError(
                f"cannot listen on {address}: {exc}; give an address of this host"
            ) from exc
        return cls(store, address, port, epoch)

    @classmethod
    def reach(cls, address: str, port: int, *, epoch: int, timeout_s: float) -> GroupRendezvous:
        """Connect to the store of another host. Raises ConnectError within `timeout_s`."""
        require_gloo()
        lifeline = LivenessSocket(address, port, timeout_s)
        try:
            return cls(_store(address, port, timeout_s), address, port, epoch, lifeline)
        except BaseException:
            lifeline.close()
            raise

    def enter(self, rank: int, timeout_s: float) -> None:
        """Say that `rank` is here, and wait until everybody is. Raises TransferTimeout."""
        deadline = time.monotonic() + timeout_s
        self._ask(lambda: self.store.set(f"here/{rank}", ""))
        while self._served() and not self._ask(lambda: self.store.check(["complete"])):
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    f"the private group (epoch {self._epoch}) at {self.address}:{self.port} was "
                    f"not complete within {timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        if not self._served():
            raise TransferError(
                f"the sender at {self.address}:{self.port} gave its private group (epoch "
                f"{self._epoch}) up before all members were in"
            )

    def gather(
        self, ranks: Sequence[int], timeout_s: float, *, given_up: Callable[[], bool]
    ) -> list[int]:
        """Wait until all `ranks` are here, and let them go on; return who is missing."""
        deadline = time.monotonic() + timeout_s
        missing = list(ranks)
        while missing and not given_up() and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
            time.sleep(_POLL_S if missing else 0)
        if not missing:
            self.store.set("complete", "")
        return missing

    def is_here(self, rank: int) -> bool:
        """Whether `rank` has entered; asked by the store's own process."""
        return self.store.check([f"here/{rank}"])

    def give_up(self, update: int) -> None:
        """Let members know that updates up to this one end, whatever of them they wait for."""
        self._ask(lambda: self.store.set("over", str(update)))

    def given_up(self, update: int) -> bool:
        """Whether `give_up` was called for this update, or the store is gone."""
        over = self._read("over")
        return not self._served() or (over is not None and int(over) >= update)

    def show(self, rank: int, signs: Sequence[int]) -> None:
        """Let the sender see the signs of life of the readers of one host, by their places."""
        self._ask(lambda: self.store.set(f"signs/{rank}", " ".join(map(str, signs))))

    def signs(self, rank: int) -> list[int]:
        """Return what `show` was last given there; empty before, and where it is no list."""
        try:
            return [int(sign) for sign in (self._read(f"signs/{rank}") or "").split()]
        except ValueError:  # anybody on this network may write into the store
            return []

    def report(self, error: TransferError) -> TransferError:
        """Leave word of what broke the group; return what its first witness said.

        A connection that broke may have been closed by somebody who knows better, and who is
        given a moment to say so; a timeout is first-hand.
        """
        if not isinstance(error, TransferTimeout):
            deadline = time.monotonic() + _GRACE_S
            time.sleep(_POLL_S)
            while self._served() and self.reported() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        kind = _LATE if isinstance(error, TransferTimeout) else _LOST
        self._ask(lambda: self.store.compare_set(_BROKEN, "", f"{kind} {error}"))
        first = self.reported()
        return error if first is None or str(first) == str(error) else first

    def reported(self) -> TransferError | None:
        """Return what broke the group, as its first witness told it: a timeout is one here, too."""
        told = self._read(_BROKEN)
        if told is None:
            return None
        kind, _, text = told.partition(" ")
        return TransferTimeout(text) if kind == _LATE else TransferError(text)

    def end(self) -> None:
        """Have the store's own process ask it nothing more: no thread does when this returns."""
        with self._asking:
            self._ended = True

    def close(self) -> None:
        """Let go of the connection that shows the sender's life, or forget the port. Idempotent."""
        if self.lifeline is not None:
            self.lifeline.close()
        else:
            let_children_have(self.port)

    def _served(self) -> bool:
        return self.lifeline is None or self.lifeline.holds()

    def _read(self, key: str) -> str | None:
        def read() -> str | None:
            there = self.store.check([key])
            return self.store.get(key).decode(errors="replace") if there else None

        return self._ask(read)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer; None when it is gone, or silent since it was last asked."""
        silent = self._unanswered is not None and self._unanswered.pending
        if silent or not self._served():
            return None
        with suppress(RuntimeError):
            if self.lifeline is None:  # it is this process' own
                with self._asking:
                    return None if self._ended else question()
            asked = BoundedCall(question)
            try:
                return asked.result(_ANSWER_S)
            except TimeoutError:
                self._unanswered = asked
        return None


class PrivateGroup:
    """One process's place in the group of a GroupRendezvous whose members are all there.

    Raises TransferError when the connections cannot be made within `timeout_s`.
    """

    def __init__(self, meeting: GroupRendezvous, rank: int, size: int, timeout_s: float) -> None:
        own = meeting.address if rank == 0 else _own_address(meeting.address)
        gloo: Any = dist.ProcessGroupGloo  # torch types half of what its own code uses of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own) for _ in range(_LANES)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # of collectives, of which there are none
        connected: BoundedCall[_PointToPoint] = BoundedCall(
            lambda: gloo(meeting.store, rank, size, options)
        )
        try:
            self._group: _PointToPoint | None = connected.result(2 * timeout_s)
        except (RuntimeError, TimeoutError) as exc:
            raise TransferError(
                f"the private group could not be connected from {own}: {_reason(str(exc))}"
            ) from exc
        self._others = [other for other in range(size) if other != rank]
        self._scratch = torch.zeros(1, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor, rank: int, lane: int) -> Work:
        """Send `uint8[n]` of host memory; the same lane keeps its order."""
        return self._start(lambda group: group.send([tensor], rank, lane))

    def receive(self, tensor: torch.Tensor, rank: int, lane: int) -> Work:
        """Receive exactly `uint8[n]` into host memory."""
        return self._start(lambda group: group.recv([tensor], rank, lane))

    def abort(self) -> None:
        """Make every operation fail, here at once and at the others as they notice. Idempotent."""
        for lane in range(_LANES if self._group is not None else 0):
            self._abort_connections(_LANES + lane)  # a tag on which nobody sends

    def _abort_connections(self, tag: int) -> None:
        """A wait that runs out closes all connections of its lane, and wakes whoever waits there.

        One whose own connection broke before ends at once and closes none.
        """
        for rank in self._others:
            try:
                self.receive(self._scratch, rank, tag).wait(_BREAK_S)
            except TransferTimeout:
                return
            except TransferError:
                continue

    def close(self) -> None:
        """End it; nobody may wait any more (`abort` sees to that). Idempotent."""
        self._group = None

    def _start(self, call: Callable[[_PointToPoint], TorchWork]) -> Work:
        group = self._group
        if group is None:
            raise TransferError("the private group was closed")
        try:
            return Work(call(group))
        except RuntimeError as exc:
            raise TransferError(_reason(str(exc))) from exc


def require_gloo() -> None:
    """Raise BackendUnavailableError where torch was built without Gloo."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise BackendUnavailableError(
            f"torch {torch.__version__} is built without Gloo, which the path gloo needs"
        )


def _store(address: str, port: int, timeout_s: float, *, listen_fd: int | None = None) -> TCPStore:
    made = BoundedCall(
        lambda: TCPStore(
            address,
            port,
            is_master=listen_fd is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listen_fd,
        )
    )
    try:
        return made.result(timeout_s if listen_fd is None else None)
    except (RuntimeError, TimeoutError) as exc:
        raise ConnectError(
            f"the private group's store at {address}:{port} cannot be reached: {_reason(str(exc))}"
        ) from exc


def _own_address(address: str) -> str:
    """Return the address from which this host reaches `address`."""
    try:
        return source_address(address, family=_family(address))
    except OSError as exc:
        raise ConnectError(f"there is no way from here to {address}: {exc}") from exc


def _family(address: str) -> socket.AddressFamily:
    """Return the family of an IP address; a name counts as IPv4."""
    try:
        v6 = ipaddress.ip_address(address).version == 6
    except ValueError:
        v6 = False
    return socket.AF_INET6 if v6 else socket.AF_INET


def _reason(text: str) -> str:
    """Return what a person wants to know of torch's message."""
    line = text.partition("\n")[0]
    line = line.partition("] ")[2] if line.startswith("[") else line
    return line.partition(". This is typically")[0][:300] or "the connection broke"


_END_S = 2.0
"""For all of them together: a peer that is stopped may hold a thread, and does not wake it soon."""


class EndsAtExit(Protocol):
    """One place in a private group, with threads of its own."""

    def end(self, timeout_s: float) -> None:
        """Leave the group; wait no longer than that for the threads to come back."""


_members: WeakSet[EndsAtExit] = WeakSet()
_lock = threading.Lock()


def end_at_exit(member: EndsAtExit) -> None:
    """Have `member.end` called when the interpreter exits, unless it is gone by then.

    Not in forked children, which have none of its threads.
    """
    with _lock:
        _members.add(member)


def _end_all() -> None:
    """End all members, also when one of them raises or Ctrl-C comes."""
    deadline = time.monotonic() + _END_S
    with _lock:
        members = list(_members)
    with ExitStack() as ends:
        for waiting, member in enumerate(members, 1):  # the last of them is ended first
            ends.callback(_end, member, deadline, waiting)


def _end(member: EndsAtExit, deadline: float, waiting: int) -> None:
    """Leave a share of the time to each of those that wait for their end."""
    member.end(max(0.0, deadline - time.monotonic()) / waiting)


def _forget_in_child() -> None:
    _members.clear()
    _lock.release()


atexit.register(_end_all)
os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_forget_in_child,
)
