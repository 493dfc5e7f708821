"""A trainer that FSDP2 shards over several processes; every process calls the sender.

WEIGHTSYNC_TOKEN=secret torchrun --nproc-per-node 2 examples/fsdp2_torchrun.py http://127.0.0.1:8000

sends to the server of examples/receiver.py; without a URL, to a receiver in rank 0's own process.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import weightsync as ws


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def main(url: str | None) -> None:
    """Fit a small model to a line, each rank on its own data."""
    dist.init_process_group("gloo")  # "nccl" where every rank has a GPU
    torch.manual_seed(0)
    model, served = make_model(), make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    with ws.connect(model, to=url or ws.WeightReceiver(served).handle) as sender:
        for _ in range(5):
            x = torch.randn(32, 4)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report = sender.send_weights()  # every rank calls, and every rank has the report
            if dist.get_rank() == 0:
                print(report)
                gathered = ", ".join(report.gathered) or "nothing"
                print(f"gathered: {gathered}; bytes read from each rank: {report.sources}")
        question = torch.full((1, 4), 0.5)
        answer = model(question)
    if dist.get_rank() == 0:
        print("answer", answer[0].tolist())
        if url is None:
            print("served", served(question)[0].tolist())
    # Python must not end while a thread of Gloo still holds tensors: torch would abort the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
