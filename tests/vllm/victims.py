"""Trainers that are killed: what runs in their processes."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from transformers import Qwen3ForCausalLM

import weightsync as ws
from tests.vllm.tiny import change
from weightsync.integrations.vllm.server import VllmHttpControl

REHEARSALS = 3


def send_until_killed(url: str, folder: str, seed: int, fatal: str, pipe: Connection) -> None:
    """Say how long updates take, and send another one; be killed before its call of `fatal`.

    Without `fatal` the test kills this process whenever it likes.
    """
    model = _load(folder)
    seconds = []
    with ws.connect(cast(Any, model), to=url, timeout_s=60) as sender:
        for i in range(REHEARSALS):
            change(model, seed=seed + i)
            started = time.perf_counter()
            sender.send_weights()
            seconds.append(time.perf_counter() - started)
        change(model, seed=seed + REHEARSALS)
        if fatal:
            _die_before(fatal)
        pipe.send(min(seconds))
        sender.send_weights()
        pipe.send("done")
        time.sleep(60)


def _load(folder: str) -> torch.nn.Module:
    loaded = cast(Any, Qwen3ForCausalLM).from_pretrained(folder, dtype=torch.float32)
    return cast(torch.nn.Module, loaded)


def _die_before(fatal: str) -> None:
    """Have this process killed when it is about to make the call `fatal`, of its next update."""
    call, _, count = fatal.partition(" ")
    left = int(count or 1)
    request = VllmHttpControl._request

    def counted(control: VllmHttpControl, verb: str, *args: Any, **kwargs: Any) -> object:
        nonlocal left
        if verb.partition("?")[0] == call:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return request(control, verb, *args, **kwargs)

    cast(Any, VllmHttpControl)._request = counted
