"""What a check of `weightsync doctor` finds; checks run at once, and none of them for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: a warning costs speed or a path, a problem stops weightsync from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was seen, and what to do about it.

    `works` is said by the checks that try a path, and that have its name.
    """

    check: str
    level: Level
    seen: str
    remedy: str = ""
    works: bool | None = None

    def to_dict(self) -> dict[str, object]:
        """Return it as plain data."""
        return {**asdict(self), "level": self.level.value}


def ok(check: str, seen: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, seen)


def warning(check: str, seen: str, remedy: str) -> Finding:
    """Something costs speed, or a path that another one replaces."""
    return Finding(check, Level.WARNING, seen, remedy)


def problem(check: str, seen: str, remedy: str) -> Finding:
    """Something will fail."""
    return Finding(check, Level.PROBLEM, seen, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """A function that looks at one thing, and how long it may take."""

    name: str
    look: Callable[[], Sequence[Finding]]
    limit_s: float


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run all checks at once, yield what they find in their order.

    A check that raises, or takes longer than its limit, is a problem of its own and not an error.
    """
    started = time.monotonic()
    running = [(check, _start(check)) for check in checks]
    for check, answers in running:
        left = started + check.limit_s - time.monotonic()
        try:
            yield from answers.get(timeout=max(left, 0.001))
        except queue.Empty:
            yield problem(
                check.name,
                f"this check did not end within {check.limit_s:g} s",
                "look for what hangs: a driver, a mount, a name server",
            )


def _start(check: Check) -> queue.Queue[Sequence[Finding]]:
    answers: queue.Queue[Sequence[Finding]] = queue.Queue()
    # A daemon, or a check that hangs would keep the process from ending.
    thread = threading.Thread(target=lambda: answers.put(_look(check)), daemon=True)
    thread.start()
    return answers


def _look(check: Check) -> Sequence[Finding]:
    try:
        return check.look()
    except Exception as exc:  # noqa: BLE001 - a check that crashes is a finding
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        return [problem(check.name, f"this check failed: {text}", "report it, with this line")]
