"""verl's contract of checkpoint engines, with trainer ranks and rollout workers as real processes.

Engines are made and called as verl's CheckpointEngineWorker and CheckpointEngineManager do: in each
step `prepare` on all, `build_topology`, `init_process_group`, then `send_weights` and
`receive_weights` at the same time, and `finalize` where nothing failed.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from verl.checkpoint_engine import CheckpointEngineRegistry

from weightsync.tensors import as_bytes
from weightsync.testing.conformance import Contract
from weightsync.testing.held import Held
from weightsync.weights.copying.fingerprint import mix64, to_hex

START_S = 120.0
END_S = 3.0
MIB = 1 << 20
FIRST, MIDDLE = "layers.0.weight", "layers.4.weight"

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class PlantedError(Exception):
    """The error that a test's generator or consumer raises."""


Tensors = Mapping[str, torch.Tensor]


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Return a small model's weights: eight layers in bfloat16, 0.8 MiB."""
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(8):
        for name, shape in (("weight", (200, 250)), ("bias", (33,))):
            values = torch.randn(shape, generator=made)
            weights[f"layers.{layer}.{name}"] = values.to(torch.bfloat16)
    return weights


@dataclass(frozen=True)
class Step:
    """One step of the contract: its weights, and the process and place of a planted fault.

    `rank` is that of a trainer, `worker` the number of a rollout worker; `at` a tensor's name, or
    "connected" or "sent". `act` is `raise`, `stop` (the consumer asks for no more) or `die`.
    """

    number: int
    weights: Callable[[], Tensors]
    one_buffer: bool = False
    rank: int | None = None
    worker: int | None = None
    at: str = ""
    act: str = ""


@dataclass
class Answer:
    """Outcome of a call in a process: a result, an error, a call that still waits, or a death."""

    result: Any = None
    error: str = ""
    died: bool = False
    waits: bool = False

    @property
    def failure(self) -> str:
        """Description of the failure; empty where there is a result."""
        return "died" if self.died else "still waits" if self.waits else self.error


