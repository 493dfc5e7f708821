"""A model with adapters merged in: its base never changes, and the report tells what is lost."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import weightsync as ws
from tests.crew import Crew, crew
from tests.integrations.test_huggingface import (
    PROJECTIONS,
    adapted,
    llama,
    merged,
    quiet_peft,
    same,
    state,
    train,
)
from weightsync.integrations.huggingface import MergedSource

pytestmark = quiet_peft

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gpt2(*, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose linear layers are Conv1D, with weights that are transposed."""
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    made: Any = GPT2LMHeadModel(config)
    return made.to(dtype)


def adapted_gpt2(**model: Any) -> Any:
    names = ["c_attn", "c_proj", "c_fc"]
    config = peft.LoraConfig(
        r=4, target_modules=names, fan_in_fan_out=True, use_rslora=True, lora_alpha=7
    )
    found = peft.get_peft_model(gpt2(**model), config)
    train(found, 1)
    return found


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lora": (lambda **model: adapted("lora", **model), llama),
    "rslora-alpha": (lambda **model: adapted("rslora-alpha", **model), llama),
    "tied": (
        lambda **model: adapted("lora", tied=True, **model),
        lambda **model: llama(tied=True, **model),
    ),
    "tied-embeddings": (
        lambda **model: adapted("embeddings", tied=True, **model),
        lambda **model: llama(tied=True, **model),
    ),
    "dora": (lambda **model: adapted("dora", **model), llama),
    "conv1d": (adapted_gpt2, gpt2),
}
CALLS = ("update_weights", "finish_weight_update")


class Failing:
    """The line to a receiver: it fails at the next call of one name, or cancels the sender."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._handle = receiver.handle
        self.calls: set[str] = set()
        self.fails = ""
        self.then: Callable[[], object] | None = None

    def handle(self, message: Mapping[str, Any]) -> dict[str, Any]:
        call = message["call"]
        self.calls.add(call)
        if call == self.fails:
            self.fails = ""
            if self.then is None:
                raise ConnectionError(f"the line broke at {call}")
            self.then()
        return self._handle(message)


class BrokenLayer:
    """Makes the merge of the third layer of an update fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        merge = LoraLinear.merge

        def counted(layer: Any, *args: Any, **kwargs: Any) -> None:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("no memory for this layer")
            merge(layer, *args, **kwargs)

        monkeypatch.setattr(LoraLinear, "merge", counted)


def own(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """The base's tensors, and where they are."""
    return {
        name: (tensor.clone(), tensor.data_ptr())
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }


def cancelled_at(call: str, sender: ws.WeightSender, line: Failing) -> None:
    async def send() -> None:
        task = asyncio.ensure_future(sender.asend_weights())
        loop = asyncio.get_running_loop()
        line.fails = call
        line.then = lambda: loop.call_soon_threadsafe(task.cancel)
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(send())
    line.then = None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.usefixtures("shm_clean")
def test_the_base_is_the_same_after_100_sends_of_which_some_fail(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, plain = MODELS[kind]
    model, server = make(dtype=dtype), plain(dtype=dtype)
    line, layers = Failing(ws.WeightReceiver(server)), BrokenLayer(monkeypatch)
    base, ended = own(model), {"sent": 0, "failed": 0, "cancelled": 0}
    steps = cycle(["", "layer 1", "layer 2", *CALLS, *(f"cancel {call}" for call in CALLS), ""])
    with ws.connect(MergedSource(model), to=line.handle) as sender:
        for i, step in zip(range(100), steps, strict=False):
            if i % 7 == 0:
                train(model, i)
            if step.startswith("cancel "):
                cancelled_at(step.removeprefix("cancel "), sender, line)
                ended["cancelled"] += 1
                continue
            kind_of, _, number = step.partition(" ")
            layers.left = int(number or 0)
            line.fails = step if kind_of in CALLS else ""
            try:
                sender.send_weights()
                ended["sent"] += 1
            except (ws.WeightSyncError, RuntimeError):
                ended["failed"] += 1
            assert (line.fails, layers.left > 0) == ("", False)  # each failure came
        sender.send_weights()
    assert ended["failed"] >= 3 * 12
    assert ended["cancelled"] == 2 * 12
    assert ended["sent"] >= 2 * 12
    assert line.calls >= {*CALLS, "abort_weight_update"}
    for name, (tensor, address) in base.items():
        now = model.state_dict()[name]
        assert torch.equal(now, tensor), name
        assert now.data_ptr() == address, name
    assert not any(layer.merged for layer in model.modules() if isinstance(layer, LoraLinear))
    same(state(server), merged(model, dtype))


@pytest.mark.parametrize("sent", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rslora-alpha", "tied-embeddings", "dora", "conv1d"])
def test_each_merge_is_rounded_once(
    kind: str, dtype: torch.dtype, sent: torch.dtype | None
) -> None:
    make, plain = MODELS[kind]
    model, server = make(dtype=dtype), plain(dtype=sent or dtype)
    with ws.connect(MergedSource(model, dtype=sent), to=ws.WeightReceiver(server)) as sender:
        sender.send_weights()
    same(state(server), merged(model, sent or dtype))


@pytest.mark.parametrize("targets", [["down_proj"], ["gate_up_proj", "down_proj"]])
def test_parameters_of_experts_are_merged_each(targets: list[str]) -> None:
    """PEFT wraps a module once for each of its parameters that has an adapter."""
    torch.manual_seed(5)
    given: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    base: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**given))
    server = copy.deepcopy(base)
    names = [f"mlp.experts.{name}" for name in targets]
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    )
    train(model, 2)
    with ws.connect(MergedSource(model), to=ws.WeightReceiver(server)) as sender:
        report = sender.send_weights()
    same(state(server), merged(model, torch.float32))
    assert report.merge is not None
    sizes = [p.numel() for name, p in server.named_parameters() if any(n in name for n in targets)]
    attention: Any = server.model.layers[0].self_attn
    assert report.merge.elements == sum(sizes) + attention.q_proj.weight.numel()


