"""Updates of a real vLLM whose model writes weights past its weight loaders: GPT-OSS does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.vllm.offline import assert_computes, engine_of, generated, offline_llm
from tests.vllm.served import vllm_server
from tests.vllm.test_experts import Computed
from tests.vllm.tiny import change, expected, largest_difference, make_gpt_oss, save
from tests.vllm.versions import FLOAT_SINKS
from weightsync.errors import ConfigError, ManifestMismatchError, RemoteError
from weightsync.integrations.vllm import sink as vllm_sink
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.sink import Trial, try_out
from weightsync.receiver import WeightReceiver
from weightsync.specs import Manifest

pytestmark = [pytest.mark.timeout(400), FLOAT_SINKS]
FINAL = 99


@dataclass
class GptOss:
    """A vLLM, the trainer's model, and what a cold engine computes with the weights of FINAL."""

    llm: Any
    model: Any
    cold: Computed

    @property
    def sink(self) -> Any:
        return engine_of(self.llm).receiver.sink

    def restart(self, apply: Any) -> None:
        engine = engine_of(self.llm)
        engine.receiver.close()
        engine.receiver.sink._known.clear()
        engine.receiver = WeightReceiver(engine.receiver.sink, apply=apply)

    def send_final(self) -> None:
        change(self.model, FINAL)
        with ws.connect(self.model, to=vllm_targets(self.llm)) as sender:
            sender.send_weights()
        assert_computes(self.llm, self.model)
        Computed.by(self.llm).assert_same(self.cold)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GptOss]:
    folder, cold_folder = (Path(tmp_path_factory.mktemp(name)) for name in ("model", "cold"))
    model = make_gpt_oss(folder)
    change(model, FINAL)
    save(model, cold_folder)
    with offline_llm(cold_folder) as llm:
        assert_computes(llm, model)
        cold = Computed.by(llm)
    with offline_llm(folder) as llm:
        yield GptOss(llm, model, cold)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_updates_leave_what_a_cold_engine_has(gpt_oss: GptOss, *, packed: bool, apply: Any) -> None:
    gpt_oss.restart(apply)
    with ws.connect(
        gpt_oss.model, to=vllm_targets(gpt_oss.llm), packed=packed, bucket_nbytes=1 << 14
    ) as sender:
        for seed in (1 + packed, 3 + packed):
            before = expected(gpt_oss.model)[1]
            change(gpt_oss.model, seed)
            report = sender.send_weights()
            assert (report.apply, report.packed, report.verified) == (apply, packed, "arrived")
            assert_computes(gpt_oss.llm, gpt_oss.model)
            assert largest_difference(expected(gpt_oss.model)[1], before) > 0.01
    gpt_oss.send_final()


@pytest.mark.parametrize("names", ["layers.1.mlp.experts.", "layers.0.self_attn.sinks"])
def test_what_is_written_past_the_loaders_may_be_sent_alone(gpt_oss: GptOss, names: str) -> None:
    gpt_oss.restart("staged")
    gpt_oss.send_final()
    with ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm)) as sender:
        sender.send_weights()
        change(gpt_oss.model, 10, names=names)
        with sender.update(partial=True) as update:
            update.send((n, p) for n, p in gpt_oss.model.named_parameters() if names in n)
        assert_computes(gpt_oss.llm, gpt_oss.model)
    gpt_oss.send_final()


