"""Functions of trainers in processes of their own: most of them are killed."""

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
    """Print the duration of updates, and send another one; die before its call of `fatal`.

    Without `fatal` the test kills this process at any time.
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
    """Make this process die before the call `fatal` of its next update."""
    call, _, count = fatal.partition(" ")
    left = int(count or 1)
    request = VllmHttpControl.request

    def counted(control: VllmHttpControl, verb: str, *args: Any, **kwargs: Any) -> object:
        nonlocal left
        if verb.partition("?")[0] == call:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return request(control, verb, *args, **kwargs)

    cast(Any, VllmHttpControl).request = counted


def send_adapter_until_killed(url: str, folder: str, seed: int, fatal: str = "") -> None:
    """Send an adapter, and die in the update of its next version, before its call `fatal`.

    By default when that version is staged and not in use.
    """
    from tests.vllm.adapted import adapt, train  # peft is needed by this victim alone

    model = adapt(_load(folder))
    with ws.connect(ws.AdapterSource(model, name="policy"), to=url, timeout_s=60) as sender:
        train(model, seed)
        sender.send_weights()
        train(model, seed + 1)
        _die_before(fatal or "collective_rpc 2")
        sender.send_weights()


def send_adapters_until_killed(url: str, folder: str, seed: int, pipe: Connection) -> None:
    """Tell the version that the server holds, and send new ones until the test kills this.

    The version that is `i` higher is of the seed that is `i` higher.
    """
    from tests.vllm.adapted import adapt, train

    model = adapt(_load(folder))
    with ws.connect(ws.AdapterSource(model, name="policy"), to=url, timeout_s=60) as sender:
        pipe.send(sender.version)
        for i in range(1, 1000):
            train(model, seed + i)
            sender.send_weights()


def plain_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT model's base, by their names without adapters."""
    found = model.get_base_model().state_dict()
    return {n.replace(".base_layer", ""): t for n, t in found.items() if "lora_" not in n}


def connect_set(model: Any, to: Any) -> ws.SetSender:
    """Return a sender of the base and the adapter of a PEFT model."""
    parts = [lambda: plain_state(model), ws.AdapterSource(model, name="policy")]
    return ws.connect_set(parts, to=to, timeout_s=60)


def train_set(model: Any, seed: int) -> None:
    """Change base and adapter as a training step would."""
    from tests.vllm.adapted import train

    change(model.get_base_model(), seed, "base_layer")
    train(model, seed)


def send_set_until_killed(url: str, folder: str, seed: int, fatal: str) -> None:
    """Send base and adapter, and die in their next update, before its call `fatal`."""
    from tests.vllm.adapted import adapt

    model = adapt(_load(folder))
    with connect_set(model, url) as sender:
        train_set(model, seed)
        sender.send_weights()
        train_set(model, seed + 1)
        _die_before(fatal)
        sender.send_weights()


def send_shards_of_adapter(
    rank: int, url: str, folder: str, seed: int
) -> tuple[dict[str, str], list[dict[int, int]]]:
    """Send the adapter of a seed, of which each rank has shards; return what was gathered.

    And for each receiver the bytes that it read from each rank.
    """
    from torch.distributed.fsdp import fully_shard

    from tests.vllm.adapted import adapt, train

    model = adapt(_load(folder))
    train(model, seed)
    for layer in [*model.get_base_model().model.layers, model]:
        fully_shard(layer)
    with ws.connect(ws.AdapterSource(model, name="shards"), to=url, timeout_s=60) as sender:
        report = sender.send_weights()
    return dict(report.gathered), [dict(receiver.sources) for receiver in report.receivers]
