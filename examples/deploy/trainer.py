"""A trainer for the other files here: sends a tiny model to the server whose URL it is given."""

from __future__ import annotations

import sys
import time

import torch

import weightsync as ws
from weightsync.serve.model import load_model


def main(url: str, steps: int = 3) -> None:
    """Send the weights after each step, and say how; the server may still be loading."""
    model = load_model("tiny").model
    with ws.connect(model, to=url, wait_s=600) as sender:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)  # where a trainer would step its optimizer
            print(sender.send_weights(), flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
