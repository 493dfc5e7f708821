"""A private torch.distributed group, between a sender and one receiver of each host."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Work as TorchWork

from weightsync.errors import BackendUnavailableError, ConnectError, TransferError, TransferTimeout
from weightsync.shm.addresses import source_address

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """Runs `call` in a daemon thread, so that a wait for its result can time out.

    A result that arrives after the timeout is dropped in the thread.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="weightsync-bounded-call", daemon=True
        )
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether the call still runs."""
        return self._thread.is_alive()

    def result(self, timeout_s: float | None) -> T:
        """Return the result of the call, or raise its error; TimeoutError after `timeout_s`."""
        self._thread.join(timeout_s)
        with self._lock:
            self._given_up = True
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its frames refer to it
            if not self._answer:
                raise TimeoutError(f"no answer within {timeout_s or 0:g} s")
            return self._answer.pop()

    def _run(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            answer = call()
        except BaseException as exc:  # noqa: BLE001 # raised by `result`
            self._error = exc
            return
        with self._lock:
            if not self._given_up:
                self._answer.append(answer)


_ports: set[int] = set()


def close_in_children(port: int) -> None:
    """Close the sockets of this local TCP port in children that are forked from now on."""
    _ports.add(port)


def keep_in_children(port: int) -> None:
    """Stop to close sockets of this port in forked children. Idempotent."""
    _ports.discard(port)


def _close_in_child() -> None:
    if not _ports:
        return
    devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if _local_port(fd) in _ports:
            # Not closed: torch closes this descriptor later, whatever file has its number then.
            os.dup2(devnull, fd, inheritable=False)
    os.close(devnull)
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
"""A lane is a connection with a thread of Gloo. Headers do not wait behind the bytes of chunks."""

_LANES = _DATA_LANES + 1
_POLL_S = 0.01
_BREAK_S = 0.001
_GRACE_S = 0.3
_ANSWER_S = 3.0
"""Seconds that the store of another host may take to reply. It has no other work."""
_BROKEN = "broken"
_LATE, _LOST = "late", "lost"
_FOREVER = timedelta(days=365)
_KEEPALIVE_S = 10


def data_lane(chunk: int) -> int:
    """Return the lane of a chunk. Two lanes have 1.2 times the throughput of one (measured)."""
    return chunk % _DATA_LANES


class _PointToPoint(Protocol):
    """The methods in use of ProcessGroupGloo, which torch's type stubs lack."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> TorchWork: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> TorchWork: ...


