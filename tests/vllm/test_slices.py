"""Workers of real vLLM models that take the boxes which their loaders read, and nothing else.

The models are made without an engine: a process of one worker is told that it is one of several.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.vllm.architectures import make_checkpoints
from tests.vllm.test_past_loaders import begin
from tests.vllm.tiny import change, gpt_oss, save
from tests.vllm.versions import FLOAT_SINKS
from weightsync.integrations.vllm.checksums import held_checksums
from weightsync.weights.copying.shards import Slice

pytestmark = pytest.mark.timeout(600)
GPT_OSS = "GPT-OSS"


def checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """Save two checkpoints, A and B."""
    if name != GPT_OSS:
        return make_checkpoints(name, folder)
    model = gpt_oss()
    for seed, part in enumerate("AB", 1):
        change(model, seed)
        save(model, folder / part)
    return folder / "A", folder / "B"


def as_rank(rank: int, workers: int, *, experts: bool) -> None:
    """Have this process say that it is one rank of several, which are not there."""
    from vllm.distributed import parallel_state

    for group in [parallel_state._TP, *([parallel_state._EP] if experts else [])]:
        group.world_size, group.rank_in_group = workers, rank


def loaded(folder: Path, rank: int, workers: int, *, experts: bool) -> tuple[Any, Any]:
    """Return the model of a rank, loaded from a checkpoint, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    as_rank(0, 1, experts=True)
    config = EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        skip_tokenizer_init=True,
        tensor_parallel_size=workers,
        enable_expert_parallel=experts,
    ).create_engine_config()
    as_rank(rank, workers, experts=experts)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def sink_of(model: Any, config: Any) -> Any:
    from weightsync.integrations.vllm.sink import VllmSink

    return VllmSink(model, config, torch.device("cpu"))


def outcomes(name: str, workers: int, experts: bool, folder: Path) -> list[dict[str, Any]]:
    """Update the model of each rank from A to B; return what it took and what differs from cold."""
    first, second = checkpoints(name, folder)
    told = []
    for rank in range(workers):
        cold, _ = loaded(second, rank, workers, experts=experts)
        wanted = held_checksums(cold)
        model, config = loaded(first, rank, workers, experts=experts)
        before = held_checksums(model)
        sink = sink_of(model, config)
        source = ws.SafetensorsSource(second)
        sliced = sink.sliced(source.manifest)
        assert held_checksums(model) == before, "to record has changed the model"
        with closing(ws.WeightReceiver(sink, apply="staged")) as receiver:
            with ws.connect(source, to=receiver.handle) as sender:
                report = sender.send_weights()
            reply = report.receivers[0]
            takes_boxes = sink.boxes(source.manifest) is not None
        with closing(ws.WeightReceiver(sink, apply="in_place")) as receiver:
            ws.connect(source, to=receiver.handle).close()
            takes_boxes_in_place = sink.boxes(source.manifest) is not None
        held = held_checksums(model)
        specs = source.manifest.specs
        boxes = {} if sliced is None else {specs[i].name: box for i, box in sliced.boxes}
        told.append(
            {
                "moved": sum(wanted[key] != before[key] for key in wanted),
                "differ": sorted(key for key in wanted if held[key] != wanted[key]),
                "share": None if sliced is None else sliced.nbytes(source.manifest) / report.nbytes,
                "whole": dict(reply.whole),
                "boxes": {name: box.spans for name, box in boxes.items()},
                "unread": sorted({s.name for s in specs} - set(boxes)) if boxes else [],
                "verified": report.verified,
                "takes_boxes": (takes_boxes, takes_boxes_in_place),
            }
        )
    return told


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("group") / "store"
    with multiprocessing.get_context("spawn").Pool(1, begin, (store,)) as pool:
        yield pool


