"""Conversion of the experts of a mixture between fused tensors and tensors for each expert.

transformers 5 holds the experts of a layer fused, in two tensors:

    model.layers.0.mlp.experts.gate_up_proj   [experts, 2 * intermediate, hidden]
    model.layers.0.mlp.experts.down_proj      [experts, hidden, intermediate]

Checkpoints, and vLLM, hold three tensors for each expert, as `nn.Linear` does:

    model.layers.0.mlp.experts.7.gate_proj.weight   [intermediate, hidden]
    model.layers.0.mlp.experts.7.up_proj.weight     [intermediate, hidden]
    model.layers.0.mlp.experts.7.down_proj.weight   [hidden, intermediate]
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, shorten
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.reshard import inside
from weightsync.weights.copying.shards import Slice, Span
from weightsync.weights.sinks.module_sink import Rename, rename_with
from weightsync.weights.sources.base import SourceExtras
from weightsync.weights.sources.holdings import Cut, Holdings
from weightsync.weights.sources.wrapping import WrappingSource

ExpertLayout = Literal["qwen3_moe", "mixtral"]
"""The names of one expert's tensors: `gate_proj`, `up_proj` and `down_proj`, or Mixtral's `w1`,
`w3` and `w2`, in a module that Mixtral calls `block_sparse_moe` and transformers `mlp`."""

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"
_FUSED_BLOCK = "mlp"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The names of one expert's projections, and of the module that holds router and experts."""

    gate: str
    up: str
    down: str
    block: str


_LAYOUTS: Mapping[str, _Layout] = {
    "qwen3_moe": _Layout("gate_proj", "up_proj", "down_proj", "mlp"),
    "mixtral": _Layout("w1", "w3", "w2", "block_sparse_moe"),
}


