"""A trainer that sends its weights after every step to the server of examples/receiver.py.

WEIGHTSYNC_TOKEN=secret python examples/trainer.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import weightsync as ws


def main(url: str) -> None:
    """Fit a small model to a line, and send it to the server after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ws.connect(model, to=url) as sender:
        for _ in range(5):
            x = torch.randn(32, 4)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(sender.send_weights())
    print("answer", model(torch.full((4,), 0.5)).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