def slow(model: Any, server: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Count element by element what the report counts, from the receiver's memory."""
    elements = lost = 0
    held = server.state_dict()
    for path, layer in model.get_base_model().named_modules():
        if not hasattr(layer, "get_delta_weight"):
            continue
        delta = layer.get_delta_weight("default").float()
        base = layer.get_base_layer().weight.detach().to(dtype)
        rows = zip(
            delta.flatten().tolist(),
            base.flatten().tolist(),
            held[f"{path}.weight"].flatten().tolist(),
            strict=True,
        )
        for added, before, after in rows:
            elements += added != 0
            lost += added != 0 and before == after
    return elements, lost


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4], ids=str)
@pytest.mark.parametrize("sent", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rslora-alpha", "tied-embeddings", "conv1d"])
def test_the_report_counts_what_rounding_took(
    kind: str, dtype: torch.dtype, sent: torch.dtype, scale: float
) -> None:
    make, plain = MODELS[kind]
    model, server = make(dtype=dtype), plain(dtype=sent)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.mul_(scale)
                parameter[1] = 0  # whole rows without a delta
    with ws.connect(MergedSource(model, dtype=sent), to=ws.WeightReceiver(server)) as sender:
        report = sender.send_weights()
    # The factors are in the base's dtype, and their product is taken in float32.
    elements, lost = slow(copy.deepcopy(model).float(), server, sent)
    assert report.merge == ws.MergeReport(elements=elements, lost=lost)
    assert report.merge.share == lost / elements
    total = sum(
        layer.get_base_layer().weight.numel()
        for layer in model.modules()
        if hasattr(layer, "get_delta_weight")
    )
    assert 0 < elements < total
    told = f"; {lost / elements:.2%} of the merged elements lost the adapter in rounding"
    assert (told in str(report)) == (lost > 0)
    if scale < 1e-3 and sent is torch.bfloat16:
        assert report.merge.share > 0.3
    if scale == 1.0 and sent is torch.float32:
        assert report.merge.share < 1e-3


def test_several_adapters_and_those_that_are_no_sum() -> None:
    model, server = adapted("lora"), llama()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=PROJECTIONS))
    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLinear)]
    with torch.no_grad():  # the second undoes the first, in every second row
        for layer in layers:
            layer.lora_A["other"].weight.copy_(layer.lora_A["default"].weight)
            layer.lora_B["other"].weight.copy_(layer.lora_B["default"].weight)
            layer.lora_B["other"].weight[::2].neg_()
    model.base_model.set_adapter(["default", "other"])
    with ws.connect(MergedSource(model), to=ws.WeightReceiver(server)) as sender:
        several = sender.send_weights().merge
    sizes = [layer.get_base_layer().weight.numel() for layer in layers]
    assert several is not None
    assert several.elements == sum(sizes) // 2
    dora = adapted("dora", dtype=torch.bfloat16)
    with ws.connect(
        MergedSource(dora), to=ws.WeightReceiver(llama(dtype=torch.bfloat16))
    ) as sender:
        found = sender.send_weights().merge
    assert found is not None
    assert 0 < found.lost < found.elements <= sum(sizes)


def test_only_updates_that_merge_count() -> None:
    model = adapted("lora", dtype=torch.bfloat16)

    def server() -> ws.WeightReceiver:
        return ws.WeightReceiver(llama(dtype=torch.bfloat16))

    with ws.connect(llama(dtype=torch.bfloat16), to=server()) as sender:
        assert sender.send_weights().merge is None
    with ws.connect(MergedSource(model), to=server(), packed=True) as sender:
        first = sender.send_weights().merge
        with sender.update(partial=True) as update:
            update.send([("lm_head.weight", torch.ones(64, 32, dtype=torch.bfloat16))])
        assert update.last_report is not None
        assert update.last_report.merge is None
        assert sender.send_weights().merge == first
    with ws.connect(MergedSource(model), to=server()) as sender:
        assert sender.send_async().result(30).merge == first
        train(model, 9)
        second = sender.send_async().result(30).merge
    assert first is not None
    assert second is not None
    assert first.lost != second.lost


class Wrapped(ws.WrappingSource):
    """A source around another that sends the same."""

    @property
    def manifest(self) -> ws.Manifest:
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs


def test_a_source_around_a_merge_passes_its_counts_on() -> None:
    model = adapted("lora", dtype=torch.bfloat16)
    found = []
    for source in (MergedSource(model), Wrapped(MergedSource(model))):
        with ws.connect(source, to=ws.WeightReceiver(llama(dtype=torch.bfloat16))) as sender:
            found.append(sender.send_weights().merge)
    assert found[0] == found[1] is not None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def sends_sharded(rank: int) -> Any:
    """One rank's part: shard a PEFT model, and send it merged."""
    warnings.simplefilter("ignore")
    model = adapted("lora", dtype=torch.bfloat16)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    to: Any = ws.WeightReceiver(llama(dtype=torch.bfloat16)) if rank == 0 else ()
    with ws.connect(MergedSource(model), to=to) as sender:
        return sender.send_weights().merge


def test_ranks_that_gather_count_each_element_once(ranks: Crew) -> None:
    model = adapted("lora", dtype=torch.bfloat16)
    server = ws.WeightReceiver(llama(dtype=torch.bfloat16))
    with ws.connect(MergedSource(model), to=server) as sender:
        alone = sender.send_weights().merge
    assert ranks.run(sends_sharded) == [alone, alone]
    assert alone is not None
    assert alone.lost
