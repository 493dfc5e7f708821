"""PEFT models over the tiny ones, and what they generate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import peft
import torch

import weightsync as ws
from tests.vllm.served import Served
from tests.vllm.tiny import PROMPT, TOKENS, expected, largest_difference
from weightsync.tensors import dtype_name

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BLOCK = 128
"""The tokens of one block of vLLM's cache on a CPU."""
LONG = [(7 * i * i + 3) % 300 for i in range(140)]
"""A prompt of more than one block."""
RANK = 8
LARGEST_DIFFERENCE = 1e-4
"""
Of log-probabilities in float32 after up to 150 tokens, in batches that differ from run to run:
1,400 answers were at most 9e-6 apart, and more on another CPU. Another version is off by over 0.1.
"""

Told = tuple[list[int], list[float]]


def adapt(base: Any, *, name: str = "default", **config: Any) -> Any:
    """Return a PEFT model over `base`, with an adapter of random weights."""
    given = {"r": RANK, "lora_alpha": 16, "target_modules": LINEAR, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**given), adapter_name=name)
    train(model, 0, name)
    return model.eval()


def train(model: Any, seed: int, name: str = "default") -> None:
    """Change an adapter as a training step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if f".{name}." in path or path.endswith(f".{name}"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def adapter_nbytes(model: Any) -> int:
    """Return the bytes of an adapter's tensors."""
    return sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)


@contextmanager
def adapter_of(model: Any, name: str) -> Iterator[None]:
    """Compute with one adapter of several."""
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)


def base_of(model: Any, prompt: Sequence[int] = PROMPT, count: int = TOKENS) -> Told:
    """Return what the base model generates."""
    with model.disable_adapter():
        return expected(model, prompt, count)


def assert_told(found: Told, wanted: Told) -> None:
    """Assert that tokens are the same, and log-probabilities those of the same weights."""
    assert found[0] == wanted[0]
    assert largest_difference(found[1], wanted[1]) < LARGEST_DIFFERENCE


def assert_serves(served: Served, model: str, wanted: Told, prompt: Sequence[int] = PROMPT) -> None:
    """Assert that a server's model generates what PEFT does."""
    assert_told(served.complete(len(wanted[0]), model=model, prompt=prompt), wanted)


def same(found: Told, wanted: Told) -> bool:
    """Whether tokens are the same, and log-probabilities those of the same weights."""
    return found[0] == wanted[0] and largest_difference(found[1], wanted[1]) < LARGEST_DIFFERENCE


class Unnamed:
    """A source of these tensors that sends to the place of an adapter."""

    receiver_path = "adapters/policy"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.manifest = ws.Manifest(
            tuple(ws.TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def stable_tensors(self) -> list[torch.Tensor]:
        return list(self._tensors.values())
