"""A trainer of several ranks: FSDP2 shards a model, and a vLLM server gets each step of it.

Rank 0 prints a line of JSON for each update: what was sent, and what the server has of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import requests
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import weightsync as ws
from tests.vllm.tiny import PROMPT, TOKENS, expected, held, largest_difference
from weightsync.tensors import as_bytes
from weightsync.transports.factory import TransportFactory
from weightsync.update.deltas import DeltaChoice
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.wire.messages import CheckReply, CheckRequest

STEPS = 3
FRAME_NBYTES = 1514


def load(folder: Path) -> Any:
    return cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()


def main(url: str, folder: Path, delta: DeltaChoice) -> None:
    dist.init_process_group("gloo")
    model, whole = load(folder), load(folder)
    for layer in [*model.model.layers, model]:
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    with ws.connect(model, to=url, delta=delta) as sender:
        for _ in range(STEPS):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            before = uplink_nbytes()
            report = sender.send_weights()
            left = [0] * dist.get_world_size()
            dist.all_gather_object(left, uplink_nbytes() - before)
            full = {
                name: cast("DTensor", tensor).full_tensor()
                for name, tensor in model.state_dict().items()
            }
            whole.load_state_dict(full)
            if dist.get_rank() == 0:
                print(json.dumps(compared(url, whole, report) | {"left": left}), flush=True)
            dist.barrier()
    dist.destroy_process_group()


def uplink_nbytes() -> int:
    """Return the bytes that have left this host, without those that TCP sent twice."""
    net = Path("/proc/self/net")  # of this host, where it is a namespace
    _, _, *devices = (net / "dev").read_text(encoding="ascii").splitlines()
    names, values = (
        line.split() for line in (net / "snmp").read_text("ascii").splitlines() if "Tcp:" in line
    )
    again = int(dict(zip(names, values, strict=True))["RetransSegs"])
    counted = dict(device.split(":") for device in devices)
    sent = (int(c.split()[8]) for name, c in counted.items() if name.strip() != "lo")
    return sum(sent) - again * FRAME_NBYTES


def compared(url: str, whole: Any, report: ws.SyncReport) -> dict[str, Any]:
    """Return how the server's weights and tokens differ from those of the full tensors."""
    wanted = {
        name: to_hex(mix64(as_bytes(tensor.detach().contiguous())))
        for name, tensor in held(whole).items()
    }
    transports = TransportFactory(None).every(url)
    each = [transport.call(CheckRequest(), timeout_s=60) for transport in transports]
    for transport in transports:
        transport.close()
    answer = requests.post(
        f"{url}/v1/completions",
        json={
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        timeout=60,
    )
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    tokens, logprobs = expected(whole)
    return {
        "version": report.version,
        "gathered": dict(report.gathered),
        "verified": report.verified,
        "sources": [dict(receiver.sources) for receiver in report.receivers],
        "nbytes": report.nbytes,
        "compared": len(wanted),
        "different": [
            [name for name in wanted if one.checksums.get(name) != wanted[name]]
            for one in each
            if isinstance(one, CheckReply)
        ],
        "weights": sorted(wanted.values()),
        "tokens": choice["token_ids"],
        "wanted_tokens": tokens,
        "apart": largest_difference(choice["logprobs"]["token_logprobs"], logprobs),
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), cast("DeltaChoice", sys.argv[3]))
