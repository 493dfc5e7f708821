"""`python -m weightsync.cli.doctor_helper TASK …`: another process, which the doctor needs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from weightsync.cli.child import take_stdout
from weightsync.errors import WeightSyncError

LIMIT_S = 90
"""The kernel ends a process that takes longer, even in a call of a native library."""

_SYS_PIDFD_GETFD = 438  # the same number on every architecture

Send = Callable[[bytes], None]


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU that torch sees, by its device key."""

    ordinal: int
    key: str
    name: str
    total_nbytes: int


class TrialAnswer(msgspec.Struct, kw_only=True):
    """The result of one half of a backend's trial, or the reason why it failed."""

    value: Any = None
    why_not: str = ""


def offer_trial(send: Send, backend: str, path: str) -> None:
    """Send the offer of a backend's trial, and keep its memory until a line arrives."""
    # It imports torch, which takes a second; not every task needs it.
    from weightsync.backends.registry import get_backend  # noqa: PLC0415

    with ExitStack() as stack:
        _send_answer(send, lambda: stack.enter_context(get_backend(backend).offer_trial(path)))
        sys.stdin.buffer.readline()


def read_trial(send: Send, backend: str, path: str) -> None:
    """Read what the next line offers, and send what was done."""
    from weightsync.backends.registry import get_backend  # noqa: PLC0415  # as above

    made = get_backend(backend)
    offer = msgspec.json.decode(sys.stdin.buffer.readline())
    _send_answer(send, lambda: made.read_trial(path, offer))


def _send_answer(send: Send, call: Callable[[], Any]) -> None:
    try:
        answer = TrialAnswer(value=call())
    except WeightSyncError as exc:
        answer = TrialAnswer(why_not=str(exc) or type(exc).__name__)
    send(msgspec.json.encode(answer))


def list_gpus(send: Send) -> None:
    """Send a list of the GPUs that torch sees."""
    from weightsync.cuda.devices import describe  # noqa: PLC0415  # as above
    from weightsync.cuda.handles import local_gpu_keys  # noqa: PLC0415  # as above

    gpus = []
    for key, ordinal in local_gpu_keys().items():
        name, nbytes = describe(ordinal)
        gpus.append(Gpu(ordinal=ordinal, key=key, name=name, total_nbytes=nbytes))
    send(msgspec.json.encode(gpus))


def take_descriptor(send: Send, pid: str, descriptor: str) -> None:
    """Take a file descriptor of the process `pid`; send the reason why that failed, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(int(pid))
    taken = libc.syscall(_SYS_PIDFD_GETFD, process, int(descriptor), 0)
    send(msgspec.json.encode("" if taken >= 0 else os.strerror(ctypes.get_errno())))


TASKS: dict[str, Callable[..., None]] = {
    "offer": offer_trial,
    "read": read_trial,
    "list-gpus": list_gpus,
    "take": take_descriptor,
}


if __name__ == "__main__":
    signal.alarm(LIMIT_S)
    TASKS[sys.argv[1]](take_stdout(), *sys.argv[2:])