def digest(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's bytes, dtype and shape."""
    held = to_hex(mix64(as_bytes(tensor.detach().cpu().contiguous())))
    return f"{held} {tensor.dtype} {list(tensor.shape)}"


class Member:
    """A process with an engine: a rank of the trainer, or a rollout worker (`rank` None)."""

    def __init__(self, kind: type[VerlEngineContract], rank: int | None, size: int, port: int):
        self._pipe, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(
            target=_serve, args=(theirs, kind, rank, size, port), daemon=True
        )
        self.process.start()
        theirs.close()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of `_Engine`."""
        with suppress(BrokenPipeError):
            self._pipe.send((method, args, kwargs))

    def end(self, deadline: float) -> Answer:
        """Return its answer, by a time of `time.monotonic()`."""
        try:
            if not self._pipe.poll(max(deadline - time.monotonic(), 0)):
                return Answer(waits=True)
            answer: Answer = self._pipe.recv()
        except (EOFError, OSError):
            return Answer(died=True)
        return answer

    def leave(self) -> None:
        """Have it end when it has answered."""
        self._pipe.close()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Crew:
    """The ranks of a trainer and the rollout workers of an engine, and a manager's calls."""

    def __init__(self, kind: type[VerlEngineContract]) -> None:
        self.kind = kind
        self.is_harmed = False
        self._engine = _load(kind)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trainers = [
            Member(kind, rank, kind.trainers, self._store.port) for rank in range(kind.trainers)
        ]
        self.workers: list[Member] = []
        self.add(kind.workers)
        self._check(self.all(self.trainers, "hello", bound_s=START_S))

    def add(self, count: int) -> None:
        """Start rollout workers."""
        new = [Member(self.kind, None, 0, 0) for _ in range(count)]
        self._check(self.all(new, "hello", bound_s=START_S))
        self.workers += new

    def remove(self, worker: Member) -> None:
        """End a rollout worker."""
        self.workers.remove(worker)
        worker.kill()

    def close(self) -> None:
        """End all processes: those that wait for something are killed after a while."""
        members = [*self.trainers, *self.workers]
        for member in members:
            member.leave()
        deadline = time.monotonic() + END_S
        for member in members:
            member.process.join(max(deadline - time.monotonic(), 0))
            member.kill()

    def all(
        self,
        members: Sequence[Member],
        method: str,
        arguments: Sequence[Mapping[str, Any]] = (),
        bound_s: float | None = None,
    ) -> list[Answer]:
        """Call a method on members at the same time."""
        for index, member in enumerate(members):
            member.begin(method, **(arguments[index] if arguments else {}))
        return self._ends(members, bound_s)

    def _ends(self, members: Sequence[Member], bound_s: float | None = None) -> list[Answer]:
        deadline = time.monotonic() + (bound_s or self.kind.bound_s)
        answers = [member.end(deadline) for member in members]
        self.is_harmed |= bool(failures(answers))
        return answers

    def connect(self) -> None:
        """Call what precedes a step, as verl's `build_process_group` does."""
        trainers, workers = self.trainers, self.workers
        members = [*trainers, *workers]
        endpoints = [a.result for a in self._check(self.all(members, "prepare"))]
        chosen = self._engine.build_topology(len(trainers), len(workers), endpoints)
        arguments: list[Mapping[str, Any]] = []
        for side, lists in zip((trainers, workers), chosen, strict=True):
            lists.pop("method", None)
            assert {len(values) for values in lists.values()} <= {len(side)}
            arguments += [
                {name: values[i] for name, values in lists.items()} for i in range(len(side))
            ]
        self._check(self.all(members, "init_process_group", arguments))

    def step(self, step: Step) -> tuple[list[Answer], list[Answer]]:
        """Have all send and receive; return the answers of the trainer's ranks and the workers."""
        self.connect()
        for rank, trainer in enumerate(self.trainers):
            trainer.begin("send", step if step.rank == rank else _without_act(step))
        for number, worker in enumerate(self.workers):
            worker.begin("receive", step if step.worker == number else _without_act(step))
        answers = self._ends([*self.trainers, *self.workers])
        if not failures(answers):
            self._check(self.all([*self.trainers, *self.workers], "finalize"))
        return answers[: len(self.trainers)], answers[len(self.trainers) :]

    def _check(self, answers: list[Answer]) -> list[Answer]:
        assert failures(answers) == []
        return answers


def _without_act(step: Step) -> Step:
    return replace(step, at="", act="")


class VerlEngineContract(Contract):
    """The tests of `CheckpointEngine`. A subclass says how its engine is made.

    - `module` is imported in each process, as verl's `custom_backend_module` is.
    - `options` are its `engine_kwargs`.
    - `bound_s`: all calls of a step have ended after this time, also where a process was killed.
    - `trainers` and `workers` are the numbers of ranks and of rollout workers.
    """

    contract = "verl's CheckpointEngine"
    module: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    bound_s: ClassVar[float] = 20.0
    bucket_nbytes: ClassVar[int] = MIB // 4
    trainers: ClassVar[int] = 2
    workers: ClassVar[int] = 2

    @pytest.fixture(scope="class")
    def made(self) -> Iterator[list[Crew]]:
        """The processes of this class's tests, in a list."""
        crews: list[Crew] = []
        yield crews
        for crew in crews:
            crew.close()

    @pytest.fixture
    def crew(self, made: list[Crew]) -> Crew:
        """Those processes; started again where anything failed, as planted or not."""
        while made and made[0].is_harmed:
            made.pop().close()
        if not made:
            made.append(Crew(type(self)))
        return made[0]

    @pytest.fixture
    def new_crew(self, made: list[Crew]) -> Iterator[Crew]:
        """Processes of one test alone."""
        while made:
            made.pop().close()
        crew = Crew(type(self))
        yield crew
        crew.close()

    def test_steps_arrive_bit_for_bit(self, crew: Crew) -> None:
        for number in (1, 2, 3):
            whole(crew, Step(number, _Weights(number)))

    def test_generators_are_consumed_once_and_to_their_end_on_all_ranks(self, crew: Crew) -> None:
        for number in (1, 2):
            sent, _ = crew.step(Step(number, _Weights(number)))
            assert [answer.result for answer in sent] == [(1, 1)] * len(crew.trainers)

    def test_a_tensor_larger_than_the_bucket(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "large")))

    def test_many_small_tensors(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "many")))

    def test_other_dtypes(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "dtypes")))

    def test_layers_of_odd_sizes_and_two_dtypes(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "mixed")))

    def test_a_scalar(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "scalar")))

    def test_an_empty_tensor(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "empty")))

    def test_tied_tensors(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1, "tied")))

    def test_tensors_that_are_not_contiguous_arrive_or_are_an_error(self, new_crew: Crew) -> None:
        whole_or_error(new_crew, Step(1, _Weights(1, "turned")))

    def test_a_generator_that_uses_one_buffer(self, crew: Crew) -> None:
        for number in (1, 2):
            whole(crew, Step(number, _Weights(number), one_buffer=True))

    def test_other_tensors_in_the_next_step_arrive_or_are_an_error(self, new_crew: Crew) -> None:
        whole(new_crew, Step(1, _Weights(1)))
        whole_or_error(new_crew, Step(2, _Weights(2, "other")))
        whole(new_crew, Step(3, _Weights(3, "other")))

    def test_an_error_on_the_first_rank_ends_the_step(self, crew: Crew) -> None:
        self._ends_by_an_error(crew, Step(2, _Weights(2), rank=0, at=MIDDLE, act="raise"))

    def test_an_error_on_the_last_rank_ends_the_step(self, crew: Crew) -> None:
        rank = len(crew.trainers) - 1
        self._ends_by_an_error(crew, Step(2, _Weights(2), rank=rank, at=MIDDLE, act="raise"))

    def test_a_consumer_that_raises_ends_the_step(self, crew: Crew) -> None:
        self._ends_by_an_error(crew, Step(2, _Weights(2), worker=0, at=MIDDLE, act="raise"))

    def test_a_consumer_that_stops_ends_the_step(self, crew: Crew) -> None:
        whole(crew, Step(1, _Weights(1)))
        ended(crew.step(Step(2, _Weights(2), worker=0, at=MIDDLE, act="stop")))
        whole(crew, Step(3, _Weights(3)))

    def test_workers_are_added_and_removed(self, crew: Crew) -> None:
        whole(crew, Step(1, _Weights(1)))
        crew.add(1)
        for number in (2, 3):
            whole(crew, Step(number, _Weights(number)))
        crew.remove(crew.workers[0])
        for number in (4, 5):
            whole(crew, Step(number, _Weights(number)))

    def test_finalize_is_called_twice(self, crew: Crew) -> None:
        for number in (1, 2):
            whole(crew, Step(number, _Weights(number)))
            answers = crew.all([*crew.trainers, *crew.workers], "finalize")
            assert [answer.died or answer.waits for answer in answers].count(True) == 0

    def test_calls_before_the_first_prepare_are_errors(self, new_crew: Crew) -> None:
        step = {"step": Step(1, _Weights(1))}
        trainers, workers = new_crew.trainers, new_crew.workers
        answers = new_crew.all(trainers, "send", [step] * len(trainers))
        answers += new_crew.all(workers, "receive", [step] * len(workers))
        assert all(answer.error for answer in answers), failures(answers)

    def test_a_trainer_is_killed_before_it_sends(self, crew: Crew) -> None:
        self._killed(crew, Step(2, _Weights(2), rank=0, at="connected", act="die"))

    def test_a_trainer_is_killed_at_its_first_tensor(self, crew: Crew) -> None:
        self._killed(crew, Step(2, _Weights(2), rank=0, at=FIRST, act="die"))

    def test_a_trainer_is_killed_in_the_middle(self, crew: Crew) -> None:
        self._killed(crew, Step(2, _Weights(2), rank=0, at=MIDDLE, act="die"))

    def test_a_trainer_is_killed_after_it_sent(self, crew: Crew) -> None:
        self._killed(crew, Step(2, _Weights(2), rank=0, at="sent", act="die"))

    def test_a_worker_is_killed_before_it_receives(self, crew: Crew) -> None:
        self._replaced(crew, "connected")

    def test_a_worker_is_killed_at_its_first_tensor(self, crew: Crew) -> None:
        self._replaced(crew, FIRST)

    def test_a_worker_is_killed_in_the_middle(self, crew: Crew) -> None:
        self._replaced(crew, MIDDLE)

    def test_a_worker_is_killed_between_steps(self, crew: Crew) -> None:
        whole(crew, Step(1, _Weights(1)))
        crew.remove(crew.workers[0])
        crew.add(1)
        for number in (2, 3):
            whole(crew, Step(number, _Weights(number)))

    def test_nothing_is_left_of_steps(self, crew: Crew) -> None:
        members = [*crew.trainers, *crew.workers]
        for number in range(1, 31):
            whole(crew, Step(number, _Weights(number)))
            if number == 10:
                crew.all(members, "note")
        grown = [answer.result for answer in crew.all(members, "grown")]
        assert grown == [{"shm": [], "fds": 0, "threads": 0}] * len(members)

    def _ends_by_an_error(self, crew: Crew, step: Step) -> None:
        """All calls end in time, that with the planted error raises it; the next step is whole."""
        whole(crew, Step(1, _Weights(1)))
        sent, received = crew.step(step)
        ended((sent, received))
        assert any("PlantedError" in answer.error for answer in (*sent, *received)), (
            sent,
            received,
        )
        whole(crew, Step(3, _Weights(3)))

    def _killed(self, crew: Crew, step: Step) -> None:
        """The other calls end in time: with the step's weights as a whole, or an error."""
        whole(crew, Step(1, _Weights(1)))
        sent, received = crew.step(step)
        assert sent[0].died
        ended((sent, received))
        wanted = _digests(step.weights())
        for answer in received:
            assert answer.error or answer.result == wanted

    def _replaced(self, crew: Crew, at: str) -> None:
        """The other calls end in time, and steps with a new worker are whole."""
        whole(crew, Step(1, _Weights(1)))
        sent, received = crew.step(Step(2, _Weights(2), worker=0, at=at, act="die"))
        assert received[0].died
        ended((sent, received))
        crew.remove(crew.workers[0])
        crew.add(1)
        for number in (3, 4):
            whole(crew, Step(number, _Weights(number)))


