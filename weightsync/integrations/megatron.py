"""Models of Megatron-Core as sources: what each rank holds, under the names of Hugging Face.

A parameter of Megatron holds one tensor of the checkpoint or several, split over the ranks of
tensor parallelism. A family is a table: for each parameter the tensors that lie in it. What a rank
has of each becomes a `weightsync.Holding`, a view of the parameter, so no rank gathers, and no
stage of a pipeline sends to another one.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from weightsync.arguments import Dtype, as_dtype
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.copying.shards import Span
from weightsync.weights.sinks.module_sink import Rename
from weightsync.weights.sources.base import DeclaredSource
from weightsync.weights.sources.declared import Holding
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.tensor_kinds import check_readable, check_sendable

logger = logging.getLogger(__name__)

TRIED = ("0.19",)
"""The versions of megatron-core with which the tests have run."""

ELSEWHERE = (
    "send AutoBridge.export_hf_weights of Megatron Bridge as a callable, see docs/megatron.md"
)


class Run(NamedTuple):
    """Consecutive rows (or columns) of a parameter that are `[begin, end)` of a tensor's `size`."""

    name: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a parameter that a rank has: `length` rows, of part `rank` of `ranks`."""

    length: int
    rank: int
    ranks: int
    config: Any
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors in a parameter: the dimension `dim` is split among ranks, and has `runs`.

    The lengths of the runs add up to that of the part; what is left at its end is padding. A
    parameter without the dimension, as a bias of columns, is whole on each rank.
    """

    dim: int
    runs: Callable[[Part], Sequence[Run]]


def _split(name: str, part: Part) -> list[Run]:
    begin = part.rank * part.length
    return [Run(name, begin, begin + part.length, part.ranks * part.length)]


def _gate_up(gate: str, up: str, part: Part) -> list[Run]:
    """Half the rows of each rank are of the gate. Gate and up may be halves of one tensor."""
    half = part.length // 2
    size = part.ranks * half
    begin, whole = part.rank * half, 2 * size if gate == up else size
    second = begin + whole - size
    return [Run(gate, begin, begin + half, whole), Run(up, second, second + half, whole)]


def _qkv(q: str, k: str, v: str, part: Part) -> list[Run]:
    """For each group of queries its rows of q, of k and of v; ranks hold consecutive rows."""
    config = part.config
    groups, width = config.num_query_groups, config.kv_channels
    queries = config.num_attention_heads // groups
    rows = groups * (queries + 2) * width
    if part.length * part.ranks != rows:
        raise ConfigError(
            f"has {part.length} rows on each of {part.ranks} ranks, and {groups} groups of "
            f"{queries} queries, a key and a value of {width} are {rows}"
        )
    begin, end = part.rank * part.length, (part.rank + 1) * part.length
    found, at = [], 0
    for group in range(groups):
        for name, heads in ((q, queries), (k, 1), (v, 1)):
            low, high = max(begin, at), min(end, at + heads * width)
            if low < high:
                start = group * heads * width - at
                found.append(Run(name, start + low, start + high, groups * heads * width))
            at += heads * width
    return found


def _vocab(name: str, part: Part) -> list[Run]:
    """Rows after the vocabulary are padding, so that the ranks have as many rows."""
    padded, vocab = part.length * part.ranks, part.vocab_size
    if padded < vocab:
        raise ConfigError(
            f"has {padded} rows on all {part.ranks} ranks together, and vocab_size of the "
            f"checkpoint's configuration is {vocab}; the padded vocabulary is at least as large"
        )
    begin = part.rank * part.length
    end = min(begin + part.length, vocab)
    return [Run(name, begin, end, vocab)] if begin < end else []


def _latent(name: str, size_of: Callable[[Any], int], part: Part) -> list[Run]:
    """A projection of multi-latent attention: split in the local spec, whole in that of TE."""
    if part.length == size_of(part.config):
        return [Run(name, 0, part.length, part.length)]
    return _split(name, part)


def _whole(name: str, part: Part) -> list[Run]:
    return [Run(name, 0, part.length, part.length)]


def whole(name: str) -> Layout:
    """Return the layout of a tensor that each rank has whole."""
    return Layout(0, partial(_whole, name))


def columns(name: str) -> Layout:
    """Return the layout of a tensor whose columns are split."""
    return Layout(1, partial(_split, name))


def rows(name: str) -> Layout:
    """Return the layout of a tensor whose rows are split."""
    return Layout(0, partial(_split, name))


