"""An interrupt (Ctrl-C) at any point of a function or a file at which CPython looks for signals."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_LOOKS_FOR_SIGNALS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


class Interrupt:
    """Raises KeyboardInterrupt at the point number `at`, of the functions with this name.

    CPython looks for signals after a call and at a jump back. `where` is a name, or the end of a
    path (`ranks/comm.py`): all functions of that file. `raised` is where it was raised.
    """

    def __init__(self, where: str, at: int) -> None:
        self.raised = ""
        self._where, self._left = where, at
        self._names: dict[CodeType, dict[int, str]] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Run the block with the interrupt, which leaves it as KeyboardInterrupt, or not at all."""
        traced = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(traced)

    def __call__(self, frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if "/weightsync/" not in code.co_filename:
            return None
        if self._where != code.co_name and not code.co_filename.endswith(self._where):
            return None
        if code not in self._names:
            self._names[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = ""

        def follow(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "opcode":
                if before in _LOOKS_FOR_SIGNALS:
                    self._left -= 1
                    if not self._left:
                        self.raised = f"{code.co_name}:{frame.f_lineno}"
                        raise KeyboardInterrupt
                before = self._names[code].get(frame.f_lasti, "")
            return follow

        return follow
