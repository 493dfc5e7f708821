"""Real vLLM engines of checkpoints quantized by compressed-tensors: what is sent, what refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import weightsync as ws
from tests.vllm.offline import engine_of, generated, offline_llm
from tests.vllm.quantized import make_quantized
from tests.vllm.served import vllm_server
from tests.vllm.test_experts import Computed
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.sink import try_out
from weightsync.receiver import WeightReceiver
from weightsync.weights.sources.safetensors_source import SafetensorsSource

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("A"), tmp_path_factory.mktemp("B")
    for seed, folder in enumerate(made, 1):
        make_quantized(folder, "fp8", seed=seed)
    return made


@pytest.fixture(scope="module")
def cold(fp8: tuple[Path, Path]) -> Computed:
    with offline_llm(fp8[1]) as llm:
        return Computed.by(llm)


@pytest.fixture(scope="module")
def llm(fp8: tuple[Path, Path], cold: Computed) -> Iterator[Any]:
    with offline_llm(fp8[0]) as made:
        yield made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_fp8_is_what_a_cold_engine_has(
    fp8: tuple[Path, Path], cold: Computed, llm: Any, *, packed: bool, apply: Any
) -> None:
    engine = engine_of(llm)
    engine.receiver.close()
    engine.receiver = WeightReceiver(engine.receiver.sink, apply=apply)
    first, second = map(SafetensorsSource, fp8)
    for source in (second, first, second):
        with ws.connect(source, to=vllm_targets(llm), packed=packed) as sender:
            report = sender.send_weights()
        assert (report.apply, report.verified) == (apply, "arrived")
        same = generated(llm) == (cold.tokens, cold.logprobs)
        assert same is (source is second)
    Computed.by(llm).assert_same(cold)


def test_fp8_without_its_scales_is_refused(fp8: tuple[Path, Path], llm: Any) -> None:
    before = generated(llm)
    tensors = dict(SafetensorsSource(fp8[0]).tensors())
    bare = {name: t for name, t in tensors.items() if not name.endswith("weight_scale")}
    with pytest.raises(ManifestMismatchError, match=r"qkv_proj\.weight_scale"):
        ws.connect(bare, to=vllm_targets(llm))
    part = [(n, t) for n, t in bare.items() if "layers.0.self_attn." in n]
    unaware: Any = ws.StateDictSource(tensors)
    unaware.belong_together = {}  # a source that does not say which tensors belong together
    for source, error, seen in (
        (tensors, ConfigError, r"k_proj\.weight without .*k_proj\.weight_scale"),
        (unaware, ManifestMismatchError, r"loaded into .*qkv_proj\.weight_scale"),
    ):
        with (
            ws.connect(source, to=vllm_targets(llm)) as sender,
            pytest.raises(error, match=seen),
            sender.update(partial=True) as update,
        ):
            update.send(part)
    assert generated(llm) == before


def test_an_fp8_server_computes_what_a_cold_one_does(
    fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    with vllm_server(fp8[1], tmp_path / "cold.log") as served:
        wanted = served.complete()
    with vllm_server(fp8[0], tmp_path / "server.log") as served:
        first = served.complete()
        assert first != wanted
        for folder, expected in ((fp8[1], wanted), (fp8[0], first), (fp8[1], wanted)):
            with ws.connect(SafetensorsSource(folder), to=served.url) as sender:
                sender.send_weights()
            assert served.complete() == expected
            assert not served.is_paused


def test_an_int8_server_refuses_updates_and_serves_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_quantized(folder, "int8", seed=1)
    with vllm_server(folder, tmp_path / "server.log") as served:
        before = served.complete()
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.qkv_proj.* oneDNN"):
                ws.connect(SafetensorsSource(folder), to=served.url)
            assert served.complete() == before
            assert not served.is_paused


def test_a_dry_run_leaves_an_int8_engine_as_it_was(tmp_path: Path) -> None:
    """Its kernels look up weights that are None, which vLLM's reload does not put back."""
    folder = tmp_path / "model"
    make_quantized(folder, "int8", seed=1)
    source = SafetensorsSource(folder)
    names = [spec.name for spec in source.manifest.specs]
    with offline_llm(folder) as llm:
        before = generated(llm)
        model = engine_of(llm).model
        sink: Any = engine_of(llm).receiver.sink
        held = [(dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        assert any(None in parameters.values() for parameters, _ in held)
        for given in (names, names[:1], []):
            trial = try_out(sink.reload, source.manifest, given)
            assert (trial.ended, trial.mismatched) == (True, [])
            now = [(dict(m._parameters), dict(m._buffers)) for m in model.modules()]
            for (parameters, buffers), (kept, kept_buffers) in zip(now, held, strict=True):
                assert list(parameters) == list(kept)
                assert all(parameters[name] is tensor for name, tensor in kept.items())
                assert all(buffers[name] is tensor for name, tensor in kept_buffers.items())
            assert generated(llm) == before
        norm = model.model.norm.weight.detach().clone()
        sink.reload.begin()
        sink.reload.load([("model.norm.weight", norm)])
        sink.reload.end()
        assert generated(llm) == before, "layers without new weights are as they were"


def test_a_bfloat16_trainer_updates_an_fp8_engine(tmp_path: Path) -> None:
    """Quantized on the way by the scheme that the engine says: what a cold engine has, to the bit.

    Four updates and back. Without `quantize` the engine refuses the trainer's own tensors.
    """
    plain = [tmp_path / "plain" / str(seed) for seed in (1, 2)]
    quantized = [tmp_path / "fp8" / str(seed) for seed in (1, 2)]
    for seed, (source, folder) in enumerate(zip(plain, quantized, strict=True), 1):
        make_quantized(folder, "fp8", seed=seed, plain=source)
    with offline_llm(quantized[1]) as llm:
        cold = Computed.by(llm)
    with offline_llm(quantized[0]) as llm:
        first = Computed.by(llm)
        model: Any = AutoModelForCausalLM.from_pretrained(plain[0])
        with pytest.raises(ManifestMismatchError, match=r'quantize="receiver".*weight_scale'):
            ws.connect(model, to=vllm_targets(llm))
        states = [dict(SafetensorsSource(folder).tensors()) for folder in plain]
        with ws.connect(model, to=vllm_targets(llm), quantize="receiver") as sender:
            for step in (1, 0, 1, 0, 1):
                model.load_state_dict(states[step])
                sender.send_weights()
                assert (generated(llm) == (cold.tokens, cold.logprobs)) is (step == 1)
            Computed.by(llm).assert_same(cold)
            model.load_state_dict(states[0])
            sender.send_weights()
            Computed.by(llm).assert_same(first)
