"""A trainer that is written to vLLM's own trainer API; one line of it is weightsync's.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'
python examples/vllm_trainer.py MODEL http://127.0.0.1:8000
"""

from __future__ import annotations

import sys
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from weightsync.integrations.vllm.trainer import WeightsyncTrainerInitInfo

PROMPT, TOKENS = [5, 6, 7, 8], 8


def answer(url: str) -> list[int]:
    """Return the tokens that the server generates."""
    wanted = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": PROMPT, "max_tokens": TOKENS, **wanted}
    reply = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    reply.raise_for_status()
    return list(reply.json()["choices"][0]["token_ids"])


def main(name: str, url: str) -> None:
    """Train for three steps, and send the weights after each."""
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = WeightTransferTrainerFactory.trainer_init(
        WeightsyncTrainerInitInfo(rank=0),  # before: NCCLTrainerInitInfo(rank=0, ...)
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    batch = torch.randint(model.config.vocab_size, (4, 16))
    prompt = torch.tensor([PROMPT])
    length = len(PROMPT) + TOKENS
    for _ in range(3):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.send_weights()
        own = model.generate(prompt, do_sample=False, min_length=length, max_length=length)
        generated = own[0, len(PROMPT) :].tolist()
        print("the server's answer is the trainer's:", answer(url) == generated)
    print(engine.report)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
