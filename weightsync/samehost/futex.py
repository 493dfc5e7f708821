"""Sleep on a word of shared memory until another process says that it changed (futex(2))."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

_SYS_FUTEX = 202  # x86-64, the one machine that the rings work on
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_LOW_32 = 0xFFFFFFFF

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_futex_args = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_ulong,
)
_syscall.argtypes = _futex_args
_lock = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def fence() -> None:
    """Let no later load overtake an earlier store.

    Taking a lock is a locked instruction, which on x86-64 is a full fence (Intel SDM 3A, 9.2.3.9).
    """
    with _lock:
        pass


def sleep_on(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the low half of the u64 at `address` is that of `value`, or until `timeout_s`.

    Also returns on a signal or for no reason at all: look again. The comparison is the kernel's
    and comes after everything that this thread stored before.
    """
    whole = int(timeout_s)
    limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
    code = _syscall(_SYS_FUTEX, address, _WAIT, value & _LOW_32, ctypes.addressof(limit), None, 0)
    if code < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def wake(address: int) -> None:
    """Wake every process that sleeps on `address`."""
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)
