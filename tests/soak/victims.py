"""Functions of the processes that are killed."""

from __future__ import annotations

import gc
import json
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import weightsync as ws
from tests.children import load_beforehand
from tests.e2e import models
from tests.soak.boundaries import Boundaries

load_beforehand("tests.soak.victims")

PATHS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True, "bucket_nbytes": 80 << 10, "num_buckets": 2},
    "unpacked": {"packed": False},
}
"""The model `plain` fills a dozen buckets, or is two runs of registered memory."""
TIMEOUT_S = 15.0


def send_and_die(
    urls: list[str], path: str, version: int, fatal: str, passed: Path | None = None
) -> None:
    """Connect and send `version`; die at `fatal`, or write the list of boundaries."""
    boundaries = Boundaries(fatal).of_trainer()
    model = models.make("plain", seed=version)
    with ws.connect(model, to=urls, timeout_s=TIMEOUT_S, **PATHS[path]) as sender:
        sender.send_weights(version)
    if passed is not None:
        passed.write_text(json.dumps(boundaries.passed), encoding="utf-8")


_here: list[Boundaries] = []


def arm(fatal: str) -> None:
    """From now on this process of receivers counts, and dies at `fatal`."""
    if not _here:
        _here.append(Boundaries().of_receiver())
    _here[0].begin(fatal)


def without_collector(_: object) -> None:
    """Disable the garbage collector: mappings must not wait for a collection of cycles."""
    gc.collect()
    gc.disable()


def with_collector(_: object) -> None:
    gc.enable()


def passed(_: object) -> list[str]:
    """Return the boundaries that this process of receivers passed since it was armed."""
    return _here[0].passed


def send_until_killed(url: str, token: str, path: str, seed: int, pipe: Connection) -> None:
    """Print the duration of an update of `weightsync serve`, and send others until killed."""
    from weightsync.serve.model import make_tiny_model  # seconds of imports that no other needs

    model = make_tiny_model(seed=seed).model
    with ws.connect(model, to=url, token=token, timeout_s=TIMEOUT_S, **PATHS[path]) as sender:
        sender.send_weights()
        started = time.perf_counter()
        sender.send_weights()
        pipe.send(time.perf_counter() - started)
        while True:
            sender.send_weights()
