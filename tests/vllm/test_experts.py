"""Updates of mixtures of experts in a real vLLM, compared with an engine that loads them cold."""

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
from tests.vllm.tiny import change, expected, largest_difference, make_mixture, save
from weightsync.errors import ManifestMismatchError, RemoteError
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.checksums import held_checksums
from weightsync.integrations.vllm.sink import try_out
from weightsync.receiver import WeightReceiver
from weightsync.weights.sources.experts import ExpertLayout

FINAL = 99
"""The seed of the weights that the cold engine has, and that each update ends with."""


@dataclass
class Computed:
    """What an engine computes, and all that it computes with: parameters, buffers, packed forms."""

    tokens: list[int]
    logprobs: list[float]
    tensors: dict[str, torch.Tensor]
    checksums: dict[str, str]

    @classmethod
    def by(cls, llm: Any) -> Computed:
        model = engine_of(llm).model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return cls(*generated(llm), kept, held_checksums(model))

    def assert_same(self, other: Computed) -> None:
        assert set(self.tensors) == set(other.tensors)
        assert [
            name
            for name, tensor in self.tensors.items()
            if not torch.equal(tensor, other.tensors[name])
        ] == []
        assert self.checksums == other.checksums
        assert (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


@dataclass
class Mixture:
    """A vLLM, the trainer's model, its source, and what a cold engine computes with FINAL."""

    llm: Any
    model: Any
    source: ws.PerExpertSource
    cold: Computed

    def restart(self, apply: Any) -> None:
        """Begin with a receiver that has met nobody."""
        engine = engine_of(self.llm)
        engine.receiver.close()
        engine.receiver = WeightReceiver(engine.receiver.sink, apply=apply)

    def assert_final(self) -> None:
        assert_computes(self.llm, self.model)
        Computed.by(self.llm).assert_same(self.cold)


LAYOUTS: dict[str, ExpertLayout] = {"qwen3_moe": "qwen3_moe", "mixtral": "mixtral"}


@pytest.fixture(scope="module", params=LAYOUTS)
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixture]:
    folder, cold_folder = (Path(tmp_path_factory.mktemp(name)) for name in ("model", "cold"))
    model = make_mixture(folder, request.param)
    change(model, FINAL)
    save(model, cold_folder)
    with offline_llm(cold_folder) as llm:
        assert_computes(llm, model)
        cold = Computed.by(llm)
    with offline_llm(folder) as llm:
        source = ws.PerExpertSource(model, layout=LAYOUTS[request.param])
        yield Mixture(llm, model, source, cold)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_updates_leave_what_a_cold_engine_has(
    mixture: Mixture, *, packed: bool, apply: Any
) -> None:
    mixture.restart(apply)
    with ws.connect(
        mixture.source, to=vllm_targets(mixture.llm), packed=packed, bucket_nbytes=1 << 16
    ) as sender:
        before = expected(mixture.model)[1]
        change(mixture.model, 1 + packed + 2 * (apply == "staged"))
        report = sender.send_weights()
        assert (report.apply, report.packed, report.verified) == (apply, packed, "arrived")
        assert_computes(mixture.llm, mixture.model)
        assert largest_difference(expected(mixture.model)[1], before) > 0.01
        change(mixture.model, FINAL)
        sender.send_weights()
    mixture.assert_final()


def test_experts_of_one_layer_may_be_sent_alone(mixture: Mixture) -> None:
    mixture.restart("staged")
    with ws.connect(mixture.source, to=vllm_targets(mixture.llm)) as sender:
        change(mixture.model, 10)
        sender.send_weights()
        change(mixture.model, 11, names="layers.1.mlp.experts.")
        with sender.update(partial=True) as update:
            update.send(
                (n, t) for n, t in mixture.source.tensors() if "layers.1." in n and "experts" in n
            )
        assert_computes(mixture.llm, mixture.model)
        change(mixture.model, FINAL)
        sender.send_weights()
    mixture.assert_final()


