"""What a receiver of adapters computes in a model of this process is what PEFT computes."""

from __future__ import annotations

import threading
from typing import Any

import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import weightsync as ws
from tests.crew import crew
from tests.integrations.test_adapter_source import KINDS, adapted, sharded_model
from tests.integrations.test_huggingface import llama, quiet_peft, train
from weightsync.integrations.adapter_receivers import MAX_ADAPTERS, AdapterReceivers
from weightsync.integrations.module_adapters import (
    AdaptedModule,
    ModuleAdapters,
    ModuleAdapterSink,
)
from weightsync.update import session

pytestmark = quiet_peft

TOKENS = torch.arange(24).reshape(2, 12)
COMPUTED = {kind: config for kind, config in KINDS.items() if kind not in ("dora", "whole-head")}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def gpt2() -> Any:
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    made: Any = GPT2LMHeadModel(config)
    return made.eval()


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_each_version_computes_what_peft_does(kind: str, base: torch.dtype) -> None:
    model: Any = adapted(kind, dtype=base).eval()
    served: Any = llama(dtype=base)
    served.eval()
    adapters, module = ModuleAdapters(served), AdaptedModule(served)
    plain = logits(served)
    source = ws.AdapterSource(model, name="policy")
    wanted = []
    with ws.connect(source, to=adapters.receiver("policy")) as sender:
        for seed in (2, 3):
            train(model, seed)
            sender.send_weights()
            wanted.append(logits(model))
    assert not torch.equal(wanted[0], wanted[1])
    assert [held.version for held in adapters.held()] == [1, 2]
    for held, expected in zip(adapters.held(), wanted, strict=True):
        with module.using(held):
            assert torch.equal(logits(served), expected)
    with module.using(None):
        assert torch.equal(logits(served), plain)
    adapters.close()


def computed_of_shards(rank: int) -> tuple[dict[str, str], dict[int, int], torch.Tensor | None]:
    """One rank's part: send the shards of an adapter, and compute with it on rank 0."""
    served: Any = llama()
    adapters, module = ModuleAdapters(served.eval()), AdaptedModule(served)
    to: Any = adapters.receiver("policy") if rank == 0 else ()
    with ws.connect(ws.AdapterSource(sharded_model(), name="policy"), to=to) as sender:
        report = sender.send_weights()
    computed = None
    if rank == 0:
        with module.using(adapters.held()[0]):
            computed = logits(served)
    adapters.close()
    return dict(report.gathered), dict(report.receivers[0].sources), computed


def test_the_shards_of_two_ranks_are_read_from_both() -> None:
    with crew(2) as ranks:
        (gathered, sources, computed), _ = ranks.run(computed_of_shards)
    assert gathered == {}
    assert sources.keys() == {0, 1}
    assert computed is not None
    assert torch.equal(computed, logits(adapted().eval()))


def test_transposed_linear_layers() -> None:
    served = gpt2()
    model: Any = peft.get_peft_model(
        gpt2(), peft.LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    )
    train(model, 4)
    adapters, module = ModuleAdapters(served), AdaptedModule(served)
    source = ws.AdapterSource(model.eval(), name="policy")
    with ws.connect(source, to=adapters.receiver("policy")) as sender:
        sender.send_weights()
    with module.using(adapters.held()[0]):
        assert torch.equal(logits(served), logits(model))
    adapters.close()


def test_the_parameters_of_the_module_keep_their_names() -> None:
    served = llama()
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    adapters, module = ModuleAdapters(served), AdaptedModule(served)
    source = ws.AdapterSource(adapted(), name="policy")
    with ws.connect(source, to=adapters.receiver("policy")) as sender:
        sender.send_weights()
    with module.using(adapters.held()[0]):
        logits(served)
    after = served.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    adapters.close()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "DoRA: .*q_proj.lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*lm_head"),
        ({"trainable_token_indices": [1, 2]}, "trained whole: .*trainable_tokens"),
    ],
)
def test_what_is_not_computed_is_refused(config: dict[str, Any], named: str) -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], **config))
    adapters = ModuleAdapters(llama())
    with pytest.raises(ws.ManifestMismatchError, match=named):
        ws.connect(ws.AdapterSource(model, name="policy"), to=adapters.receiver("policy"))
    assert adapters.held() == []
    adapters.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, "does not compute use_dora=True"),
        ({"peft_type": "IA3"}, "does not compute peft_type='IA3'"),
        ({"lora_alpha": "8"}, "lora_alpha of the config is '8', not a number"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern of the config has no pattern"),
        ({"rank_pattern": 3}, "rank_pattern of the config is a int"),
        ({"r": 2}, r"other ranks than the tensors: .*q_proj \(rank 2, tensors of rank 4\)"),
        ({"r": 0.5}, "has the rank 0.5"),
    ],
)
def test_what_the_config_alone_tells_is_refused_when_it_is_staged(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], named: str
) -> None:
    """A sender of another version, or of another program, may not refuse it."""
    from weightsync.integrations import adapters as module  # what is patched

    served, encode = llama(), module.encode_config
    adapters = ModuleAdapters(served)
    with ws.connect(
        ws.AdapterSource(adapted(), name="policy"), to=adapters.receiver("policy")
    ) as sender:
        sender.send_weights()
    (before,) = adapters.held()
    monkeypatch.setattr(module, "encode_config", lambda config: encode({**config, **change}))
    monkeypatch.setattr(module, "unsupported", lambda _: [])
    source = ws.AdapterSource(adapted(), name="policy")
    with (
        ws.connect(source, to=adapters.receiver("policy")) as sender,
        pytest.raises(ws.ConfigError, match=named),
    ):
        sender.send_weights()
    assert adapters.held() == [before]
    assert adapters.receiver("policy").version == 1
    adapters.close()


