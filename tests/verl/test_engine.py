"""Our engine without verl's manager: awkward generators, consumers and options."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

from weightsync.errors import ConfigError, TransferError
from weightsync.integrations import rollouts, verl

TIMEOUT_S = 2.0
FAR_S = 30.0
COUNT = 8

Taken = list[tuple[str, float]]
Consumer = Callable[[Any, int], Coroutine[Any, Any, Any]]


class Engines:
    """The engine of a trainer's only rank and that of a rollout worker, with its event loop."""

    def __init__(self, apply: str) -> None:
        made = partial(verl.WeightsyncCheckpointEngine, 1 << 20, timeout_s=TIMEOUT_S, apply=apply)
        self.trainer = made(is_master=True)
        self.worker = made()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def receive(self, consumer: Consumer, step: int) -> Future[Any]:
        """Start a step of the worker, after what verl's manager calls before each one."""
        endpoints = [self.trainer.prepare(), self.worker.prepare()]
        trainers, workers = type(self.trainer).build_topology(1, 1, endpoints)
        self.trainer.init_process_group(trainers["targets"][0])
        self.worker.init_process_group(workers["targets"][0])
        return asyncio.run_coroutine_threadsafe(consumer(self.worker, step), self._loop)

    def send(self, weights: Iterator[Any], step: int) -> None:
        asyncio.run(self.trainer.send_weights(weights, global_steps=step))

    def close(self) -> None:
        self.trainer.close()
        if self.worker._rollout is not None:
            self.worker._rollout.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(params=["staged", "in_place"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setattr(rollouts, "node_address", lambda: "127.0.0.1")
    made = Engines(request.param)
    yield made
    made.close()


def value(step: int, number: int) -> float:
    return step * 100.0 + number


def wanted(step: int) -> Taken:
    return [(f"t{number}", value(step, number)) for number in range(COUNT)]


def weights(step: int, fails_at: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(COUNT):
        if number == fails_at:
            raise RuntimeError("planted")
        yield f"t{number}", torch.full((300_000,), value(step, number))


def only(tensor: torch.Tensor) -> float:
    """Return the one value that all elements of a tensor have; NaN if they differ."""
    return float(tensor[0]) if bool((tensor == tensor[0]).all()) else float("nan")


async def keep(engine: Any, step: int) -> Taken:
    return [(n, only(t)) async for n, t in engine.receive_weights(global_steps=step)]


def test_a_generator_may_use_one_buffer(engines: Engines) -> None:
    def reusing(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(1000)
        for number in range(COUNT):
            yield f"t{number}", buffer.fill_(value(step, number))

    for step in (1, 2, 3):
        taken = engines.receive(keep, step)
        engines.send(reusing(step), step)
        assert taken.result(TIMEOUT_S) == wanted(step)


@pytest.mark.parametrize("step", [1, 2])
def test_the_event_loop_of_the_trainer_goes_on_meanwhile(engines: Engines, step: int) -> None:
    """In the first step, which finds out what there is to send, and in the next ones."""
    go = threading.Event()

    def waits() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights(step):
            assert go.wait(FAR_S)
            yield pair

    async def send() -> int:
        sending = asyncio.create_task(engines.trainer.send_weights(waits(), global_steps=step))
        answered = 0
        while answered < 5:
            await asyncio.sleep(0.01)
            assert not sending.done()
            answered += 1
        go.set()
        assert await sending
        return answered

    for before in range(1, step):
        taken = engines.receive(keep, before)
        engines.send(weights(before), before)
        assert taken.result(TIMEOUT_S) == wanted(before)
    taken = engines.receive(keep, step)
    assert asyncio.run(send()) == 5
    assert taken.result(TIMEOUT_S) == wanted(step)


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_is_cancelled_takes_no_more_when_it_returns(
    engines: Engines, step: int
) -> None:
    entered, go = threading.Event(), threading.Event()
    yielded: list[str] = []

    def waits() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights(step):
            yielded.append(pair[0])
            yield pair
            entered.set()
            assert go.wait(FAR_S)

    async def cancelled() -> int:
        sending = asyncio.create_task(engines.trainer.send_weights(waits(), global_steps=step))
        assert await asyncio.to_thread(entered.wait, FAR_S)
        sending.cancel()
        await asyncio.sleep(0.05)
        assert not sending.done()  # its thread is in the generator
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        return len(yielded)

    for before in range(1, step):
        taken = engines.receive(keep, before)
        engines.send(weights(before), before)
        assert taken.result(TIMEOUT_S) == wanted(before)
    left = engines.receive(keep, step)
    number = asyncio.run(cancelled())
    assert number < COUNT
    assert len(yielded) == number
    taken = engines.receive(keep, step + 1)
    engines.send(weights(step + 1), step + 1)
    assert taken.result(TIMEOUT_S) == wanted(step + 1)
    with pytest.raises(TransferError):
        left.result(TIMEOUT_S)


def test_a_consumer_of_a_failed_step_takes_nothing_of_the_next(engines: Engines) -> None:
    async def prepares_first(engine: Any, step: int) -> Taken:
        given = engine.receive_weights(global_steps=step)
        await asyncio.sleep(0.3)
        return [(n, only(t)) async for n, t in given]

    taken = engines.receive(keep, 1)
    engines.send(weights(1), 1)
    assert taken.result(TIMEOUT_S) == wanted(1)
    left = engines.receive(keep, 2)
    with pytest.raises(RuntimeError, match="planted"):
        engines.send(weights(2, fails_at=1), 2)
    taken = engines.receive(prepares_first, 3)
    engines.send(weights(3), 3)
    assert taken.result(TIMEOUT_S) == wanted(3)
    with pytest.raises(TransferError):
        left.result(TIMEOUT_S)


def test_a_slow_consumer_is_an_error_and_takes_nothing_of_the_next_step(engines: Engines) -> None:
    seen: Taken = []

    async def slow(engine: Any, step: int) -> None:
        async for name, tensor in engine.receive_weights(global_steps=step):
            seen.append((name, only(tensor)))
            if len(seen) == 3:
                await asyncio.sleep(1.5 * TIMEOUT_S)

    left = engines.receive(slow, 1)
    with pytest.raises(TransferError, match="did not take all weights"):
        engines.send(weights(1), 1)
    taken = engines.receive(keep, 2)
    engines.send(weights(2), 2)
    assert taken.result(TIMEOUT_S) == wanted(2)
    with pytest.raises(TransferError):
        left.result(2 * TIMEOUT_S)
    assert seen == wanted(1)[:3]


def test_a_step_after_one_that_nobody_took(engines: Engines) -> None:
    async def nothing(engine: Any, step: int) -> None: ...

    engines.receive(nothing, 1).result(TIMEOUT_S)
    with pytest.raises(TransferError, match="did not take all weights"):
        engines.send(weights(1), 1)
    taken = engines.receive(keep, 1)
    engines.send(weights(1), 1)
    assert taken.result(TIMEOUT_S) == wanted(1)


def test_a_step_waits_for_one_that_failed_elsewhere_first(engines: Engines) -> None:
    """verl raises a worker's error at once, and the next step may come before this call ends."""
    begun, go = threading.Event(), threading.Event()

    def waits() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        assert go.wait(FAR_S)
        yield from weights(2, fails_at=0)

    async def both() -> None:
        failing = asyncio.create_task(engines.trainer.send_weights(waits(), global_steps=2))
        assert await asyncio.to_thread(begun.wait, FAR_S)
        following = asyncio.create_task(engines.trainer.send_weights(weights(3), global_steps=3))
        await asyncio.sleep(0.1)
        assert not following.done()
        go.set()
        with pytest.raises(Exception, match="planted"):
            await failing
        await following

    taken = engines.receive(keep, 1)
    engines.send(weights(1), 1)
    assert taken.result(TIMEOUT_S) == wanted(1)
    taken = engines.receive(keep, 3)
    asyncio.run(both())
    assert taken.result(TIMEOUT_S) == wanted(3)


def test_an_iterator_that_is_closed_late_ends_itself_alone(engines: Engines) -> None:
    held: list[Any] = []

    async def stops(engine: Any, step: int) -> None:
        held.append(engine.receive_weights(global_steps=step))
        async for _ in held[0]:
            raise RuntimeError("the adapter fails")

    async def closes_the_former(engine: Any, step: int) -> Taken:
        taken = []
        async for name, tensor in engine.receive_weights(global_steps=step):
            taken.append((name, only(tensor)))
            if len(taken) == 3:
                held.clear()
                gc.collect()
                await asyncio.sleep(0.5)
        return taken

    failed = engines.receive(stops, 1)
    with pytest.raises(TransferError):
        engines.send(weights(1), 1)
    with pytest.raises(RuntimeError, match="the adapter fails"):
        failed.result(TIMEOUT_S)
    del failed
    taken = engines.receive(closes_the_former, 2)
    engines.send(weights(2), 2)
    assert taken.result(TIMEOUT_S) == wanted(2)


def test_a_name_that_comes_twice_and_what_is_no_tensor_are_named(engines: Engines) -> None:
    one = torch.ones(4)
    for given, said in (
        ([("a", one), ("b", one), ("a", one)], "the trainer gave a twice"),
        ([("a", one), ("b", 3.5)], "the trainer gave 'b' with a float"),
        ([("a", one), (7, one)], "the trainer gave 7 with a Tensor"),
    ):
        engines.receive(keep, 1)
        with pytest.raises(ConfigError, match=said):
            engines.send(iter(given), 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"paked": True}, "did you mean packed"),
        ({"timeout_s": "abc"}, r"Expected `float`, got `str` - at `\$.timeout_s`"),
        ({"timeout_s": -1}, r"Expected `float` > 0.0 - at `\$.timeout_s`"),
        ({"apply": "x"}, r"Invalid enum value 'x' - at `\$.apply`"),
        ({"on_failure": "x"}, r"Invalid enum value 'x' - at `\$.on_failure`"),
        ({"packed": "yes"}, r"got `str` - at `\$.packed`"),
        ({"device": "nope"}, "device string: nope"),
        ({"transfer_backend": "zzz"}, "there is no backend 'zzz'"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.weightsync[:;] .*{said}"):
        verl.WeightsyncCheckpointEngine(1 << 20, **options)