NAMES = [
    "Qwen3, tied",
    "Llama, untied",
    "Gemma 2, tied",
    "Qwen3-MoE",
    pytest.param(GPT_OSS, marks=FLOAT_SINKS),
]
BIASES = [f"model.layers.{i}.mlp.experts.down_proj_bias" for i in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_each_of_two_workers_takes_its_half(worker: Any, name: str, tmp_path: Path) -> None:
    told = worker.apply(outcomes, (name, 2, False, tmp_path))
    for rank, one in enumerate(told):
        assert one["moved"] > 10
        assert one["differ"] == []
        assert one["share"] < 0.51  # norms and routers are in both
        assert one["verified"] == "arrived"
        assert one["unread"] == []
        assert one["takes_boxes"] == (True, False)  # of in place, hosts must not leave out any
        head = one["boxes"]["model.embed_tokens.weight"]
        assert head == (((rank * 160, rank * 160 + 160),), ((0, 64),))
        # GPT-OSS clears in all workers but the first what the first alone adds.
        cleared = BIASES if name == GPT_OSS and rank else []
        assert list(one["whole"]) == cleared
        assert all("writes to it (aten.zero_" in reason for reason in one["whole"].values())


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_alone_takes_whole_tensors(worker: Any, name: str, tmp_path: Path) -> None:
    (told,) = worker.apply(outcomes, (name, 1, False, tmp_path))
    assert told["moved"] > 10
    assert (told["differ"], told["share"], told["whole"]) == ([], None, {})


@pytest.mark.parametrize("name", ["Qwen3-MoE", pytest.param(GPT_OSS, marks=FLOAT_SINKS)])
def test_workers_with_their_own_experts_read_no_others(
    worker: Any, name: str, tmp_path: Path
) -> None:
    told = worker.apply(outcomes, (name, 2, True, tmp_path))
    for rank, one in enumerate(told):
        assert (one["differ"], one["whole"]) == ([], {})
        assert one["share"] < 0.51
        own = {2 * rank, 2 * rank + 1}
        if name == GPT_OSS:
            stacked = one["boxes"]["model.layers.0.mlp.experts.down_proj"]
            assert stacked[0] == ((2 * rank, 2 * rank + 2),)
        else:
            read = {name.split(".")[5] for name in one["boxes"] if ".experts." in name}
            unread = {name.split(".")[5] for name in one["unread"]}
            assert (read, unread) == (set(map(str, own)), set(map(str, {0, 1, 2, 3} - own)))


def test_heads_that_several_workers_need_are_read_by_each(worker: Any, tmp_path: Path) -> None:
    """Two heads of keys and values for four workers."""
    told = worker.apply(outcomes, ("Llama, untied", 4, False, tmp_path))
    for rank, one in enumerate(told):
        assert one["differ"] == []
        head = rank // 2 * 32
        rows = one["boxes"]["model.layers.0.self_attn.k_proj.weight"][0]
        assert rows == ((head, head + 32),)


def misfit(folder: Path) -> Mapping[str, Any]:
    """Send to a worker whose loaders read other parts than was recorded, and then again."""
    first, second = checkpoints("Llama, untied", folder)
    cold, _ = loaded(second, 1, 2, experts=False)
    model, config = loaded(first, 1, 2, experts=False)
    sink, source = sink_of(model, config), ws.SafetensorsSource(second)
    sliced, index = sink.sliced(source.manifest), source.manifest.index
    moved = index["model.layers.1.self_attn.o_proj.weight"]
    sink._sliced[source.manifest.digest] = replace(
        sliced,
        boxes=[
            (i, Slice(box.shape, (box.spans[0], ((0, 64),))) if i == moved else box)
            for i, box in sliced.boxes
        ],
    )
    told: dict[str, Any] = {}
    with (
        closing(ws.WeightReceiver(sink, apply="staged")) as receiver,
        ws.connect(source, to=receiver.handle) as sender,
    ):
        try:
            sender.send_weights()
        except ws.WeightSyncError as exc:
            told["error"] = f"{type(exc).__name__}: {exc}"
        told["state"] = receiver.status().state
        sender.send_weights()
        told["sliced"] = sink.sliced(source.manifest) is not None
    told["equal"] = held_checksums(model) == held_checksums(cold)
    return told


def test_loaders_that_read_other_parts_are_an_error_and_get_whole_tensors_then(
    worker: Any, tmp_path: Path
) -> None:
    told = worker.apply(misfit, (tmp_path,))
    assert "o_proj.weight: load_weights reads elements that it did not read when" in told["error"]
    assert told["state"] == "TORN"
    assert told["equal"]
    assert told["sliced"] is False
