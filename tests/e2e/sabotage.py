"""Faults inside a receiver's process: one step of it raises once, or is the process' last."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any, Literal

import weightsync as ws

Step = Literal["init", "start", "base", "open", "load", "finish"]
Act = Literal["raise", "die", "lose"]
LOOKS_BEFORE = 1


def arm(receiver: ws.WeightReceiver, step: Step, act: Act) -> None:
    """Make the next `step` fail: `base` where the weights in use are looked at for a delta, `open`
    where there is no memory for the update, `load` before any byte, `finish` after the swap.

    With `lose` as where no host has the bytes of the update any more.
    """
    session: Any = receiver._session
    owner, name = {
        "init": (session, "init"),
        "start": (session, "_start"),
        "base": (session.load_targets, "of_delta"),
        "open": (session, "_load_target"),
        "load": (session, "_check_not_aborted"),
        "finish": (session, "_clear_cache"),
    }[step]
    genuine = getattr(owner, name)
    calls = itertools.count()

    def fail(*args: object, **named: object) -> object:
        if step == "load" and next(calls) < LOOKS_BEFORE:
            return genuine(*args, **named)
        if act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(owner, name, genuine)
        if act == "lose":
            raise ws.SourceLostError(f"sabotage of {step}")
        raise RuntimeError(f"sabotage of {step}")

    setattr(owner, name, fail)
