"""One trainer and two rollout actors of Ray, which receive the weights after every step.

python examples/ray_actors.py
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from torch import nn

import weightsync as ws

PROMPT = torch.full((4,), 0.5)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@ws.ray.remote(num_cpus=0)
class Rollout(ws.ray.WeightSyncActor):
    """Generates with the last weights that arrived."""

    def __init__(self) -> None:
        self.model = make_model()
        self.weightsync_receiver = ws.WeightReceiver(self.model)

    def generate(self) -> tuple[int, list[float]]:
        """Return an output and the version of the weights that made it."""
        with self.weightsync_receiver.reading() as version, torch.inference_mode():
            return version, self.model(PROMPT).tolist()


@ray.remote(num_cpus=0)
class Trainer:
    """Fits a small model to a line, and sends the weights to `rollouts` after every step."""

    def __init__(self, rollouts: list[Any]) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sender = ws.connect(self.model, to=rollouts)

    def step(self) -> str:
        x = torch.randn(32, 4)
        loss = (self.model(x) - x[:, :2]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return str(self.sender.send_weights())

    def answer(self) -> list[float]:
        with torch.inference_mode():
            return self.model(PROMPT).tolist()

    def close(self) -> None:
        self.sender.close()


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False)  # on a cluster: ray.init()
    rollouts = [Rollout.remote() for _ in range(2)]
    trainer = Trainer.remote(rollouts)
    for _ in range(3):
        print(ray.get(trainer.step.remote()))
        trained = ray.get(trainer.answer.remote())
        for version, generated in ray.get([rollout.generate.remote() for rollout in rollouts]):
            print(
                f"version {version}: the rollout's answer is the trainer's:", generated == trained
            )
    ray.get(trainer.close.remote())
    ray.shutdown()


if __name__ == "__main__":
    main()
