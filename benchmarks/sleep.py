"""Updates of a server that slept, beside updates of one that was awake, and a plain copy.

    python -m benchmarks.sleep [--model smollm2 | --mbytes 1000] [--device cuda] [--rounds 7]

`weightsync serve` in bfloat16, staged. In each round: an update, a sleep of level 1 with
`send_weights(wake=True)`, and one of level 2. After each the server has to generate the tokens that
the trainer's model generates, so a run is also a test. Seconds are those of the whole call,
medians. `--mbytes` makes a Llama of that size, and needs no package with a model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import requests
import torch

import weightsync as ws
from benchmarks.served import PROMPT, Server, server, write_llama
from weightsync.serve.model import load_model

TOKENS = 12
KINDS = ("update", "level 1", "level 2")


def main() -> None:
    """Print the medians, each as a multiple of a plain copy and of the update alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mbytes", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-ups", type=int, default=2, help="rounds before these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = options.model
        if options.mbytes:
            name = write_llama(Path(folder), options.mbytes, "bfloat16")
        model = load_model(name, dtype=torch.bfloat16).model.to(options.device)
        with server(name, "--dtype", "bfloat16", "--device", options.device) as there:
            print(f"the server answers at {there.url}", flush=True)
            paths, seconds = measure(model, there, options.rounds, options.warm_ups)
    alone = statistics.median(seconds["update"])
    copy = statistics.median(seconds.pop("copy"))
    print(f"{options.device}, {', '.join(sorted(paths))}; a plain copy {copy * 1e3:.2f} ms")
    print("| | ms | plain copies | x the update alone |\n|---|---:|---:|---:|")
    for kind, found in seconds.items():
        median = statistics.median(found)
        print(f"| {kind} | {median * 1e3:.1f} | {median / copy:.2f} | {median / alone:.2f} |")


def measure(
    model: Any, there: Server, rounds: int, warm_ups: int
) -> tuple[set[str], dict[str, list[float]]]:
    """Return the paths that the updates took, and the seconds of each kind of update."""
    seconds: dict[str, list[float]] = {kind: [] for kind in ("copy", *KINDS)}
    copies = [torch.empty_like(one) for one in model.parameters()]
    paths: set[str] = set()
    with ws.connect(model, to=there.url, delta="off") as sender:
        for turn in range(-warm_ups, rounds):
            copied = copy_time(model, copies)
            for level, kind in enumerate(KINDS):
                step(model)
                if level:
                    put = requests.post(f"{there.url}/sleep?level={level}", timeout=60)
                    put.raise_for_status()
                started = time.perf_counter()
                report = sender.send_weights(wake=level > 0)
                took = time.perf_counter() - started
                paths.update(receiver.path for receiver in report.receivers)
                check_tokens(model, there)
                print(f"{kind}: {took * 1e3:.1f} ms, and the tokens are the trainer's", flush=True)
                if turn >= 0:
                    seconds[kind].append(took)
            if turn >= 0:
                seconds["copy"].append(copied)
    return paths, seconds


def copy_time(model: Any, copies: list[torch.Tensor]) -> float:
    """Return the seconds of a plain copy of all parameters on their device."""
    held = [one.detach() for one in model.parameters()]
    _wait_for(copies[0])
    started = time.perf_counter()
    torch._foreach_copy_(copies, held)
    _wait_for(copies[0])
    return time.perf_counter() - started


def _wait_for(one: torch.Tensor) -> None:
    if one.is_cuda:
        torch.cuda.synchronize(one.device)


@torch.no_grad()
def step(model: Any) -> None:
    """Change every parameter as a large step of training does, so that other tokens come."""
    for one in model.parameters():
        one.add_(torch.randn_like(one), alpha=0.02)


def check_tokens(model: Any, there: Server) -> None:
    """Raise RuntimeError where the server does not generate what the model does."""
    asked = there.completion(TOKENS) | {"return_token_ids": True}
    reply = requests.post(f"{there.url}/v1/completions", json=asked, timeout=60)
    reply.raise_for_status()
    served = reply.json()["choices"][0]["token_ids"]
    prompt = torch.tensor([PROMPT], device=model.device)
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    ours = model.generate(prompt, **settings)[0, len(PROMPT) :].tolist()
    if served != ours:
        raise RuntimeError(f"the server generated {served}, the trainer's model {ours}")


if __name__ == "__main__":
    main()
