"""Which tensors of a model are gathered together: one decoder layer at a time."""

from __future__ import annotations

from itertools import groupby

from weightsync.specs import Manifest


def groups_of(manifest: Manifest) -> list[range]:
    """Return positions in `manifest` of neighbours that belong to one layer, in order.

    `model.layers.3.mlp.up.weight` belongs to `model.layers.3`: a layer's name ends with the first
    part that is a number. A tensor outside of numbered layers belongs to the module that holds it.
    """
    groups: list[range] = []
    for _, members in groupby(manifest.specs, key=lambda spec: layer_of(spec.name)):
        start = groups[-1].stop if groups else 0
        groups.append(range(start, start + sum(1 for _ in members)))
    return groups


def layer_of(name: str) -> str:
    """Return the name up to its first part of digits, or else the name of the module."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[:end])