def whole(crew: Crew, step: Step) -> None:
    """Assert that a step's weights arrive at all workers, bit for bit, each tensor once."""
    sent, received = crew.step(step)
    assert failures(sent) + failures(received) == []
    wanted = _digests(step.weights())
    for answer in received:
        assert answer.result == wanted


def whole_or_error(crew: Crew, step: Step) -> None:
    """Assert that weights arrive so, or that the trainer and whoever lacks them raise an error."""
    sent, received = crew.step(step)
    ended((sent, received))
    wanted = _digests(step.weights())
    if failures(received):
        assert failures(sent), f"the trainer knows nothing of {failures(received)}"
    for answer in received:
        assert answer.error or answer.result == wanted


def ended(answers: tuple[list[Answer], list[Answer]]) -> None:
    """Assert that nobody waits any more."""
    assert [answer.waits for side in answers for answer in side].count(True) == 0


def failures(answers: Sequence[Answer]) -> list[str]:
    """Return what went wrong, with the place of each answer."""
    return [f"{i}: {answer.failure}" for i, answer in enumerate(answers) if answer.failure]


def _digests(weights: Tensors) -> list[tuple[str, str]]:
    return sorted((name, digest(tensor)) for name, tensor in weights.items())


@dataclass(frozen=True)
class _Weights:
    """Makes the weights of a seed, changed as `kind` says; the same in each process."""

    seed: int
    kind: str = ""

    def __call__(self) -> Tensors:
        weights = weights_of(self.seed)
        made = torch.Generator().manual_seed(self.seed)
        return _KINDS[self.kind](weights, partial(torch.randn, generator=made))