@pytest.mark.parametrize("left_out", ["gate_up_proj", "down_proj_bias"])
def test_experts_without_a_part_are_refused(gpt_oss: GptOss, left_out: str) -> None:
    gpt_oss.restart("staged")
    gpt_oss.send_final()
    sent = [
        (name, torch.zeros_like(parameter))
        for name, parameter in gpt_oss.model.named_parameters()
        if "layers.1.mlp.experts." in name and not name.endswith(left_out)
    ]
    with ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm)) as sender:
        sender.send_weights()
        with (
            pytest.raises(ManifestMismatchError, match=r"experts.*wanted together") as caught,
            sender.update(partial=True) as update,
        ):
            update.send(sent)
        assert len(caught.value.mismatched) == 1
    Computed.by(gpt_oss.llm).assert_same(gpt_oss.cold)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_trainer_that_fails_in_the_middle(gpt_oss: GptOss, apply: Any) -> None:
    gpt_oss.restart(apply)
    gpt_oss.send_final()
    healthy = True

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in gpt_oss.model.named_parameters():
            if name.endswith("layers.1.mlp.experts.down_proj") and not healthy:
                raise RuntimeError("the trainer has lost its weights")
            yield name, tensor.detach()

    with ws.connect(tensors, to=vllm_targets(gpt_oss.llm), bucket_nbytes=1 << 12) as sender:
        sender.send_weights()
        change(gpt_oss.model, 20)
        healthy = False
        with pytest.raises(RuntimeError, match="lost its weights"):
            sender.send_weights()
        state = engine_of(gpt_oss.llm).receiver.status().state
        assert state == ("READY" if apply == "staged" else "TORN")
        if apply == "staged":
            Computed.by(gpt_oss.llm).assert_same(gpt_oss.cold)
        assert len(generated(gpt_oss.llm)[0]) == 12, "no dead process"
        healthy = True
        sender.send_weights()
        assert_computes(gpt_oss.llm, gpt_oss.model)
    gpt_oss.send_final()


def test_a_dry_run_changes_nothing(gpt_oss: GptOss) -> None:
    gpt_oss.restart("staged")
    gpt_oss.send_final()
    model = engine_of(gpt_oss.llm).model
    held = [(dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    with ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm)):
        assert gpt_oss.sink._known
    for module, (parameters, buffers) in zip(model.modules(), held, strict=True):
        assert all(module._parameters[name] is tensor for name, tensor in parameters.items())
        assert all(module._buffers[name] is tensor for name, tensor in buffers.items())
    Computed.by(gpt_oss.llm).assert_same(gpt_oss.cold)


SINKS = "model.layers.1.attn.sinks"


def losing(model: Any) -> Any:
    """Return a load_weights that takes one layer's weight and puts it nowhere that is used."""
    load = type(model).load_weights.__get__(model)
    lost = []

    def load_weights(pairs: Any) -> Any:
        def kept() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in pairs:
                if name.endswith("layers.1.self_attn.sinks"):
                    lost.append(tensor.clone())
                else:
                    yield name, tensor

        return load(kept())

    return load_weights


def test_a_layer_that_would_keep_its_old_weights_is_refused_by_name(
    gpt_oss: GptOss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the names are those of the server's own checkpoint."""
    gpt_oss.send_final()
    gpt_oss.restart("staged")
    model = engine_of(gpt_oss.llm).model
    with monkeypatch.context() as patch:
        patch.setattr(model, "load_weights", losing(model), raising=False)
        with pytest.raises(ConfigError, match=rf"{SINKS}: GptOssForCausalLM .* old weights"):
            ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm))
    Computed.by(gpt_oss.llm).assert_same(gpt_oss.cold)
    gpt_oss.send_final()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_layer_that_keeps_its_old_weights_is_no_success(
    gpt_oss: GptOss, monkeypatch: pytest.MonkeyPatch, apply: Any
) -> None:
    """Where the dry run did not show it: after the load every layer is looked at again."""
    gpt_oss.restart(apply)
    gpt_oss.send_final()
    gpt_oss.restart(apply)
    model = engine_of(gpt_oss.llm).model

    def inconclusive(reload: Any, manifest: Manifest, names: list[str]) -> Trial:
        return Trial(ended=False)

    change(gpt_oss.model, 30)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_sink, "try_out", inconclusive)
        patch.setattr(model, "load_weights", losing(model), raising=False)
        with (
            ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm)) as sender,
            pytest.raises((ws.TransferError, RemoteError), match=rf"{SINKS}: .* old weights"),
        ):
            sender.send_weights()
    assert engine_of(gpt_oss.llm).receiver.status().state == "TORN"
    assert len(generated(gpt_oss.llm)[0]) == 12, "no dead process"
    gpt_oss.restart(apply)
    gpt_oss.send_final()