class Work:
    """A send or receive in progress. Its tensor is in use until `wait` has returned."""

    def __init__(self, work: TorchWork) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the operation is done. A timeout or error breaks the whole group.

        Raises TransferTimeout or TransferError, to which the caller adds the name of the peer.
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
    """A connection to the sender's store without data. It breaks when the sender's process ends."""

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
        """Whether the connection is open, as far as is known; never blocks."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()


class GroupRendezvous:
    """The store in which the members of one epoch rendezvous and exchange their state.

    `host` binds and serves the store; `reach` connects to it. Keys are separate for each epoch.
    torch writes a long message to stderr when the server is gone, so the liveness socket is checked
    before each call. A server that is stopped would block a caller forever: a call to the store
    takes at most 3 s, and further calls return None at once until that call has returned. A method
    may make several calls.
    """

    def __init__(
        self,
        store: TCPStore,
        address: str,
        port: int,
        epoch: int,
        liveness: LivenessSocket | None = None,
    ) -> None:
        self.liveness = liveness
        self.address = address
        self.port = port
        self._server = store
        self._epoch = epoch
        self._pending_call: BoundedCall[Any] | None = None
        self._store_lock = threading.Lock()
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
                close_in_children(port)
        except OSError as exc:
            raise ConnectError(
                f"cannot listen on {address}: {exc}; give an address of this host"
            ) from exc
        return cls(store, address, port, epoch)

    @classmethod
    def reach(cls, address: str, port: int, *, epoch: int, timeout_s: float) -> GroupRendezvous:
        """Connect to the store of another host. Raises ConnectError within `timeout_s`."""
        require_gloo()
        liveness = LivenessSocket(address, port, timeout_s)
        try:
            return cls(_store(address, port, timeout_s), address, port, epoch, liveness)
        except BaseException:
            liveness.close()
            raise

    def enter(self, rank: int, timeout_s: float) -> None:
        """Register `rank`, and wait until all members have entered.

        Raises TransferTimeout, or TransferError where the sender closes the group before.
        """
        deadline = time.monotonic() + timeout_s
        self._call_store(lambda: self.store.set(f"here/{rank}", ""))
        while self._served() and not self._call_store(lambda: self.store.check(["complete"])):
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
        """Wait until all `ranks` have entered, and release them; return the missing ranks."""
        deadline = time.monotonic() + timeout_s
        missing = list(ranks)
        while missing and not given_up() and time.monotonic() < deadline:
            missing = self.missing(missing)
            time.sleep(_POLL_S if missing else 0)
        if not missing:
            self.store.set("complete", "")
        return missing

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` that have not entered. Called in the store's own process."""
        return [rank for rank in ranks if not self.store.check([f"here/{rank}"])]

    def give_up(self, update: int) -> None:
        """Publish that updates up to this epoch are over, for members that wait for them."""
        self._call_store(lambda: self.store.set("over", str(update)))

    def given_up(self, update: int) -> bool:
        """Whether `give_up` was called for this update, or the store is gone."""
        over = self._read("over")
        return not self._served() or (over is not None and int(over) >= update)

    def show(self, rank: int, signs: Sequence[int]) -> None:
        """Publish the signs of life of one host's readers, by reader index, for the sender."""
        self._call_store(lambda: self.store.set(f"signs/{rank}", " ".join(map(str, signs))))

    def signs(self, rank: int) -> list[int]:
        """Return the signs that `show` published last; empty before, and for invalid values."""
        try:
            return [int(sign) for sign in (self._read(f"signs/{rank}") or "").split()]
        except ValueError:  # any process on this network may write into the store
            return []

    def report(self, error: TransferError) -> TransferError:
        """Publish the error that broke the group, and return the error that was published first.

        A broken connection may be the consequence of another member's error, so that member has
        _GRACE_S seconds to publish its error first. A timeout is published at once.
        """
        if not isinstance(error, TransferTimeout):
            deadline = time.monotonic() + _GRACE_S
            time.sleep(_POLL_S)
            while self._served() and self.reported() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        kind = _LATE if isinstance(error, TransferTimeout) else _LOST
        self._call_store(lambda: self.store.compare_set(_BROKEN, "", f"{kind} {error}"))
        first = self.reported()
        return error if first is None or str(first) == str(error) else first

    def reported(self) -> TransferError | None:
        """Return the first published error that broke the group, of its class; None without one."""
        published = self._read(_BROKEN)
        if published is None:
            return None
        kind, _, text = published.partition(" ")
        return TransferTimeout(text) if kind == _LATE else TransferError(text)

    def end(self) -> None:
        """Stop all calls to the store in its own process. No call is in progress afterwards."""
        with self._store_lock:
            self._ended = True

    def close(self) -> None:
        """Close the liveness socket, or release the port in the store's own process. Idempotent."""
        if self.liveness is not None:
            self.liveness.close()
        else:
            keep_in_children(self.port)

    def _served(self) -> bool:
        return self.liveness is None or self.liveness.holds()

    def _read(self, key: str) -> str | None:
        def read() -> str | None:
            there = self.store.check([key])
            return self.store.get(key).decode(errors="replace") if there else None

        return self._call_store(read)

    def _call_store(self, query: Callable[[], T]) -> T | None:
        """Return the result of a call to the store; None when it is gone or does not reply."""
        silent = self._pending_call is not None and self._pending_call.pending
        if silent or not self._served():
            return None
        with suppress(RuntimeError):
            if self.liveness is None:  # the store is in this process
                with self._store_lock:
                    return None if self._ended else query()
            call = BoundedCall(query)
            try:
                return call.result(_ANSWER_S)
            except TimeoutError:
                self._pending_call = call
        return None


class PrivateGroup:
    """One process's rank in a private group. All members have entered the rendezvous before.

    Raises TransferError when the connections cannot be made within `timeout_s`.
    """

    def __init__(self, rendezvous: GroupRendezvous, rank: int, size: int, timeout_s: float) -> None:
        own = rendezvous.address if rank == 0 else _own_address(rendezvous.address)
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack half of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own) for _ in range(_LANES)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # for collectives, which are not used
        connected: BoundedCall[_PointToPoint] = BoundedCall(
            lambda: gloo(rendezvous.store, rank, size, options)
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
        """Send `uint8[n]` of host memory. A lane keeps the order of its sends."""
        return self._start(lambda group: group.send([tensor], rank, lane))

    def receive(self, tensor: torch.Tensor, rank: int, lane: int) -> Work:
        """Receive exactly `uint8[n]` into host memory."""
        return self._start(lambda group: group.recv([tensor], rank, lane))

    def abort(self) -> None:
        """Make every operation fail: here at once, elsewhere when it is noticed. Idempotent."""
        for lane in range(_LANES if self._group is not None else 0):
            self._abort_connections(_LANES + lane)  # a tag that no member uses

    def _abort_connections(self, tag: int) -> None:
        """Close all connections of a lane, by a wait that times out; this wakes all waits on it.

        A wait on a connection that is broken already fails at once, and closes none.
        """
        for rank in self._others:
            try:
                self.receive(self._scratch, rank, tag).wait(_BREAK_S)
            except TransferTimeout:
                return
            except TransferError:
                continue

    def close(self) -> None:
        """Release the group. No wait may be in progress: call `abort` before. Idempotent."""
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
        raise ConnectError(f"there is no route from this host to {address}: {exc}") from exc


def _family(address: str) -> socket.AddressFamily:
    """Return the family of an IP address; a name counts as IPv4."""
    try:
        v6 = ipaddress.ip_address(address).version == 6
    except ValueError:
        v6 = False
    return socket.AF_INET6 if v6 else socket.AF_INET


def _reason(text: str) -> str:
    """Return the useful part of a message of torch."""
    line = text.partition("\n")[0]
    line = line.partition("] ")[2] if line.startswith("[") else line
    return line.partition(". This is typically")[0][:300] or "the connection broke"
