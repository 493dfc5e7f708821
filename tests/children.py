"""The context of child processes: forked from a server that has loaded torch and the like once.

A spawned child needs more than a second of computing for that.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
_loaded: list[str] = []


def load_beforehand(*modules: str) -> None:
    """Have the server load these too; called by modules, before it is started by the first test."""
    _loaded.extend(modules)
    CONTEXT.set_forkserver_preload(_loaded)


load_beforehand("weightsync", "torch.distributed")
