"""The context of child processes: forked from a server that has loaded torch and the like once.

A spawned child needs more than a second of computing for that.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
_loaded: list[str] = []


def load_beforehand(*modules: str) -> None:
    """Add modules that the server loads. Called at import, before the first test starts the
    server."""
    _loaded.extend(modules)
    CONTEXT.set_forkserver_preload(_loaded)


load_beforehand("weightsync", "torch.distributed")