class PerExpertSource(WrappingSource):
    """The tensors of `source`, with fused experts as one tensor per expert and projection.

    `source` is what `connect` takes: a module, a state dict, a callable or a WeightSource. `layout`
    names the tensors of one expert; `dtype` casts, `rename` maps the new names. The tensors are
    views of the fused ones: streamed where those are on the CPU, registered where they stay on a
    GPU.

    Raises ConfigError where there are no fused experts, and for shapes other than
    `[experts, 2 * intermediate, hidden]` beside `[experts, hidden, intermediate]`. The experts of
    GPT-OSS, Llama 4 and Aria are transposed, in transformers and in their checkpoints.
    """

    only_moves = True

    def __init__(
        self,
        source: object,
        *,
        layout: ExpertLayout = "qwen3_moe",
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        names = _layout(layout)
        super().__init__(source, dtype=dtype)
        manifest = self.source.manifest
        blocks = {block: _renamed(block, names.block) for block in _find_fused(manifest)}
        self._parts = {block + _GATE_UP: [names.gate, names.up] for block in blocks}
        self._parts |= {block + _DOWN: [names.down] for block in blocks}
        _refuse_tied(manifest, self._parts)
        named = _namer(blocks, rename)
        self._names = {name: [named(name)] for name in manifest.index}
        for spec in manifest.specs:
            if spec.name in self._parts:
                path = spec.name.rpartition(".")[0]
                self._names[spec.name] = [
                    named(f"{path}.{expert}.{projection}.weight")
                    for expert in range(spec.shape[0])
                    for projection in self._parts[spec.name]
                ]
        self._manifest = Manifest(
            tuple(part for spec in manifest.specs for part in self._split_spec(spec)),
            {self._names[a][0]: self._names[name][0] for a, name in manifest.aliases.items()},
        )

    @property
    def manifest(self) -> Manifest:
        """One name per expert and projection, dtypes as sent, in the order of the source."""
        return self._manifest

    @property
    def rounded(self) -> Mapping[str, str]:
        """The tensors that the source rounds, by their names here."""
        rounded = SourceExtras(self.source).rounded
        return {new: dtype for name, dtype in rounded.items() for new in self._names[name]}

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source's tensors, fused ones cut into views."""
        for name, tensor in pairs:
            yield from zip(self._names[name], self._split(name, tensor), strict=True)

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the same views where the source's tensors stay on a GPU, else None.

        None on the CPU, because registration there moves each tensor into shared memory, and a
        view of a larger tensor cannot move alone.
        """
        stable = self.source.stable_tensors()
        if stable is None or any(tensor.device.type == "cpu" for tensor in stable):
            return None
        pairs = zip(self.source.manifest.specs, stable, strict=True)
        return [part for spec, tensor in pairs for part in self._split(spec.name, tensor)]

    def hold(self, held: Holdings) -> Holdings:
        """Return the boxes of the experts, as views of the parts of fused tensors."""
        return held.cut(self._cut)

    def _cut(self, name: str, box: Slice) -> Cut:
        """Return the boxes of experts in a box of a fused tensor, and their views."""
        names = self._names[name]
        if name not in self._parts:
            return Cut([(names[0], box)], lambda tensor: [tensor])
        count = len(self._parts[name])
        rows = box.shape[1] // count
        shape = (rows, box.shape[2])
        windows = [list(_window(box.spans[1], k * rows, (k + 1) * rows)) for k in range(count)]
        experts = [expert for begin, end in box.spans[0] for expert in range(begin, end)]
        parts: list[tuple[str, Slice]] = []
        places: list[tuple[int, int, int]] = []
        for i, expert in enumerate(experts):
            for k, window in enumerate(windows):
                for spans, at, length in window:
                    parts.append((names[expert * count + k], Slice(shape, (spans, box.spans[2]))))
                    places.append((i, at, length))

        def views(tensor: torch.Tensor) -> list[torch.Tensor]:
            held = tensor.unbind()
            return [held[i].narrow(0, at, length) for i, at, length in places]

        return Cut(parts, views)

    def _split(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        if name not in self._parts:
            return [tensor]
        count = len(self._parts[name])
        return [part for expert in tensor.unbind() for part in expert.chunk(count)]

    def _split_spec(self, spec: TensorSpec) -> Iterator[TensorSpec]:
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        for name, part in zip(self._names[spec.name], self._split(spec.name, tensor), strict=True):
            yield TensorSpec(name, spec.dtype, tuple(part.shape))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one expert's tensor in a fused one: `fused[expert]` from row `start`."""

    fused: TensorSpec
    expert: int
    start: int


class FusedExpertsSource(WrappingSource):
    """The tensors of `source`, with the experts of each layer fused into two tensors.

    The opposite of PerExpertSource, with the same arguments: for a checkpoint with tensors per
    expert, and a receiver that holds a transformers 5 model. Fused tensors are assembled in new
    memory, one layer at a time where the source has the tensors of a layer together.

    Raises ConfigError where there are no experts with the names of `layout`, where an expert lacks
    a tensor, and for shapes other than `[intermediate, hidden]` of gate and up beside
    `[hidden, intermediate]` of down.
    """

    only_moves = True

    def __init__(
        self,
        source: object,
        *,
        layout: ExpertLayout = "qwen3_moe",
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        super().__init__(source, dtype=dtype)
        manifest = self.source.manifest
        experts = _find_experts(manifest, _layout(layout))
        self._places = {
            spec.name: place
            for block, held in experts.items()
            for spec, place in _places(block, held)
        }
        _refuse_tied(manifest, self._places)
        self._last = {
            self._places[spec.name].fused.name: spec.name
            for spec in manifest.specs
            if spec.name in self._places
        }
        named = _namer({block: _renamed(block, _FUSED_BLOCK) for block in experts}, rename)
        fused = {place.fused.name for place in self._places.values()}
        self._names = {name: named(name) for name in (*manifest.index, *fused)}
        self._manifest = Manifest(
            tuple(made for spec in manifest.specs for made in self._fuse_spec(spec)),
            {self._names[alias]: self._names[name] for alias, name in manifest.aliases.items()},
        )

    @property
    def manifest(self) -> Manifest:
        """Fused names, dtypes as sent; a fused tensor has the position of its last part."""
        return self._manifest

    @property
    def rounded(self) -> Mapping[str, str]:
        """The tensors that the source rounds, by their names here."""
        rounded = SourceExtras(self.source).rounded
        places = self._places
        whole = {name: places[name].fused.name if name in places else name for name in rounded}
        return {self._names[whole[name]]: dtype for name, dtype in rounded.items()}

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source's tensors, a fused one as soon as its last part was read."""
        making: dict[str, torch.Tensor] = {}
        for name, tensor in pairs:
            place = self._places.get(name)
            if place is None:
                yield self._names[name], tensor
                continue
            fused = place.fused
            if fused.name not in making:
                making[fused.name] = torch.empty(
                    fused.shape, dtype=TORCH_DTYPES[fused.dtype], device=tensor.device
                )
            rows = making[fused.name][place.expert].narrow(0, place.start, tensor.shape[0])
            rows.copy_(tensor.detach())
            if self._last[fused.name] == name:
                yield self._names[fused.name], making.pop(fused.name)

    def hold(self, held: Holdings) -> Holdings:
        """Return each box of an expert's tensor as a box of the fused one, without a copy."""

        def cut(name: str, box: Slice) -> Cut:
            place = self._places.get(name)
            if place is None:
                return Cut([(self._names[name], box)], lambda tensor: [tensor])
            inner = inside(box, place.fused.shape, (place.expert, place.start, 0))
            return Cut(
                [(self._names[place.fused.name], inner)], lambda tensor: [tensor.unsqueeze(0)]
            )

        return held.cut(cut)

    def _fuse_spec(self, spec: TensorSpec) -> Iterator[TensorSpec]:
        place = self._places.get(spec.name)
        if place is None:
            yield TensorSpec(self._names[spec.name], spec.dtype, spec.shape)
        elif self._last[place.fused.name] == spec.name:
            fused = place.fused
            yield TensorSpec(self._names[fused.name], fused.dtype, fused.shape)


def _window(
    spans: Sequence[Span], begin: int, end: int
) -> Iterator[tuple[tuple[Span, ...], int, int]]:
    """Yield the parts of spans that lie within `begin` and `end`: spans, local index, length.

    The spans count from `begin`. Those of a part stand together in the local tensor.
    """
    found: list[Span] = []
    start = at = 0
    for first, last in spans:
        low, high = max(first, begin), min(last, end)
        if low < high:
            place = at + low - first
            if found and place != start + sum(b - a for a, b in found):
                yield tuple(found), start, sum(b - a for a, b in found)
                found = []
            if not found:
                start = place
            found.append((low - begin, high - begin))
        at += last - first
    if found:
        yield tuple(found), start, sum(b - a for a, b in found)


def _layout(name: str) -> _Layout:
    if name not in _LAYOUTS:
        raise ConfigError(f"layout is {name!r}; it must be one of {', '.join(map(repr, _LAYOUTS))}")
    return _LAYOUTS[name]


def _renamed(block: str, last: str) -> str:
    """Return the name that the module of a layer's router and experts has in the other form."""
    path, dot, name = block.rpartition(".")
    known = {layout.block for layout in _LAYOUTS.values()}
    return f"{path}{dot}{last}" if name in known else block


def _namer(blocks: Mapping[str, str], rename: Rename | None) -> Callable[[str], str]:
    """Return a function that maps a tensor's name: replaces its block's name, then `rename`."""
    moved = {f"{old}.": f"{new}." for old, new in blocks.items() if old != new}
    given = rename_with(rename)

    def named(name: str) -> str:
        old = next((prefix for prefix in moved if name.startswith(prefix)), None)
        return given(name if old is None else moved[old] + name[len(old) :])

    return named


def _refuse_tied(manifest: Manifest, experts: Iterable[str]) -> None:
    """Raise ConfigError for experts that are tied to other tensors."""
    tied = {*manifest.aliases, *manifest.aliases.values()}.intersection(experts)
    if tied:
        raise ConfigError(f"experts that share their memory are not converted: {shorten(tied)}")


def _find_fused(manifest: Manifest) -> list[str]:
    """Return the blocks that hold fused experts. Raises ConfigError for none or other shapes."""
    specs = {spec.name: spec for spec in manifest.specs}
    found = [name for name in manifest.index if name.endswith((_GATE_UP, _DOWN))]
    blocks = list(dict.fromkeys(n.removesuffix(_GATE_UP).removesuffix(_DOWN) for n in found))
    if not blocks:
        raise ConfigError(
            f"the source has no fused experts (names like 'layers.0.mlp{_GATE_UP}'), but "
            f"{shorten(specs, 3)}; send it as it is"
        )
    wrong = [why for block in blocks if (why := _why_not_fused(block, specs))]
    if wrong:
        raise ConfigError(
            "experts can be split where gate_up_proj is [experts, 2 * intermediate, hidden] and "
            f"down_proj is [experts, hidden, intermediate], without biases; {shorten(wrong, 3)}"
        )
    return blocks


def _why_not_fused(block: str, specs: Mapping[str, TensorSpec]) -> str:
    """Return why a block's fused experts cannot be split, an empty string where they can.

    The two shapes together tell which dimension is which, also for square ones: gate_up has twice
    as many rows as down has columns or, transposed, the same number.
    """
    gate_up, down = specs.get(block + _GATE_UP), specs.get(block + _DOWN)
    if gate_up is None or down is None:
        return f"{block} has one of {_GATE_UP} and {_DOWN} without the other"
    if bias := [name for name in specs if name.startswith(f"{block}.experts.") and "bias" in name]:
        return f"there is {shorten(bias)}, as in GPT-OSS, which interleaves gate and up"
    said = f"{gate_up.name} is {gate_up}, {down.name} is {down}"
    if len(gate_up.shape) != 3 or 0 in gate_up.shape or gate_up.dtype != down.dtype:
        return said
    experts, rows, hidden = gate_up.shape
    if down.shape == (experts, hidden // 2, rows) and hidden % 2 == 0:
        return f"{said}: these are transposed, as in GPT-OSS, Llama 4 and Aria"
    if rows % 2 or down.shape != (experts, hidden, rows // 2):
        return said
    return _why_not_routed(block, (experts, hidden), specs)


def _find_experts(
    manifest: Manifest, layout: _Layout
) -> dict[str, dict[tuple[int, str], TensorSpec]]:
    """Return the tensors of each block's experts, by expert and by gate, up or down.

    Raises ConfigError where there are none, and for other shapes.
    """
    kinds = {layout.gate: "gate", layout.up: "up", layout.down: "down"}
    pattern = re.compile(rf"(.+)\.experts\.(\d+)\.({'|'.join(kinds)})\.weight")
    blocks: defaultdict[str, dict[tuple[int, str], TensorSpec]] = defaultdict(dict)
    for spec in manifest.specs:
        if match := pattern.fullmatch(spec.name):
            blocks[match[1]][int(match[2]), kinds[match[3]]] = spec
    specs = {spec.name: spec for spec in manifest.specs}
    if not blocks:
        raise ConfigError(
            f"the source has no names like 'layers.0.mlp.experts.0.{layout.gate}.weight', but "
            f"{shorten(specs, 3)}; choose another layout=, or send it as it is"
        )
    wrong = [why for block, held in blocks.items() if (why := _why_not_whole(block, held, specs))]
    if wrong:
        raise ConfigError(
            f"experts are fused where each has {layout.gate} and {layout.up} of [intermediate, "
            f"hidden] and {layout.down} of [hidden, intermediate]; {shorten(wrong, 3)}"
        )
    return dict(blocks)


def _why_not_whole(
    block: str, held: Mapping[tuple[int, str], TensorSpec], specs: Mapping[str, TensorSpec]
) -> str:
    """Return why a block's experts cannot be fused, an empty string where they can."""
    experts = 1 + max(expert for expert, _ in held)
    wanted = [(expert, kind) for expert in range(experts) for kind in ("gate", "up", "down")]
    if lacking := [f"{expert} {kind}" for expert, kind in wanted if (expert, kind) not in held]:
        return f"{block}.experts lacks {shorten(lacking)}"
    first = held[0, "gate"]
    for expert, kind in wanted:
        spec = held[expert, kind]
        shape = spec.shape[::-1] if kind == "down" else spec.shape
        if len(shape) != 2 or shape != first.shape or spec.dtype != first.dtype:
            return f"{first.name} is {first}, {spec.name} is {spec}"
    return _why_not_routed(block, (experts, first.shape[1]), specs)


def _why_not_routed(block: str, shape: tuple[int, int], specs: Mapping[str, TensorSpec]) -> str:
    """Return how the block's router `gate` contradicts `[experts, hidden]`, or an empty string."""
    router = specs.get(f"{block}.gate.weight")
    if router is None or router.shape == shape:
        return ""
    return f"{block}.experts is for a router {list(shape)}, and {router.name} is {router}"


def _places(
    block: str, held: Mapping[tuple[int, str], TensorSpec]
) -> Iterator[tuple[TensorSpec, _Rows]]:
    """Yield each tensor of a block's experts with its place in a fused tensor."""
    first = held[0, "gate"]
    intermediate, hidden = first.shape
    experts = len(held) // 3
    gate_up = TensorSpec(block + _GATE_UP, first.dtype, (experts, 2 * intermediate, hidden))
    down = TensorSpec(block + _DOWN, first.dtype, (experts, hidden, intermediate))
    rows = {"gate": (gate_up, 0), "up": (gate_up, intermediate), "down": (down, 0)}
    for (expert, kind), spec in held.items():
        fused, start = rows[kind]
        yield spec, _Rows(fused, expert, start)
