"""Two processes, each with its shard of a model, say what one process says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.children import CONTEXT
from tests.gloo import as_rank
from tests.serve.stepping import Stepping, alone
from weightsync.serve.kv_cache import cached_layers
from weightsync.serve.messages import SamplingParams, Step, StepResult
from weightsync.serve.model import LoadedModel, make_tiny_vision_model
from weightsync.serve.model_runner import ModelRunner

RANKS = 2
WAIT_S = 90
PROMPTS = [[5], list(range(3, 40)), [9, 8, 7]]
PIXELS = "pixel_values"


def _rank(rank: int, folder: str, pipe: Connection) -> None:
    from transformers import AutoModelForImageTextToText
    from transformers.distributed.configuration_utils import DistributedConfig

    with as_rank(rank, RANKS, folder, WAIT_S):
        plan = DistributedConfig(tp_plan="auto")
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, distributed_config=plan)
        runner = ModelRunner(model.eval(), samples=rank == 0)
        while body := pipe.recv_bytes():
            step = msgspec.msgpack.decode(body, type=Step, dec_hook=_tensor)
            pipe.send_bytes(msgspec.msgpack.encode(runner.execute(step, 1)))
        heads = {layer.held()[0].shape[1] for layer in cached_layers(runner._batches[""].cache)}
        pipe.send_bytes(msgspec.msgpack.encode(sorted(heads)))


def _plain(value: Any) -> Any:
    assert isinstance(value, torch.Tensor)
    return value.tolist()


def _tensor(_: type, value: Any) -> torch.Tensor:
    return torch.tensor(value)


@contextmanager
def _ranks(folder: Path) -> Iterator[list[Connection]]:
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(RANKS):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_rank, args=(rank, str(folder), theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(WAIT_S)
            if process.is_alive():
                process.kill()
                process.join(WAIT_S)


def _ask(pipes: Sequence[Connection], body: bytes) -> list[bytes]:
    for pipe in pipes:
        pipe.send_bytes(body)
    for rank, pipe in enumerate(pipes):
        assert pipe.poll(WAIT_S), f"rank {rank} does not answer"
    return [pipe.recv_bytes() for pipe in pipes]


@pytest.fixture(scope="module")
def seeing() -> LoadedModel:
    return make_tiny_vision_model()


def _story(core: Stepping) -> None:
    """Joins, seeds, images, refusals, reuse and leaves."""
    sampling = SamplingParams(seed=3, logprobs=2)
    core.start(
        core.new(PROMPTS[0], n=2),
        core.new([5], inputs={"labels": torch.ones(1)}),
        core.new(PROMPTS[1], sampling, keep_as=1),
    )
    core.go_on(3)
    image = [259] * 4
    core.start(
        core.new([*image, 7], inputs={PIXELS: torch.full((1, 3, 16, 16), 0.5)}),
        core.new([*image[1:], 7], inputs={PIXELS: torch.full((1, 3, 16, 16), 0.5)}),
        core.new([*PROMPTS[1], 4], reuse=1, reuse_length=37),
    )
    core.go_on(2)
    core.leave(0, 3)
    core.go_on(5)


@pytest.mark.timeout(4 * WAIT_S)
def test_two_ranks_say_what_one_process_says(seeing: LoadedModel, tmp_path: Path) -> None:
    seeing.model.save_pretrained(tmp_path)
    with _ranks(tmp_path) as pipes:

        def execute(step: Step, _: int) -> StepResult:
            answers = _ask(pipes, msgspec.msgpack.encode(step, enc_hook=_plain))
            first, second = (msgspec.msgpack.decode(a, type=StepResult) for a in answers)
            assert second.sampled == []
            assert first.refused == second.refused
            return first

        sharded = Stepping(execute)
        _story(sharded)
        assert _ask(pipes, b"") == [msgspec.msgpack.encode([1])] * RANKS
    whole = Stepping(ModelRunner(seeing.model).execute)
    _story(whole)
    assert sharded.said == whole.said
    assert len(whole.living) == 3
    assert whole.said[1] == alone(seeing.model, PROMPTS[0], 11)
    for row, chosen in whole.sampled.items():
        for ours, theirs in zip(chosen, sharded.sampled[row], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