def doubling(model: Any) -> Any:
    """Return a load_weights that also doubles a weight, whether or not it was given."""
    load = type(model).load_weights.__get__(model)

    def load_weights(pairs: Any) -> Any:
        loaded = load(pairs)
        model.model.layers[1].attn.sinks.data.mul_(2)
        return loaded

    return load_weights


def test_a_weight_that_is_made_of_its_former_one_is_refused(
    gpt_oss: GptOss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload does not have the former one: zeros would be doubled."""
    gpt_oss.restart("staged")
    gpt_oss.send_final()
    model = engine_of(gpt_oss.llm).model
    name = "model.layers.1.mlp.experts.down_proj_bias"
    sent = [(n, p) for n, p in gpt_oss.model.named_parameters() if ".layers.1.mlp.experts." in n]
    assert name in dict(sent)
    message = rf"{SINKS}.* computed from its former weights"
    with ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm)) as sender:
        sender.send_weights()
        with monkeypatch.context() as patch:
            patch.setattr(model, "load_weights", doubling(model), raising=False)
            with (
                pytest.raises(ManifestMismatchError, match=message),
                sender.update(partial=True) as update,
            ):
                update.send(sent)
            Computed.by(gpt_oss.llm).assert_same(gpt_oss.cold)
            patch.setattr(vllm_sink, "try_out", lambda *_: Trial(ended=False))
            gpt_oss.sink._known.clear()
            with (
                pytest.raises((ws.TransferError, RemoteError), match=message),
                sender.update(partial=True) as update,
            ):
                update.send(sent)
        assert engine_of(gpt_oss.llm).receiver.status().state == "TORN"
    gpt_oss.restart("staged")
    gpt_oss.send_final()


def test_each_names_tensors_are_tried_out_once(
    gpt_oss: GptOss, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt_oss.restart("staged")
    tried: list[list[str]] = []

    def counting(reload: Any, manifest: Manifest, names: list[str]) -> Trial:
        tried.append(names)
        return try_out(reload, manifest, names)

    monkeypatch.setattr(vllm_sink, "try_out", counting)
    with ws.connect(gpt_oss.model, to=vllm_targets(gpt_oss.llm)) as sender:
        for _ in range(3):
            sender.send_weights()
    assert [sorted(names) for names in tried] == [
        sorted(name for name, _ in gpt_oss.model.named_parameters())
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_computes_what_was_sent(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "model"
    model = make_gpt_oss(folder)
    with vllm_server(folder, tmp_path / "server.log", workers=workers) as served:
        served.assert_computes(model)
        with ws.connect(model, to=served.url) as sender:
            for seed in (1, 2, 3, 4):
                change(model, seed)
                assert sender.send_weights().verified == "arrived"
                served.assert_computes(model)
        # All workers but the first clear a bias that they are given: no delta builds on that.
        with ws.connect(model, to=served.url, delta="always") as sender:
            sent = []
            for _ in range(3):
                with torch.no_grad():
                    model.lm_head.weight[3, :4] += 0.1
                delta = sender.send_weights().delta
                sent.append(delta is not None and delta.sent)
                served.assert_computes(model)
        assert sent == [False, workers == 1, workers == 1]


def test_sinks_that_a_kernel_has_cast(tmp_path: Path) -> None:
    """In float16 the kernel of a CPU computes with a copy of the sinks from its first step on."""
    first, second = tmp_path / "A", tmp_path / "B"
    model = make_gpt_oss(first)
    change(model, FINAL)
    save(model, second)
    with offline_llm(second, dtype="float16") as llm:
        wanted = generated(llm)
    with offline_llm(first, dtype="float16") as llm:
        assert generated(llm) != wanted
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
        assert generated(llm) == wanted