def _other(weights: dict[str, torch.Tensor], some: Callable[..., torch.Tensor]) -> Tensors:
    del weights["layers.3.bias"]
    return {**weights, "another": some(40, 50).bfloat16()}


_DTYPES = ("float16", "float64", "int8", "int64", "bool", "float8_e4m3fn")
_KINDS: Mapping[str, Callable[[dict[str, torch.Tensor], Callable[..., torch.Tensor]], Tensors]] = {
    "": lambda weights, _: weights,
    "large": lambda weights, some: {**weights, "large": some(33 * MIB // 4 + 1)},
    "many": lambda weights, some: {**weights, **{f"small.{i}": some(7) for i in range(2000)}},
    "mixed": lambda weights, _: {n: t.float() if "1.b" in n else t for n, t in weights.items()},
    "dtypes": lambda _, some: {name: some(64).to(getattr(torch, name)) for name in _DTYPES},
    "scalar": lambda weights, some: {**weights, "scalar": some(())},
    "empty": lambda weights, _: {**weights, "empty": torch.empty(0, 4)},
    "tied": lambda weights, _: {**weights, "tied": weights[MIDDLE]},
    "turned": lambda weights, some: {**weights, "turned": some(40, 50).t()},
    "other": _other,
}


# Inside the processes.


def _load(kind: type[VerlEngineContract]) -> Any:
    """Return the engine's class."""
    if kind.module:
        importlib.import_module(kind.module)
    return CheckpointEngineRegistry.get(kind.engine)


def _serve(
    pipe: Any, kind: type[VerlEngineContract], rank: int | None, size: int, port: int
) -> None:
    asyncio.run(_answer(pipe, kind, rank, size, port))


async def _answer(
    pipe: Any, kind: type[VerlEngineContract], rank: int | None, size: int, port: int
) -> None:
    """Answer calls in an event loop, as Ray's actors do."""
    loop, reading = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    engine: _Engine | None = None
    while True:
        try:
            method, args, kwargs = await loop.run_in_executor(reading, pipe.recv)
        except EOFError:
            return
        try:
            if engine is None:
                engine = _Engine(kind, rank, size, port)
            result = getattr(engine, method)(*args, **kwargs)
            answer = Answer(await result if asyncio.iscoroutine(result) else result)
        except BaseException as exc:  # noqa: BLE001  # sent to the test
            answer = Answer(error=f"{type(exc).__name__}: {exc}")
        pipe.send(answer)


@dataclass
class _Counts:
    begun: int = 0
    ended: int = 0


@dataclass
class _Engine:
    """An engine in its process, with what verl's trainer or worker does around it."""

    kind: type[VerlEngineContract]
    rank: int | None
    size: int
    port: int
    before: Held | None = None
    engine: Any = field(init=False)

    def __post_init__(self) -> None:
        more: dict[str, Any] = {}
        if self.rank is not None:
            store = TCPStore("127.0.0.1", self.port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
            more["is_master"] = self.rank == 0
        made = _load(self.kind)
        self.engine = made(bucket_size=self.kind.bucket_nbytes, **more, **self.kind.options)

    def hello(self) -> None:
        """Be there."""

    def prepare(self) -> Any:
        return self.engine.prepare()

    def init_process_group(self, **arguments: Any) -> None:
        self.engine.init_process_group(**arguments)

    def finalize(self) -> None:
        self.engine.finalize()

    async def send(self, step: Step) -> tuple[int, int]:
        """Return how often the generator was begun and came to its end."""
        if step.at == "connected":
            _act(step)
        counts = _Counts()
        await self.engine.send_weights(_generate(step, counts), global_steps=step.number)
        if step.at == "sent":
            _act(step)
        return counts.begun, counts.ended

    async def receive(self, step: Step) -> list[tuple[str, str]]:
        """Return what was received."""
        if step.at == "connected":
            _act(step)
        taken = []
        given: AsyncIterator[Any] = self.engine.receive_weights(global_steps=step.number)
        async for name, tensor in given:
            if name == step.at:
                if step.act == "stop":
                    break
                _act(step)
            taken.append((name, digest(tensor)))
        return sorted(taken)

    def note(self) -> None:
        """Note what the process holds."""
        self.before = Held.now()

    def grown(self) -> dict[str, object]:
        """Return what it holds more now."""
        assert self.before is not None
        since = Held.now().since(self.before)
        return {name: since[name] for name in ("shm", "fds", "threads")}


def _act(step: Step) -> None:
    if step.act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise PlantedError(step.at)


def _generate(step: Step, counts: _Counts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as verl's trainers do: each rank gathers them together with the others."""
    counts.begun += 1
    weights = step.weights()
    buffer = torch.empty(max(t.nbytes for t in weights.values()), dtype=torch.uint8)
    for name, tensor in weights.items():
        if name == step.at:
            _act(step)
        if step.one_buffer:
            place = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield name, place.copy_(tensor)
        else:
            yield name, tensor
    counts.ended += 1
