"""A trainer and a server that share one device: the server sleeps while the trainer computes.

The order is that of TRL's and verl's colocated loops: sleep, train, wake the weights, update, wake
the KV cache, generate.

    weightsync serve --model tiny --token secret
    WEIGHTSYNC_TOKEN=secret python examples/colocated.py http://127.0.0.1:8000
"""

from __future__ import annotations

import os
import sys

import requests
import torch

import weightsync as ws
from weightsync.serve.model import load_model

PROMPT = [1, 2, 3]


def main(url: str, level: int = 2, steps: int = 3) -> None:
    """Train for a few steps, and print what the server generates after each."""
    token = os.environ["WEIGHTSYNC_TOKEN"]
    headers = {"Authorization": f"Bearer {token}"}
    model = load_model("tiny").model  # of the same weights in every process
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ws.connect(model, to=url, token=token) as sender:
        sender.send_weights()
        for step in range(1, steps + 1):
            asleep = requests.post(f"{url}/sleep?level={level}", headers=headers, timeout=60)
            asleep.raise_for_status()
            tokens = torch.randint(0, 64, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sender.send_weights(wake=True)  # wakes, updates, and then it serves
            body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "model": "tiny"}
            answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            versions = [span["version"] for span in choice["weight_versions"]]
            print(f"step {step}: {report.nbytes} bytes, tokens of version {versions}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
