"""A vLLM that sleeps: as it is on a CPU, and with a stand-in for its allocator of GPU memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import weightsync as ws
from tests.vllm.asleep import HostAllocator, sleep_mode
from tests.vllm.offline import assert_computes, engine_of, generated, offline_llm
from tests.vllm.tiny import change, make_model
from weightsync.integrations.vllm.actors import vllm_targets

LOOPS = 50

Started = tuple[Any, Any]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(Path(folder), tied=True)
    with offline_llm(Path(folder)) as llm:
        yield llm, model


@pytest.fixture
def asleep(started: Started) -> Iterator[HostAllocator]:
    with sleep_mode(started[0]) as allocator:
        yield allocator


def is_paused(llm: Any) -> bool:
    return bool(llm.llm_engine.engine_core.engine_core.is_scheduler_paused())


@pytest.mark.usefixtures("asleep")
class TestWithAnAllocator:
    def test_level_1_keeps_the_weights(self, started: Started) -> None:
        llm, model = started
        receiver = engine_of(llm).receiver
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
            before = generated(llm)
            llm.sleep(level=1)
            status = receiver.status()
            assert (status.asleep, status.sleep_level) == (["weights", "kv_cache"], 1)
            assert [status.discarded, status.may_generate] == [False, False]
            llm.wake_up()
            assert receiver.status().may_generate
            assert generated(llm) == before

    def test_the_loop_of_trl_and_verl(self, started: Started) -> None:
        """Sleep, train, wake the weights, update, wake the cache, generate: the levels in turn."""
        llm, model = started
        receiver, process = engine_of(llm).receiver, psutil.Process()
        sizes = []
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
            for step in range(LOOPS):
                level = 1 + step % 2
                llm.sleep(level=level)
                status = receiver.status()
                assert not status.may_generate
                assert status.discarded == (level == 2)
                with pytest.raises(ws.UpdateConflictError, match=r"send_weights\(wake=True\)"):
                    sender.send_weights()
                change(model, step)
                if step % 4 < 2:
                    sender.send_weights(wake=True)
                else:
                    llm.wake_up(tags=["weights"])
                    sender.send_weights()
                    assert not receiver.status().may_generate
                    llm.wake_up(tags=["kv_cache"])
                assert receiver.status().may_generate
                if step % 5 == 4:
                    assert_computes(llm, model)
                sizes.append(process.memory_info().rss)
        assert max(sizes[LOOPS // 2 :]) < 1.02 * max(sizes[: LOOPS // 2])

    def test_awake_without_weights_it_answers_nothing(self, started: Started) -> None:
        llm, model = started
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
            llm.sleep(level=2)
            llm.wake_up()
            status = engine_of(llm).receiver.status()
            assert (status.state, status.may_generate, status.asleep) == ("TORN", False, [])
            assert not status.fetchable
            with pytest.raises(ws.NotReadyError, match="awake without weights"):
                generated(llm)
            change(model, 3)
            sender.send_weights()
            assert_computes(llm, model)

    def test_weights_that_other_code_has_loaded(self, started: Started) -> None:
        llm, model = started
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
            llm.sleep(level=2)
            llm.wake_up()
            assert is_paused(llm) is True
            llm.wake_up(tags=["scheduling"])
            assert is_paused(llm) is False  # at its user's word
            sender.send_weights()
            assert_computes(llm, model)

    def test_the_cache_first(self, started: Started) -> None:
        """As vLLM has it: that alone resumes nothing."""
        llm, model = started
        receiver = engine_of(llm).receiver
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
            llm.sleep(level=2)
            llm.wake_up(tags=["kv_cache"])
            assert receiver.status().asleep == ["weights"]
            sender.send_weights(wake=True)
            assert_computes(llm, model)

    def test_what_is_asleep_is_not_lent(self, started: Started) -> None:
        llm, model = started
        late = copy.deepcopy(model)
        with ws.connect(model, to=vllm_targets(llm)) as sender:
            sender.send_weights()
            llm.sleep(level=2)
            with pytest.raises(ws.WeightSyncError):
                ws.fetch(late, [engine_of(llm).receiver])
            llm.wake_up(tags=["weights"])
            with pytest.raises(ws.WeightSyncError):
                ws.fetch(late, [engine_of(llm).receiver])
            sender.send_weights(wake=True)


def test_on_a_cpu_vllm_ignores_it_and_we_say_so(started: Started) -> None:
    """Its workers keep everything, at both levels; the engine pauses all the same."""
    llm, model = started
    receiver = engine_of(llm).receiver
    with ws.connect(model, to=vllm_targets(llm)) as sender:
        sender.send_weights()
        for step in range(4):
            llm.sleep(level=1 + step % 2)
            status = receiver.status()
            assert (status.sleep_level, status.discarded) == (1, False)
            change(model, step)
            sender.send_weights(wake=True)
            assert_computes(llm, model)
        llm.sleep(level=2)
        llm.wake_up()
        assert_computes(llm, model)
