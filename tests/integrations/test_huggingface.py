"""What PEFT models send is bit for bit what peft itself makes of them, in float32, rounded once."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync as ws
from weightsync.integrations.huggingface import MergedSource, adapter_tensors

# peft asks transformers for names that transformers gives up.
quiet_peft = pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers",
    "ignore:Model has `tie_word_embeddings:UserWarning",
    "ignore::UserWarning:peft",
)

Tensors = dict[str, torch.Tensor]
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": PROJECTIONS},
    "rslora-alpha": {"target_modules": PROJECTIONS, "use_rslora": True, "lora_alpha": 7},
    "dora": {"target_modules": PROJECTIONS, "use_dora": True},
    "whole-head": {"target_modules": PROJECTIONS, "modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model: Any = LlamaForCausalLM(config)
    made: LlamaForCausalLM = model.to(dtype)
    return made


def adapted(kind: str, *, seed: int = 1, **model: Any) -> Any:
    found = peft.get_peft_model(llama(**model), peft.LoraConfig(r=4, **KINDS[kind]))
    train(found, seed)
    return found


def train(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def state(model: nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def merged(model: nn.Module, dtype: torch.dtype) -> Tensors:
    """What peft makes of the model in float32, rounded once."""
    wide = copy.deepcopy(model).float()
    return {name: tensor.to(dtype) for name, tensor in state(wide.merge_and_unload()).items()}  # type: ignore[operator]  # a PeftModel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("shm_clean")
def test_a_plain_receiver_holds_the_merged_model(kind: str, dtype: torch.dtype) -> None:
    model, server = adapted(kind, dtype=dtype), llama(dtype=dtype)
    receiver = ws.WeightReceiver(server)
    with ws.connect(MergedSource(model), to=receiver.handle) as sender:
        for seed in (2, 3):
            train(model, seed)
            before = state(model)
            report = sender.send_weights()
            assert report.verified == "held"
            same(state(model), before)
            same(state(server), merged(model, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, None], ids=str)
def test_a_small_adapter_of_a_bf16_base_is_not_rounded_before_it_is_sent(
    kind: str, sent: torch.dtype | None
) -> None:
    """Steps as small as those of a learning rate of 1e-5: bf16 keeps few of their sums."""
    model = adapted(kind, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.mul_(1e-2)
    server = llama(dtype=sent or torch.bfloat16)
    source = MergedSource(model, dtype=sent)
    with ws.connect(source, to=ws.WeightReceiver(server)) as sender:
        sender.send_weights()
    same(state(server), merged(model, sent or torch.bfloat16))
    if sent is torch.float32:
        name = "model.layers.1.self_attn.q_proj.weight"
        base = model.get_base_model().model.layers[1].self_attn.q_proj.base_layer.weight
        unchanged = (state(server)[name] == base.float()).float().mean()
        assert unchanged < 0.01, f"{unchanged:.0%} of the elements lost the adapter"


@pytest.mark.parametrize("kind", ["lora", "embeddings"])
def test_tied_weights_stay_tied(kind: str) -> None:
    model, server = adapted(kind, tied=True), llama(tied=True)
    source = MergedSource(model)
    assert dict(source.manifest.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    with ws.connect(source, to=ws.WeightReceiver(server).handle) as sender:
        sender.send_weights()
    same(state(server), state(copy.deepcopy(model).merge_and_unload()))
    assert server.lm_head.weight is server.model.embed_tokens.weight


def test_an_adapter_on_the_alias_alone_is_refused() -> None:
    model = peft.get_peft_model(llama(tied=True), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ws.ConfigError, match=r"lm_head has an adapter.*untie"):
        MergedSource(model)


def test_a_merge_casts_on_the_way() -> None:
    model, server = adapted("lora"), llama(dtype=torch.bfloat16)
    source = MergedSource(model, dtype=torch.bfloat16)
    with ws.connect(source, to=ws.WeightReceiver(server).handle) as sender:
        sender.send_weights()
    merged = copy.deepcopy(model).merge_and_unload()
    same(state(server), {n: t.to(torch.bfloat16) for n, t in state(merged).items()})


@pytest.mark.parametrize("kind", ["lora", "whole-head"])
@pytest.mark.usefixtures("shm_clean")
def test_the_adapter_alone_follows_the_model(kind: str) -> None:
    model, server = adapted(kind), adapted(kind, seed=9)
    with ws.connect(model, to=ws.WeightReceiver(server).handle, packed=True) as sender:
        whole = sender.send_weights()
        train(model, 4)
        sent = adapter_tensors(model)
        with sender.update(partial=True) as update:
            update.send(sent)
        report = update.last_report
        assert report is not None
    assert report.nbytes == sum(t.nbytes for _, t in sent) < whole.nbytes
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n, _ in sent}
    same(state(server), state(model))


def test_one_of_two_adapters() -> None:
    model = adapted("lora")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    other = [name for name, _ in adapter_tensors(model, adapter="other")]
    assert len(other) == 4
    assert all(".k_proj.lora_" in name and ".other." in name for name in other)
    assert len(adapter_tensors(model)) == 12
    with pytest.raises(ws.ConfigError, match="no adapter 'third'; it has default, other"):
        adapter_tensors(model, adapter="third")


@pytest.mark.parametrize("make", [MergedSource, adapter_tensors])
def test_what_is_no_peft_model_is_refused(make: Any) -> None:
    with pytest.raises(ws.ConfigError, match="LlamaForCausalLM is no PeftModel"):
        make(llama())
