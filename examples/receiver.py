"""A receiver in an inference process of your own: one model, weights that arrive over HTTP.

WEIGHTSYNC_TOKEN=secret python examples/receiver.py 8000
"""

from __future__ import annotations

import os
import sys

import fastapi
import torch
import uvicorn
from torch import nn

import weightsync as ws

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
receiver = ws.WeightReceiver(model)
app = fastapi.FastAPI()
app.include_router(ws.server.weight_router(receiver, token=os.environ["WEIGHTSYNC_TOKEN"]))


@app.get("/answer")
def answer(x: float) -> dict[str, object]:
    """Return an output and the version of the weights that made it."""
    with receiver.reading() as version, torch.inference_mode():
        return {"version": version, "answer": model(torch.full((4,), x)).tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), http="h11", log_level="warning")
