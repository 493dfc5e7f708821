"""Runs the block of docs/vllm.md that makes an `LLM`, and then sends updates to it.

`python page.py FOLDER`, where FOLDER has the model; prints `equal` when vLLM computes what
transformers does with the weights that were sent, as far as bfloat16 allows: it is what vLLM takes
for a float32 checkpoint when nothing is said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3ForCausalLM
from vllm import SamplingParams

import weightsync as ws
from tests.vllm.test_migrating import block
from tests.vllm.tiny import PROMPT, TOKENS, change, largest_difference

NEAR = 0.2
FAR = 1.0


def log_probabilities(model: Any, tokens: Sequence[int]) -> list[float]:
    """Return the model's log-probability of each of `tokens` after PROMPT."""
    with torch.no_grad():
        said = model(torch.tensor([[*PROMPT, *tokens]])).logits[0].log_softmax(-1)
    return [float(said[len(PROMPT) - 1 + i, token]) for i, token in enumerate(tokens)]


def main(folder: str) -> None:
    """Send weights twice by the page's sender, and compare after each."""
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    names: dict[str, Any] = {"ws": ws, "model": model, "MODEL": folder}
    exec(block("vllm.md", "from vllm import LLM"), names)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}
    with names["sender"] as sender:
        for seed in (1, 2):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            change(model, seed)
            sender.send_weights()
            said = names["llm"].generate([prompt], params, use_tqdm=False)[0].outputs[0]
            tokens = list(said.token_ids)
            pairs = zip(tokens, said.logprobs, strict=True)
            found = [float(told[token].logprob) for token, told in pairs]
            now = largest_difference(found, log_probabilities(model, tokens))
            after = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(before)
            then = largest_difference(found, log_probabilities(model, tokens))
            model.load_state_dict(after)
            print(f"off by {now:.3f}; with the weights before by {then:.3f}")
            assert now < NEAR
            assert then > FAR
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
