"""Repeats a completion token by token, with the weights version that each token claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

Weights = Mapping[str, torch.Tensor]


class Replay:
    """One plain model and the weights of every version; transformers alone, no batch, no engine."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._weights: dict[int, dict[str, torch.Tensor]] = {}

    def remember(self, version: int, model: Any) -> None:
        """Keep a copy of the weights of `model`."""
        self._weights[version] = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.inference_mode()
    def greedy(
        self, prompt: Sequence[int], versions: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Return a token for each of `versions`, and how far the next likeliest was behind it.

        The prompt is read, and the first token chosen, with the weights of the first version.
        """
        tokens: list[int] = []
        margins: list[float] = []
        inputs, cache, loaded = torch.tensor([list(prompt)]), DynamicCache(), None
        for version in versions:
            if version != loaded:
                self._model.load_state_dict(self._weights[version])
                loaded = version
            # By position, since transformers 5.24 has another name for the cache.
            output = self._model(inputs, None, None, cache, use_cache=True)
            best = output.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            inputs = best.indices[:1][None]
        return tokens, margins


def versions_of(completion: Mapping[str, Any]) -> list[int]:
    """Return the version of each token that a completion claims, without gap or overlap."""
    versions: list[int] = []
    for span in completion["weight_versions"]:
        assert span["start"] == len(versions) < span["stop"]
        versions += [span["version"]] * (span["stop"] - span["start"])
    assert len(versions) == len(completion["token_ids"])
    return versions
