"""How a mapping such as `fsdp=32,tp=8` places the tensors of a model, by their names."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync.errors import ConfigError
from weightsync.specs import TensorSpec
from weightsync.weights.copying.reshard import Boxes, LocalBox, Placed
from weightsync.weights.copying.shards import Slicer

HELP = "sizes of pp, dp, fsdp, ep and tp: fsdp=256, or tp=8,dp=4"
_WORD = re.compile(r"(\w+)=([1-9][0-9]{0,5})")
_MAX_RANKS = 100_000
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_ROWS = re.compile(
    r"(embed_tokens|lm_head|q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3|q_b_proj|kv_b_proj)"
    r"\.(weight|bias)$"
)
_COLUMNS = re.compile(r"(o_proj|down_proj|w2)\.weight$")
_KEYS = re.compile(r"(k_proj|v_proj)\.(weight|bias)$")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes of the dimensions over which a model is spread; the last one varies fastest.

    `pp` cuts layers into stages; `dp` repeats everything, so that with `fsdp` it is HSDP; `fsdp`
    cuts the first dimension of each tensor, after `tp`; `ep` gives each rank a share of the
    experts, and repeats all else; `tp` cuts matrices by rows or columns, and repeats key heads
    where there are fewer of them.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.fsdp * self.ep * self.tp


def parse_mapping(text: str) -> Parallel:
    """Return the sizes that a text such as `tp=8,dp=4` gives. Raises ConfigError for another."""
    words = [_WORD.fullmatch(word.strip()) for word in text.split(",")]
    sizes = {word[1]: int(word[2]) for word in words if word is not None}
    known = {field.name for field in fields(Parallel)}
    if len(sizes) < len(words) or not sizes.keys() <= known:
        raise ConfigError(f"{text[:60]!r} is no mapping; give {HELP}")
    found = Parallel(**sizes)
    if found.ranks > _MAX_RANKS:
        raise ConfigError(
            f"{text[:60]!r} has {found.ranks} ranks; at most {_MAX_RANKS} are planned"
        )
    return found


def stack_experts(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors with all experts of a layer in two, as transformers holds them."""
    kept: dict[str, TensorSpec] = {}
    counts: dict[str, int] = {}
    for spec in specs:
        found = _EXPERT.search(spec.name)
        if found is None:
            kept[spec.name] = spec
            continue
        kind = spec.name[found.end() :].removesuffix(".weight")
        if kind not in ("gate_proj", "up_proj", "down_proj") or len(spec.shape) != 2:
            raise ConfigError(f"{spec.name} is no expert with gate_proj, up_proj and down_proj")
        if kind == "up_proj":
            continue
        part = "gate_up_proj" if kind == "gate_proj" else kind
        name = f"{spec.name[: found.start()]}.experts.{part}"
        rows, columns = spec.shape
        counts[name] = max(counts.get(name, 0), int(found[1]) + 1)
        shape = (counts[name], rows * (1 + (kind == "gate_proj")), columns)
        kept[name] = TensorSpec(name, spec.dtype, shape)
    return list(kept.values())


def place_model(
    specs: Sequence[TensorSpec], parallel: Parallel, *, key_heads: int | None = None
) -> list[Placed]:
    """Return the boxes of a model's tensors. Raises ConfigError where the mapping does not fit."""
    return _Placer(specs, parallel, key_heads).placed()


class _Placer:
    def __init__(
        self, specs: Sequence[TensorSpec], parallel: Parallel, key_heads: int | None
    ) -> None:
        self._specs, self._parallel, self._key_heads = specs, parallel, key_heads
        self._slicer = Slicer()
        self._known: dict[Hashable, Boxes] = {}
        self._layers = _count(_LAYER, specs)
        self._experts = _count(_EXPERT, specs)
        for name, size, count in (
            ("pp", parallel.pp, self._layers),
            ("ep", parallel.ep, self._experts or self._stacked()),
        ):
            if size > max(count, 1):
                what = "layers" if name == "pp" else "experts"
                raise ConfigError(f"{name}={size} is more than the model's {count} {what}")

    def placed(self) -> list[Placed]:
        return [Placed(spec, self._boxes(spec)) for spec in self._specs]

    def _stacked(self) -> int:
        return max((s.shape[0] for s in self._specs if _STACKED.search(s.name)), default=0)

    def _boxes(self, spec: TensorSpec) -> Boxes:
        name, ndim = spec.name, len(spec.shape)
        stage = self._stage(name)
        expert = _EXPERT.search(name)
        owner = int(expert[1]) * self._parallel.ep // self._experts if expert else None
        stacked = _STACKED.search(name) if ndim == 3 else None
        dim: int | None = None
        factor = 1
        if stacked:
            dim, factor = (1, 2) if stacked[1] == "gate_up_proj" else (2, 1)
        elif _ROWS.search(name) and ndim:
            dim = 0
        elif _COLUMNS.search(name) and ndim == 2:
            dim = 1
        heads = self._key_heads if _KEYS.search(name) else None
        key = (spec.shape, stage, owner, dim, factor, heads, stacked is not None)
        if key not in self._known:
            members = self._members(
                spec, stage, owner, dim, factor, heads, split=stacked is not None
            )
            self._known[key] = Boxes(spec.shape, members)
        return self._known[key]

    def _stage(self, name: str) -> int:
        layer = _LAYER.search(name)
        if layer:
            return int(layer[1]) * self._parallel.pp // self._layers
        return 0 if "embed" in name else self._parallel.pp - 1

    def _members(
        self,
        spec: TensorSpec,
        stage: int,
        owner: int | None,
        dim: int | None,
        factor: int,
        heads: int | None,
        *,
        split: bool,
    ) -> list[tuple[int, LocalBox]]:
        """Return the boxes by rank; `split`: `ep` cuts the first dimension of the tensor."""
        p = self._parallel
        repeated = heads is not None and heads < p.tp and p.tp % heads == 0
        cuts = heads if repeated and heads else p.tp
        mesh = (p.fsdp, p.ep if split else 1, cuts, p.tp // cuts)
        by_tp: Any = Replicate()
        if dim is not None:
            by_tp = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
        by_fsdp: Any = Shard(0) if spec.shape else Replicate()
        # fsdp cuts what is left of each rank: torch tells that by a stride.
        before = (p.ep if split else 1) * (cuts if dim == 0 else 1)
        if before > 1 and spec.shape:
            by_fsdp = _StridedShard(0, split_factor=before)
        placements = (by_fsdp, Shard(0) if split else Replicate(), by_tp, Replicate())
        found = []
        owners = range(p.ep) if owner is None else (owner,)
        for coordinate in product(*map(range, mesh)):
            fsdp, ep, tp, copy = coordinate
            part = LocalBox(
                self._slicer.slice_at(spec.name, spec.shape, mesh, placements, coordinate)
            )
            for dp, other in product(range(p.dp), (ep,) if split else owners):
                at = ((stage * p.dp + dp) * p.fsdp + fsdp) * p.ep + other
                found.append((at * p.tp + tp * mesh[3] + copy, part))
        return found


def _count(pattern: re.Pattern[str], specs: Iterable[TensorSpec]) -> int:
    """Return the number of layers, or of experts, in the names of tensors."""
    found = (pattern.search(spec.name) for spec in specs)
    return max((int(one[1]) + 1 for one in found if one), default=0)