def test_a_single_expert_is_refused_before_any_byte_moves(mixture: Mixture) -> None:
    mixture.restart("staged")
    change(mixture.model, FINAL)
    with ws.connect(mixture.source, to=vllm_targets(mixture.llm)) as sender:
        sender.send_weights()
        with (
            pytest.raises(ManifestMismatchError, match=r"fuses into.*experts"),
            sender.update(partial=True) as update,
        ):
            update.send(
                (n, torch.zeros_like(t)) for n, t in mixture.source.tensors() if ".experts.1." in n
            )
    mixture.assert_final()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_trainer_that_fails_in_the_middle(mixture: Mixture, apply: Any) -> None:
    """Staged the old weights stay in use; in place the mixture is TORN, computes, and is mended."""
    mixture.restart(apply)
    healthy = True

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in mixture.source.tensors():
            if "layers.1." in name and "experts.2" in name and not healthy:
                raise RuntimeError("the trainer has lost its weights")
            yield name, tensor

    with ws.connect(tensors, to=vllm_targets(mixture.llm), bucket_nbytes=1 << 14) as sender:
        change(mixture.model, FINAL)
        sender.send_weights()
        change(mixture.model, 20)
        healthy = False
        with pytest.raises(RuntimeError, match="lost its weights"):
            sender.send_weights()
        state = engine_of(mixture.llm).receiver.status().state
        assert state == ("READY" if apply == "staged" else "TORN")
        change(mixture.model, FINAL)
        if apply == "staged":
            mixture.assert_final()
        assert len(generated(mixture.llm)[0]) == 12, "no dead process"
        healthy = True
        sender.send_weights()
    mixture.assert_final()


def test_a_layer_that_fails_to_be_packed(mixture: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit fails half way: TORN, with each layer's kernel whole, until the next update."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    mixture.restart("staged")
    with ws.connect(mixture.source, to=vllm_targets(mixture.llm)) as sender:
        change(mixture.model, 30)
        sender.send_weights()
        with monkeypatch.context() as patch:
            patch.setattr(CPUUnquantizedExperts, "process_weights_after_loading", no_room)
            with pytest.raises(RemoteError, match="no room"):
                sender.send_weights()
        assert engine_of(mixture.llm).receiver.status().state == "TORN"
        assert len(generated(mixture.llm)[0]) == 12, "no dead process"
        change(mixture.model, FINAL)
        sender.send_weights()
    mixture.assert_final()


def no_room(_: object, layer: torch.nn.Module) -> None:
    raise MemoryError(f"no room for {type(layer).__name__}")


def test_connect_names_the_source_that_takes_experts_apart(mixture: Mixture) -> None:
    with pytest.raises(ManifestMismatchError, match=r"weightsync\.PerExpertSource\(source"):
        ws.connect(mixture.model, to=vllm_targets(mixture.llm))


def test_the_names_of_a_message_are_tried_out_once(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture.restart("staged")
    sink = engine_of(mixture.llm).receiver.sink
    sink._known.clear()
    tried: list[list[str]] = []

    def counting(reload: Any, manifest: Any, names: list[str]) -> Any:
        tried.append(names)
        return try_out(reload, manifest, names)

    monkeypatch.setattr("weightsync.integrations.vllm.sink.try_out", counting)
    change(mixture.model, FINAL)
    with ws.connect(mixture.source, to=vllm_targets(mixture.llm)) as sender:
        sender.send_weights()
        sender.send_weights()
        assert tried == [[name for name, _ in mixture.source.tensors()]]
        with sender.update(partial=True) as update:
            update.send([("model.norm.weight", mixture.model.model.norm.weight)])
    assert tried[1:] == [["model.norm.weight"]]
    mixture.assert_final()


@pytest.mark.parametrize(("apply", "packed"), [("staged", False), ("in_place", True)])
def test_experts_that_two_workers_share(tmp_path: Path, *, apply: str, packed: bool) -> None:
    folder = tmp_path / "model"
    model = make_mixture(folder, "mixtral")
    source = ws.PerExpertSource(model, layout="mixtral")
    with vllm_server(folder, tmp_path / "log", workers=2, apply=apply) as served:
        served.assert_computes(model)
        with ws.connect(source, to=served.url, packed=packed) as sender:
            for seed in (1, 2):
                change(model, seed)
                assert sender.send_weights().apply == apply
                served.assert_computes(model)