def gate_up(gate: str, up: str) -> Layout:
    """Return the layout of the gate above up; the rows of each are split."""
    return Layout(0, partial(_gate_up, gate, up))


def vocab(name: str) -> Layout:
    """Return the layout of a tensor with a row for each token, and padding after them."""
    return Layout(0, partial(_vocab, name))


Table = Mapping[str, Layout]
"""Parameters of a model or of its layers, without `.weight` and `.bias`, by name: see `_place`."""

_MODEL: Table = {
    "embedding.word_embeddings": vocab("model.embed_tokens"),
    "decoder.final_layernorm": whole("model.norm"),
    "output_layer": vocab("lm_head"),
}
_LAYER: Table = {
    "input_layernorm": whole("input_layernorm"),
    "self_attention.linear_proj": columns("self_attn.o_proj"),
    "pre_mlp_layernorm": whole("post_attention_layernorm"),
    "mlp.linear_fc1.layer_norm": whole("post_attention_layernorm"),
    "mlp.linear_fc1": gate_up("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": columns("mlp.down_proj"),
}
_QKV: Table = {
    "self_attention.linear_qkv.layer_norm": whole("input_layernorm"),
    "self_attention.linear_qkv": Layout(
        0, partial(_qkv, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    ),
}
_QK_NORM: Table = {
    "self_attention.q_layernorm": whole("self_attn.q_norm"),
    "self_attention.k_layernorm": whole("self_attn.k_norm"),
}
_LATENT: Table = {
    "self_attention.linear_q_proj": rows("self_attn.q_proj"),
    "self_attention.linear_q_down_proj": Layout(
        0, partial(_latent, "self_attn.q_a_proj", operator.attrgetter("q_lora_rank"))
    ),
    "self_attention.q_layernorm": whole("self_attn.q_a_layernorm"),
    "self_attention.linear_q_up_proj.layer_norm": whole("self_attn.q_a_layernorm"),
    "self_attention.linear_q_up_proj": rows("self_attn.q_b_proj"),
    "self_attention.linear_kv_down_proj": Layout(
        0,
        partial(
            _latent,
            "self_attn.kv_a_proj_with_mqa",
            lambda config: config.kv_lora_rank + config.qk_pos_emb_head_dim,
        ),
    ),
    "self_attention.kv_layernorm": whole("self_attn.kv_a_layernorm"),
    "self_attention.linear_kv_up_proj.layer_norm": whole("self_attn.kv_a_layernorm"),
    "self_attention.linear_kv_up_proj": rows("self_attn.kv_b_proj"),
}
_FUSED_EXPERTS: Table = {
    "mlp.router": whole("mlp.gate"),
    "mlp.experts.linear_fc1": gate_up("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
    "mlp.experts.linear_fc2": columns("mlp.experts.down_proj"),
}
_SHARED_EXPERTS: Table = {
    "mlp.router.expert_bias": whole("mlp.gate.e_score_correction_bias"),
    "mlp.shared_experts.linear_fc1": gate_up(
        "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"
    ),
    "mlp.shared_experts.linear_fc2": columns("mlp.shared_experts.down_proj"),
}


def _experts(block: str, gate: str, up: str, down: str) -> Table:
    """Return the tensors of experts that have one for each of their projections."""
    expert = f"{block}.experts.{{expert}}"
    return {
        "mlp.router": whole(f"{block}.gate"),
        "mlp.experts.linear_fc1": gate_up(f"{expert}.{gate}", f"{expert}.{up}"),
        "mlp.experts.linear_fc2": columns(f"{expert}.{down}"),
    }


_MLP_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """The parameters of a layer; those of `experts` are other ones where experts are fused."""

    layer: Table
    experts: Table | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family({**_LAYER, **_QKV}),
    "qwen2": Family({**_LAYER, **_QKV}),
    "qwen3": Family({**_LAYER, **_QKV, **_QK_NORM}),
    "qwen3_moe": Family({**_LAYER, **_QKV, **_QK_NORM}, _MLP_EXPERTS),
    "mixtral": Family({**_LAYER, **_QKV}, _experts("block_sparse_moe", "w1", "w3", "w2")),
    "deepseek_v3": Family({**_LAYER, **_LATENT, **_SHARED_EXPERTS}, _MLP_EXPERTS),
}
"""By `model_type` of the checkpoint's configuration."""

_OTHER_WEIGHTS = (
    "layernorm_zero_centered_gamma",
    "rotary_interleaved",
    "attention_output_gate",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "use_grouped_gemm_for_dense_mlp",  # its activation takes gate and up in turns of 32
    "moe_latent_size",
)
"""Settings of a TransformerConfig by which parameters hold other numbers than a checkpoint's."""
_SPLIT_FURTHER = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Settings by which the part of a rank of tensor parallelism is split among other ranks."""
_HOOK_THAT_GATHERS = "DistributedDataParallel._make_forward_pre_hook"

_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.)?"
    r"(?:linear_fc(?P<fc>[12])\.weight(?P<many>\d*)|weight(?P<legacy>[12]))"
)
"""The forms of experts: a module for each, parameters of one module (`weight3`), or a stack."""
_LEAF = re.compile(r"(?P<key>.+?)(?P<norm>\.layer_norm_|\.)(?P<leaf>weight|bias)")
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a tensor that lies in a parameter: rows or columns, of one expert of a stack."""

    name: str
    shape: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    dim: int
    at: int
    length: int
    stack: Callable[[torch.Tensor], torch.Tensor] | None
    index: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part, as a view of the parameter."""
        held = tensor.detach()
        if self.stack is not None:
            held = self.stack(held)[self.index]
        part = held.narrow(self.dim, self.at, self.length)
        return part.unsqueeze(0) if part.dim() < len(self.shape) else part


class _Place(NamedTuple):
    """The meaning of a parameter: its line in a table, the end of its names, and its experts.

    `experts` are the numbers of those that it belongs to, [None] for what belongs to none. `stack`
    makes `[experts, rows, columns]` of a parameter of several, as a view.
    """

    key: str
    leaf: str
    experts: Sequence[int | None] = (None,)
    stack: Callable[[torch.Tensor], torch.Tensor] | None = None


class MegatronSource(DeclaredSource):
    """The weights of a model of Megatron-Core, under the names of its Hugging Face checkpoint.

    Every rank of tensor, pipeline, expert and data parallelism gives its part to `connect`. Nothing
    is gathered for receivers on the host of the ranks, and no stage sends to another one.

    Args:
        model: the GPTModel of this rank, also wrapped, or the list of its chunks where there are
            virtual stages.
        config: the configuration of the checkpoint: an object of transformers, a mapping, or the
            directory of its `config.json`. `model_type` is the family, and `vocab_size` cuts the
            padding of the vocabulary off.
        fused_experts: whether receivers hold the experts of a layer in two tensors, as modules of
            transformers 5 do. Else each expert has its own, as in checkpoints and for vLLM.

    `dtype` and `rename` as in `connect`. Raises ConfigError for a family that is not known, a chunk
    that is missing, and parameters that the family does not have or that have other sizes.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        config: object,
        *,
        fused_experts: bool = False,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        _note_version()
        checkpoint = Checkpoint.of(config)
        self._chunks = list(map(_unwrapped, [model] if isinstance(model, nn.Module) else model))
        _check(self._chunks, checkpoint)
        check_sendable(
            (pair for chunk in self._chunks for pair in _parameters(chunk)),
            as_dtype("dtype", dtype),
        )
        self._held: list[tuple[str, list[_View]]] = [
            (name, _views_of(name, tensor, chunk, checkpoint, fused=fused_experts))
            for chunk in self._chunks
            for name, tensor in _parameters(chunk)
        ]
        super().__init__(self._declare, dtype=dtype, rename=rename)

    def holdings(self) -> Holdings:
        """Return the parts of the parameters that this rank holds."""
        return Holdings(self._names(), self._boxes, self._parts, bases=self._bases)

    def _parts(self) -> list[torch.Tensor]:
        """Return the parts as they are now.

        Raises ManifestMismatchError where one is missing, and ConfigError where another rank may
        have newer ones.
        """
        if any(map(_gathers_later, self._chunks)):
            raise ConfigError(
                "overlap_param_gather: parameters that the optimizer of another rank has changed "
                "arrive in the next forward pass; call disable_forward_pre_hook() of Megatron's "
                "DistributedDataParallel before an update, and enable_forward_pre_hook() after it"
            )
        now = self._now()
        for (name, _), tensor in zip(self._held, now, strict=True):
            check_readable(name, tensor, self._dtype)
        pairs = zip(now, self._held, strict=True)
        return [view.of(tensor) for tensor, (_, views) in pairs for view in views]

    def _bases(self) -> list[torch.Tensor]:
        """Return the parameter of each part."""
        pairs = zip(self._now(), self._held, strict=True)
        return [tensor for tensor, (_, views) in pairs for _ in views]

    def _declare(self) -> list[Holding]:
        return [
            Holding(view.name, view.shape, view.spans, view.of(tensor))
            for tensor, (_, views) in zip(self._now(), self._held, strict=True)
            for view in views
        ]

    def _now(self) -> list[torch.Tensor]:
        """Return the parameters as they are now. Raises ManifestMismatchError for other ones."""
        pairs = [pair for chunk in self._chunks for pair in _parameters(chunk)]
        names, held = [name for name, _ in pairs], [name for name, _ in self._held]
        if names != held:
            changed = sorted({*names} ^ {*held}) or names
            raise ManifestMismatchError(
                "the model does not have the parameters that it had at connect(), in their order: "
                f"{shorten(changed)}; connect again",
                mismatched=changed,
            )
        return [tensor for _, tensor in pairs]


@dataclass(frozen=True)
class Checkpoint:
    """The facts of a checkpoint's configuration: its family, vocabulary and tied embeddings."""

    model_type: str
    vocab_size: int
    tied: bool | None

    @classmethod
    def of(cls, config: object) -> Self:
        """Read an object of transformers, a mapping or a directory. Raises ConfigError."""
        if isinstance(config, str | os.PathLike):
            path = Path(config) / "config.json"
            try:
                config = json.loads(path.read_bytes())
            except (OSError, ValueError) as exc:
                raise ConfigError(f"cannot read the checkpoint's configuration: {exc}") from exc
        get = config.get if isinstance(config, Mapping) else partial(_attribute, config)
        family, vocab_size = get("model_type"), get("vocab_size")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError(
                f"the model_type of the checkpoint's configuration is {family!r}, and "
                f"MegatronSource knows {', '.join(FAMILIES)}; for others {ELSEWHERE}"
            )
        if not isinstance(vocab_size, int):
            raise ConfigError(
                f"the vocab_size of the checkpoint's configuration is {vocab_size!r}; it says "
                "where the padding of the vocabulary begins"
            )
        return cls(family, vocab_size, get("tie_word_embeddings"))

    def layer(self, *, fused: bool) -> Table:
        """Return the table of a layer. Raises ConfigError for experts that the family lacks."""
        family = FAMILIES[self.model_type]
        if fused and family.experts is None:
            raise ConfigError(f"{self.model_type} has no experts; leave out fused_experts")
        return {**family.layer, **((_FUSED_EXPERTS if fused else family.experts) or {})}


def _attribute(config: object, name: str) -> Any:
    return getattr(config, name, None)


def _note_version() -> None:
    """Log a version of megatron-core with which nothing was tried."""
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        version = "of no installed package"
    if not version.startswith(tuple(f"{tried}." for tried in TRIED)):
        logger.warning(
            "megatron-core %s was not tried with MegatronSource, but %s: compare the first "
            "update with the checkpoint",
            version,
            ", ".join(TRIED),
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the GPTModel inside of wrappers. Raises ConfigError for another model."""
    inner = model
    while not hasattr(inner, "decoder") and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module  # type: ignore[assignment]  # looked at above
    if not (hasattr(inner, "decoder") and hasattr(inner, "config")):
        raise ConfigError(
            f"MegatronSource sends a GPTModel of megatron-core, or the list of its chunks, not a "
            f"{type(model).__name__}; for others {ELSEWHERE}"
        )
    return inner


def _check(chunks: Sequence[Any], checkpoint: Checkpoint) -> None:
    """Raise ConfigError for chunks that are missing, and for weights that would mean others."""
    if not chunks:
        raise ConfigError("there is no chunk of the model; give the GPTModel of this rank")
    if not all(hasattr(chunk, "pg_collection") for chunk in chunks):
        raise ConfigError(
            f"a chunk of the model is a {type(chunks[0]).__name__} that does not say its groups of "
            f"ranks (pg_collection), as GPTModel of megatron-core {' and '.join(TRIED)} does; "
            f"{ELSEWHERE}"
        )
    config = chunks[0].config
    if not config.gated_linear_unit:
        raise ConfigError(
            f"the model has no gated_linear_unit, and {checkpoint.model_type} has; {ELSEWHERE}"
        )
    stages = config.virtual_pipeline_model_parallel_size or 1
    given = len(set(map(id, chunks)))
    if given != stages or given != len(chunks):
        twice = ", some twice" if given != len(chunks) else ""
        raise ConfigError(
            f"the model has {stages} virtual stages on each rank, and {given} of their chunks are "
            f"given{twice}; give the list of all"
        )
    other = [name for name in _OTHER_WEIGHTS if getattr(config, name, None)]
    other += [name for name in _SPLIT_FURTHER if getattr(config, name, 1) > 1]
    if other:
        raise ConfigError(
            f"the model has {shorten(other)} set, by which its parameters are not the tensors of "
            f"the checkpoint; {ELSEWHERE}"
        )
    tied = chunks[0].share_embeddings_and_output_weights
    if checkpoint.tied is not None and bool(checkpoint.tied) is not bool(tied):
        raise ConfigError(
            f"tie_word_embeddings of the checkpoint's configuration is {checkpoint.tied}, and "
            f"share_embeddings_and_output_weights of the model is {tied}; give the configuration "
            "of this model"
        )


def _parameters(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a chunk, and the biases of its routers, which are buffers."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _gathers_later(chunk: nn.Module) -> bool:
    """Whether Megatron's DistributedDataParallel gathers parameters when a forward pass begins."""
    hooks = chunk._forward_pre_hooks.values()
    return any(getattr(h, "__qualname__", "").startswith(_HOOK_THAT_GATHERS) for h in hooks)


def _views_of(
    name: str, tensor: torch.Tensor, chunk: Any, checkpoint: Checkpoint, *, fused: bool
) -> list[_View]:
    """Return the tensors of the checkpoint that lie in a parameter. Raises ConfigError."""
    table, prefix, place = _MODEL, "", _place(name)
    if match := _IN_LAYER.fullmatch(name):
        layer = chunk.decoder.layers[int(match[1])]
        table, prefix = checkpoint.layer(fused=fused), f"model.layers.{layer.layer_number - 1}."
        place = _place(match[2], layer)
    key, groups = place.key, chunk.pg_collection
    if key == "output_layer" and chunk.share_embeddings_and_output_weights:
        key = "embedding.word_embeddings"  # the copy of the last stage
    if key not in table:
        raise ConfigError(
            f"{checkpoint.model_type} has no tensor for the parameter {name!r} of the model; "
            f"{ELSEWHERE}"
        )
    layout = table[key]
    shape = (tensor if place.stack is None else place.stack(tensor)[0]).shape
    dim = layout.dim if layout.dim < len(shape) else 0
    part = Part(shape[dim], 0, 1, chunk.config, checkpoint.vocab_size)
    if dim == layout.dim:
        group = groups.tp if place.experts[0] is None else groups.expt_tp
        part = replace(part, rank=group.rank(), ranks=group.size())
    try:
        runs = layout.runs(part)
    except ConfigError as exc:
        raise ConfigError(f"the parameter {name!r} {exc}") from exc
    views: list[_View] = []
    for index, expert in enumerate(place.experts):
        at = 0
        for run in runs:
            size, spans = list(shape), [((0, n),) for n in shape]
            size[dim], spans[dim] = run.size, ((run.begin, run.end),)
            sent = run.name.format(expert=expert) + place.leaf
            if expert is not None and sent == run.name + place.leaf:  # all experts in one tensor
                sent = run.name
                size, spans = (
                    [chunk.config.num_moe_experts, *size],
                    [((expert, expert + 1),), *spans],
                )
            length = run.end - run.begin
            views.append(
                _View(prefix + sent, tuple(size), tuple(spans), dim, at, length, place.stack, index)
            )
            at += length
    return views


def _place(name: str, layer: Any = None) -> _Place:
    """Return what a parameter is, by its name in the model, or in its layer."""
    if match := _EXPERT.fullmatch(name):
        experts: list[int] = layer.mlp.local_expert_indices
        kind = match["fc"] or match["legacy"]
        key = f"mlp.experts.linear_fc{kind}"
        if one := match["one"] or match["many"]:
            return _Place(key, ".weight", [experts[int(one)]])
        stack = _as_it_is if match["fc"] else partial(_transposed, kind, len(experts))
        return _Place(key, ".weight", experts, stack)
    if match := _LEAF.fullmatch(name):
        norm = ".layer_norm" if match["norm"] == ".layer_norm_" else ""
        return _Place(match["key"] + norm, f".{match['leaf']}")
    return _Place(name, "")


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _transposed(kind: str, experts: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the stack of GroupedMLP, which has `weight1` as [hidden, experts * rows]."""
    hidden, others = tensor.shape if kind == "1" else tensor.shape[::-1]
    sizes = (hidden, others // experts)
    return tensor.view(experts, *(sizes if kind == "1" else sizes[::-1])).mT
