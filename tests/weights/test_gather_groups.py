"""Which tensors are gathered together."""

from __future__ import annotations

import pytest

from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.sources.base import groups_of, layer_of


def manifest(*names: str) -> Manifest:
    return Manifest(tuple(TensorSpec(name, "float32", (1,)) for name in names))


def test_one_group_per_decoder_layer_and_per_other_module() -> None:
    found = groups_of(
        manifest(
            "model.embed_tokens.weight",
            "model.layers.0.attn.q.weight",
            "model.layers.0.mlp.up.weight",
            "model.layers.1.attn.q.weight",
            "model.norm.weight",
            "model.norm.bias",
            "lm_head.weight",
        )
    )
    assert found == [range(1), range(1, 3), range(3, 4), range(4, 6), range(6, 7)]


def test_only_neighbours_are_grouped() -> None:
    assert len(groups_of(manifest("h.0.a", "norm.w", "h.0.b"))) == 3


def test_nothing() -> None:
    assert groups_of(manifest()) == []


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.17.up.weight", "model.layers.3"),
        ("0.weight", "0"),
        ("weight", ""),
        ("visual.blocks.10.norm.weight", "visual.blocks.10"),
        ("model.layer3.weight", "model.layer3"),
        ("adapters.2", "adapters.2"),
    ],
)
def test_the_name_of_a_layer(name: str, layer: str) -> None:
    assert layer_of(name) == layer
