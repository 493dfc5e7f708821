"""The memory address of a buffer, read-only buffers included."""

from __future__ import annotations

import ctypes
import mmap


class _View(ctypes.Structure):
    """Py_buffer, part of Python's stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0
_get = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_View))(("PyBuffer_Release", ctypes.pythonapi))


def buffer_address(buffer: memoryview | mmap.mmap) -> int:
    """Return the address of the first byte of contiguous memory; valid while `buffer` is alive."""
    view = _View()
    _get(buffer, ctypes.byref(view), _SIMPLE)  # raises BufferError
    try:
        return int(view.buf or 0)
    finally:
        _release(ctypes.byref(view))
