"""Updates of a real vLLM in this process, tied and untied: what it computes, and each trap."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import weightsync as ws
from tests.vllm.offline import assert_computes, engine_of, generated, offline_llm
from tests.vllm.test_migrating import block
from tests.vllm.tiny import change, expected, held, largest_difference, make_model
from weightsync.errors import ConfigError, ManifestMismatchError, ProtocolError, WeightSyncError
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.ipc_engine import IPCWeightTransferEngine
from weightsync.integrations.vllm.server import VllmWorkerTransport
from weightsync.receiver import WeightReceiver
from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.wire import codec
from weightsync.wire.messages import CheckReply, CheckRequest, StatusRequest

Q = "model.layers.0.self_attn.q_proj.weight"


@dataclass
class Pair:
    """A vLLM, and the model whose weights it has."""

    llm: Any
    model: Any

    @property
    def tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    @property
    def worker(self) -> VllmWorkerTransport:
        return vllm_targets(self.llm)[0]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(Path(folder), tied=request.param)
    with offline_llm(Path(folder)) as llm:
        yield Pair(llm, model)


@pytest.fixture(autouse=True)
def _in_step(pair: Pair) -> Iterator[None]:
    """Each test begins with the weights of `pair.model` in use, staged."""
    yield
    engine = engine_of(pair.llm)
    engine.receiver.close()
    engine.receiver = WeightReceiver(engine.receiver.sink)
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        sender.send_weights()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_three_updates_compute_what_transformers_does(
    pair: Pair, *, packed: bool, apply: Any
) -> None:
    engine = engine_of(pair.llm)
    engine.receiver = WeightReceiver(engine.receiver.sink, apply=apply)
    with ws.connect(
        pair.model, to=vllm_targets(pair.llm), packed=packed, bucket_nbytes=1 << 16
    ) as sender:
        for seed in (1, 2, 3):
            before = expected(pair.model)[1]
            change(pair.model, seed + 100 * packed + 1000 * (apply == "staged"))
            report = sender.send_weights(label=f"step-{seed}")
            assert (report.apply, report.packed, report.verified) == (apply, packed, "arrived")
            assert_computes(pair.llm, pair.model)
            assert pair.llm.get_weight_version() == str(report.version)
            assert largest_difference(expected(pair.model)[1], before) > 0.01


def test_a_version_of_a_trainer_in_bfloat16_is_cast_on_the_way(pair: Pair) -> None:
    with ws.connect(pair.model, to=vllm_targets(pair.llm), dtype=torch.bfloat16) as sender:
        sender.send_weights()
    with torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    assert_computes(pair.llm, pair.model)


def test_whole_layers_may_be_sent_alone(pair: Pair) -> None:
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        sender.send_weights()
        change(pair.model, 11, names="layers.1.")
        with sender.update(partial=True) as update:
            update.send((n, p) for n, p in pair.model.named_parameters() if "layers.1." in n)
    assert_computes(pair.llm, pair.model)


@pytest.mark.parametrize("left_out", ["k_proj", "gate_proj"])
def test_a_part_of_a_fused_layer_is_refused(pair: Pair, left_out: str) -> None:
    sent = [
        (name, torch.zeros_like(parameter))
        for name, parameter in pair.model.named_parameters()
        if "layers.0." in name and left_out not in name
    ]
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        sender.send_weights()
        with (
            pytest.raises(ManifestMismatchError, match="fuses into") as caught,
            sender.update(partial=True) as update,
        ):
            update.send(sent)
        assert len(caught.value.mismatched) == 1
        assert_computes(pair.llm, pair.model)
        change(pair.model, 12)
        sender.send_weights()
    assert_computes(pair.llm, pair.model)


def test_shapes_and_names_are_checked_before_any_byte_moves(pair: Pair) -> None:
    state = {name: parameter.detach() for name, parameter in pair.model.named_parameters()}
    wrong = {**state, Q: torch.zeros(4, 64), "model.extra.weight": torch.zeros(3)}
    del wrong["model.norm.weight"]
    with pytest.raises(ManifestMismatchError) as caught:
        ws.connect(wrong.items, to=vllm_targets(pair.llm))
    assert caught.value.unexpected == ("model.extra.weight",)
    assert [text.split(":")[0] for text in caught.value.mismatched] == [Q]
    assert_computes(pair.llm, pair.model)


def test_shapes_are_checked_without_a_checkpoint_to_compare_with(pair: Pair) -> None:
    sink = engine_of(pair.llm).receiver.sink
    known, sink._checkpoint, sink._known = sink._checkpoint, None, {}
    try:
        state = {name: parameter.detach() for name, parameter in pair.model.named_parameters()}
        with pytest.raises(ManifestMismatchError, match="does not fit"):
            ws.connect({**state, Q: torch.zeros(4, 64)}, to=vllm_targets(pair.llm))
        del state["model.norm.weight"]
        with (
            ws.connect(state, to=vllm_targets(pair.llm)) as sender,
            pytest.raises(ManifestMismatchError) as caught,
        ):
            sender.send_weights()
        assert caught.value.missing == ("model.norm.weight",)
    finally:
        sink._checkpoint, sink._known = known, {}
    assert_computes(pair.llm, pair.model)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_failure_in_the_middle_neither_kills_nor_stays(pair: Pair, apply: Any) -> None:
    engine = engine_of(pair.llm)
    engine.receiver = WeightReceiver(engine.receiver.sink, apply=apply)
    healthy = True

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, parameter) in enumerate(pair.model.named_parameters()):
            if i == 9 and not healthy:
                raise RuntimeError("the trainer has lost its weights")
            yield name, parameter.detach()

    with ws.connect(
        tensors, to=vllm_targets(pair.llm), bucket_nbytes=1 << 14, timeout_s=30
    ) as sender:
        version = sender.send_weights().version
        healthy = False
        with pytest.raises(RuntimeError, match="lost its weights"):
            sender.send_weights()
        status = pair.worker.call(StatusRequest(), timeout_s=5)
        assert (status.state, status.version) == (  # type: ignore[union-attr]
            "READY" if apply == "staged" else "TORN",
            version,
        )
        if apply == "staged":
            assert_computes(pair.llm, pair.model)
        assert len(generated(pair.llm)[0]) == 12, "a mixture, and no dead process"
        healthy = True
        change(pair.model, 13)
        sender.send_weights()
    assert_computes(pair.llm, pair.model)


def test_checksums_are_of_what_the_worker_computes_with(pair: Pair) -> None:
    wanted = {
        name: to_hex(mix64(as_bytes(tensor.detach().contiguous())))
        for name, tensor in held(pair.model).items()
    }
    answer = pair.worker.call(CheckRequest(), timeout_s=30)
    assert isinstance(answer, CheckReply)
    buffers = answer.checksums.keys() - wanted.keys()
    assert {name: answer.checksums[name] for name in wanted} == wanted
    assert {name.rpartition(".")[2] for name in buffers} >= {"cos_sin_cache"}
    assert not any(name.endswith("weight") for name in buffers)
    assert len(set(wanted.values())) == len(wanted) - (1 if pair.tied else 0)
    change(pair.model, 14, names="layers.1.mlp.up_proj")
    changed = to_hex(
        mix64(as_bytes(held(pair.model)["model.layers.1.mlp.gate_up_proj.weight"].contiguous()))
    )
    compared = pair.worker.call(
        CheckRequest(
            action="compare",
            checksums={**wanted, "model.layers.1.mlp.gate_up_proj.weight": changed},
        ),
        timeout_s=30,
    )
    assert isinstance(compared, CheckReply)
    assert compared.different == ["model.layers.1.mlp.gate_up_proj.weight"]


def test_vllms_own_verbs_drive_the_engine(pair: Pair) -> None:
    change(pair.model, 15)
    pair.llm.init_weight_transfer_engine({"init_info": {}})
    pair.llm.start_weight_update()

    def deliver(info: Any) -> None:
        plain = codec.to_plain(ws_update(info))["body"]
        assert isinstance(plain, dict)
        pair.llm.update_weights({"update_info": plain["update_info"]})

    IPCWeightTransferEngine.trainer_send_weights(
        ((n, p) for n, p in pair.model.named_parameters()), {"send_mode": deliver}
    )
    pair.llm.finish_weight_update("by hand")
    pair.llm.reset_prefix_cache()
    assert_computes(pair.llm, pair.model)
    assert pair.llm.get_weight_version() == "by hand"


def test_the_known_names_send_by_a_callable(pair: Pair) -> None:
    for seed in (21, 22):
        change(pair.model, seed)
        code = block("migrating-from-vllm.md", "llm.start_weight_update")
        exec(code, {"llm": pair.llm, "model": pair.model})
        assert_computes(pair.llm, pair.model)


@pytest.mark.parametrize("names", ["parameters", "state_dict"])
def test_packed_messages_may_cut_what_vllm_fuses(pair: Pair, names: str) -> None:
    change(pair.model, 17 + len(names))
    pairs = pair.model.named_parameters() if names == "parameters" else pair.model.state_dict()
    sent = pairs.items() if isinstance(pairs, dict) else pairs
    pair.llm.init_weight_transfer_engine({"init_info": {}})
    pair.llm.start_weight_update()
    messages: list[list[str]] = []

    def deliver(info: Any) -> None:
        messages.append(info.names)
        pair.llm.update_weights({"update_info": msgspec.to_builtins(info)})

    IPCWeightTransferEngine.trainer_send_weights(
        sent, {"send_mode": deliver, "packed": True, "packed_buffer_size_bytes": 1 << 15}
    )
    assert any("q_proj" in message[-1] or "gate_proj" in message[-1] for message in messages)
    pair.llm.finish_weight_update()
    pair.llm.reset_prefix_cache()
    assert_computes(pair.llm, pair.model)


def test_a_session_that_leaves_out_part_of_a_fused_layer_is_refused(pair: Pair) -> None:
    before = copy.deepcopy(pair.model)
    change(pair.model, 19)
    pair.llm.init_weight_transfer_engine({"init_info": {}})
    pair.llm.start_weight_update()
    given = [(n, p) for n, p in pair.model.named_parameters() if "layers.1.self_attn.k_" not in n]

    def deliver(info: Any) -> None:
        pair.llm.update_weights({"update_info": msgspec.to_builtins(info)})

    IPCWeightTransferEngine.trainer_send_weights(given, {"send_mode": deliver})
    with pytest.raises(ManifestMismatchError, match=r"layers\.1\.self_attn\.k_proj"):
        pair.llm.finish_weight_update()
    assert_computes(pair.llm, before)
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        sender.send_weights()
    assert_computes(pair.llm, pair.model)


def ws_update(info: Any) -> Any:
    from weightsync.wire.messages import UpdateRequest

    return UpdateRequest(update_info=info)


def test_vllms_own_verbs_raise_what_is_wrong(pair: Pair) -> None:
    pair.llm.start_weight_update()
    with pytest.raises(ProtocolError, match="pickle"):
        pair.llm.update_weights({"update_info": {"ipc_handles_pickled": "gASVBQ=="}})
    assert_computes(pair.llm, pair.model)
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        change(pair.model, 16)
        sender.send_weights()
    assert_computes(pair.llm, pair.model)


@contextmanager
def asleep() -> Iterator[None]:
    """What the allocator of vLLM's sleep mode knows of a worker that sleeps; no CPU can sleep."""
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    CuMemAllocator.instance = allocator = CuMemAllocator()
    for tag, sleeps in (("weights", True), ("kv_cache", False)):
        allocator.pointer_to_data[len(tag)] = AllocationData((0, 0, 0, 0), tag, is_asleep=sleeps)
    try:
        yield
    finally:
        CuMemAllocator.instance = None


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_one_that_sleeps_takes_nothing_until_it_wakes(pair: Pair, apply: Any) -> None:
    engine = engine_of(pair.llm)
    engine.receiver = WeightReceiver(engine.receiver.sink, apply=apply)
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        held = sender.send_weights().version
        with asleep():
            with pytest.raises(ConfigError, match="wake_up"):
                sender.send_weights()
            with pytest.raises(ConfigError, match="wake_up"):
                pair.worker.call(CheckRequest(action="checksum"), timeout_s=30)
        status = engine.receiver.status()
        assert (status.state, status.version, status.update_id) == ("READY", held, None)
        assert_computes(pair.llm, pair.model)
        change(pair.model, 17)
        sender.send_weights()
    assert_computes(pair.llm, pair.model)


def test_a_session_that_a_dead_sender_left_open_is_closed(pair: Pair) -> None:
    pair.llm.start_weight_update()
    with pytest.raises(RuntimeError, match="already"):
        pair.llm.start_weight_update()
    engine_of(pair.llm).shutdown()
    with ws.connect(pair.model, to=vllm_targets(pair.llm)) as sender:
        sender.send_weights()
    with pytest.raises((RuntimeError, WeightSyncError)):
        pair.llm.finish_weight_update()