def test_a_version_is_held_until_it_is_forgotten() -> None:
    adapters = ModuleAdapters(llama())
    with ws.connect(
        ws.AdapterSource(adapted(), name="policy"), to=adapters.receiver("policy")
    ) as sender:
        for _ in range(3):
            sender.send_weights()
    first, second, third = adapters.held()
    assert len({held.key for held in (first, second, third)}) == 3
    adapters.forget([first.key, "nobody@1#9"])
    assert adapters.held() == [second, third]
    with pytest.raises(ws.ConfigError, match="does not hold the adapter 'policy@1#1'"):
        adapters.get(first.key)
    adapters.unload("policy")
    assert [held.retired for held in adapters.held()] == [True, True]
    assert adapters.get(third.key).layers is third.layers
    adapters.unload("policy")
    adapters.close()


def test_a_commit_that_an_unload_does_not_wait_for_arrives_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = adapted("patterns").eval()
    served: Any = llama()
    adapters = ModuleAdapters(served.eval())
    take, unloads = ModuleAdapterSink.take, list[threading.Thread]()

    def slow(sink: ModuleAdapterSink) -> Any:
        unloads.append(threading.Thread(target=adapters.unload, args=("policy",)))
        unloads[0].start()
        unloads[0].join(60)  # as long as the commit waits for a reader of the base model
        return take(sink)

    monkeypatch.setattr(session, "_CLOSE_S", 0.2)
    monkeypatch.setattr(ModuleAdapterSink, "take", slow)
    receiver = adapters.receiver("policy")
    with ws.connect(ws.AdapterSource(model, name="policy"), to=receiver) as sender:
        sender.send_weights()
    assert not unloads[0].is_alive()
    assert [(held.version, held.retired) for held in adapters.held()] == [(1, True)]
    adapters.close()


def test_what_another_sender_commits_during_an_unload_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters, source = ModuleAdapters(llama()), ws.AdapterSource(adapted(), name="policy")
    with ws.connect(source, to=adapters.receiver("policy")) as sender:
        sender.send_weights()
    remove = AdapterReceivers.remove

    def slow(receivers: AdapterReceivers, name: str) -> Any:
        gone = remove(receivers, name)
        with ws.connect(source, to=adapters.receiver("policy")) as other:
            other.send_weights(7)
        return gone

    monkeypatch.setattr(AdapterReceivers, "remove", slow)
    adapters.unload("policy")
    assert [(held.version, held.retired) for held in adapters.held()] == [(1, True), (7, False)]
    adapters.close()


def test_a_version_of_the_number_0_is_held_and_unloaded_like_others() -> None:
    adapters, source = ModuleAdapters(llama()), ws.AdapterSource(adapted(), name="policy")
    with ws.connect(source, to=adapters.receiver("policy")) as sender:
        sender.send_weights(0, rewind=True)
    kept = adapters.receiver("policy")
    for i in range(MAX_ADAPTERS):
        adapters.receiver(f"asked-{i}")
    assert adapters.receiver("policy") is kept
    adapters.unload("policy")
    assert [(held.version, held.retired) for held in adapters.held()] == [(0, True)]
    adapters.close()


def test_names() -> None:
    adapters = ModuleAdapters(llama(), taken=["tiny"])
    with pytest.raises(ws.ConfigError, match="'tiny' is the name of the base model"):
        adapters.receiver("tiny")
    for name in ("", "a/b", "a@1", "..", "stra\u00dfe", "p\u0663"):
        with pytest.raises(ws.ConfigError, match="an adapter's name is"):
            adapters.receiver(name)


def test_receivers_that_hold_nothing_do_not_pile_up() -> None:
    adapters, model = ModuleAdapters(llama()), adapted()
    senders = []
    for i in range(MAX_ADAPTERS):
        adapters.receiver(f"asked-{i}")
        source = ws.AdapterSource(model, name=f"sent-{i}")
        senders.append(ws.connect(source, to=adapters.receiver(f"sent-{i}"), packed=True))
    assert set(adapters._receivers.names) == {f"sent-{i}" for i in range(MAX_ADAPTERS)}
    with pytest.raises(ws.ConfigError, match=f"holds {MAX_ADAPTERS} adapters"):
        adapters.receiver("one-more")
    senders[0].close()
    adapters.receiver("one-more")
    for sender in senders[1:]:
        sender.close()
    adapters.close()


def test_a_receiver_that_was_just_asked_for_is_not_the_next_to_go() -> None:
    adapters = ModuleAdapters(llama())
    first = adapters.receiver("asked-0")
    for i in range(1, MAX_ADAPTERS):
        adapters.receiver(f"asked-{i}")
    assert adapters.receiver("asked-0") is first
    for i in range(MAX_ADAPTERS - 1):
        adapters.receiver(f"more-{i}")
    assert adapters.receiver("asked-0") is first
    assert first.status().instance
    adapters.close()


def test_one_name_asked_for_by_several_threads_is_one_receiver() -> None:
    adapters, found = ModuleAdapters(llama()), list[Any]()
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(adapters.receiver("policy"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    adapters.close()


def test_a_part_of_an_adapter_is_no_version() -> None:
    """The layers that it lacks would compute as the base model."""
    model, held = adapted(), ModuleAdapters(llama())
    source = ws.AdapterSource(model, name="policy")
    with ws.connect(source, to=held.receiver("policy")) as sender:
        sender.send_weights()
        pairs = dict(source.tensors())
        some = [(name, t) for name, t in pairs.items() if "layers.0" in name or "config" in name]
        with (
            pytest.raises(ws.ConfigError, match=r"is partial.*without partial=True"),
            sender.update(partial=True) as update,
        ):
            update.send(some)
        assert [version.version for version in held.held()] == [1]
        sender.send_weights()
