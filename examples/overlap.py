"""A trainer that goes on while its weights are sent to the server of examples/receiver.py.

WEIGHTSYNC_TOKEN=secret python examples/overlap.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import weightsync as ws


def main(url: str) -> None:
    """Fit a small model to a line; send each step's weights during the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ws.connect(model, to=url) as sender:
        sent = []
        for step in range(1, 6):
            x = torch.randn(32, 4)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            started = time.perf_counter()
            sent.append(sender.send_async(label=f"step {step}"))  # copies them, and returns
            print(f"step {step} waited {(time.perf_counter() - started) * 1e3:.1f} ms")
        for update in sent:
            print(update.result())  # or raises what went wrong
    print("answer", model(torch.full((4,), 0.5)).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
