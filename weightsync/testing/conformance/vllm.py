"""vLLM's contracts of weight transfer engines: the worker's, and the trainer's.

Both run against a real `vllm serve` of a tiny model, whose weights are compared
with those of a model that vLLM loads from disk.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import requests
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from weightsync.testing.conformance import Contract
from weightsync.testing.conformance.vllm_server import (
    EMBEDDING,
    HEAD,
    NORM,
    QUERY,
    Address,
    Server,
    StillWaits,
    Tensors,
    Weights,
    recording_client,
    start_trainer,
    weights_of,
    within,
)
from weightsync.testing.held import Held

CHILD_S = 120.0
MIDDLE = "model.layers.1.mlp.up_proj.weight"
MODEL_NBYTES = sum(tensor.nbytes for tensor in weights_of(0).values())


class PlantedError(Exception):
    """The error that a test's source raises."""


def without_head(weights: Tensors) -> dict[str, torch.Tensor]:
    """Return the weights of a model whose head is its embedding."""
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


def fail() -> None:
    """Raise PlantedError."""
    raise PlantedError


def _with_field(body: Mapping[str, Any] | None, part: str) -> dict[str, Any]:
    """Return the body of a call with a field more in one of its parts."""
    body = body or {}
    return {**body, part: {**body.get(part, {}), "no_such_field": 1}}


@contextmanager
def refusing() -> Iterator[None]:
    """Assert that the block raises an error of the engine's own; to wait without an end is none."""
    try:
        yield
    except StillWaits:
        raise
    except Exception:  # noqa: BLE001  # of the engine's own kind
        return
    pytest.fail("nothing was raised")


class VllmContract(Contract):
    """Base of both contracts. A subclass implements `init_info` for a trainer of its engine.

    - `arguments` and `environment` are further ones of `vllm serve`.
    - `probe` is its worker extension, by name; a subclass of Probe may be of your own.
    - `bound_s`: a call whose peer is lost has ended after this time. vLLM's client waits for an
      answer for half of it.
    - `caller_pauses`: the caller of `send_weights` has to pause generation, and to resume it.
    """

    arguments: ClassVar[Sequence[str]] = ()
    environment: ClassVar[Mapping[str, str]] = {}
    probe: ClassVar[str] = "weightsync.testing.conformance.vllm_probe.Probe"
    bound_s: ClassVar[float] = 20.0
    caller_pauses: ClassVar[bool] = False

    @classmethod
    def init_info(cls, rank: int) -> Any:
        """Return the init info of vLLM's factory for a rank of the trainer."""
        raise NotImplementedError(f"{cls.__name__} must implement init_info()")

    @pytest.fixture(scope="class")
    def started(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        """A server for the tests of this class."""
        yield from self.serving(tmp_path_factory.mktemp("server"), tied=False)

    @classmethod
    def serving(cls, folder: Path, *, tied: bool) -> Iterator[Server]:
        """Yield a server, and end it."""
        server = Server(folder, cls.engine, cls.probe, cls.arguments, cls.environment, tied=tied)
        try:
            server.start()
            yield server
        finally:
            server.close()

    @pytest.fixture
    def server(self, started: Server) -> Server:
        """That server with the weights of seed 0; started again where a test has harmed it."""
        try:
            self.update(started, weights_of(0))
            different = started.differences(weights_of(0))
        except Exception:  # noqa: BLE001  # whatever the test before has left
            warnings.warn("a test has left a server that takes no update", stacklevel=1)
            started.end()
            started.start()
        else:
            assert different == []
        return started

    @classmethod
    def trainer(cls, server: Address, source: Any, rank: int = 0) -> Any:
        """Return a trainer engine that is connected with the server."""
        client = recording_client(server.url, cls.bound_s / 2)
        return within(cls.bound_s, lambda: start_trainer(cls.init_info(rank), client, source))

    @classmethod
    def send(cls, trainer: Any) -> None:
        """Send an update, within the bound."""
        within(cls.bound_s, trainer.send_weights)

    @classmethod
    @contextmanager
    def sending(cls, server: Address, tensors: Tensors) -> Iterator[tuple[Any, Weights]]:
        """Context manager of a trainer and its source."""
        source = Weights(tensors)
        trainer = cls.trainer(server, source)
        try:
            yield trainer, source
        finally:
            with suppress(StillWaits):
                within(cls.bound_s, trainer.shutdown)

    @classmethod
    def update(cls, server: Address, tensors: Tensors) -> None:
        """Send an update by a trainer of its own."""
        with cls.sending(server, tensors) as (trainer, _):
            cls.send(trainer)


class VllmWorkerContract(VllmContract):
    """The tests of `WeightTransferEngine`: what a worker does with what it is sent."""

    contract = "vLLM's WeightTransferEngine"

    @pytest.fixture(scope="class")
    def tied(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        """A server whose head is its embedding."""
        yield from self.serving(tmp_path_factory.mktemp("tied"), tied=True)

    def test_updates_follow_each_other_bit_for_bit(self, server: Server) -> None:
        with self.sending(server, weights_of(0)) as (trainer, source):
            for seed in (1, 2, 3, 0):
                source.tensors = weights_of(seed)
                self.send(trainer)
                assert server.differences(weights_of(seed)) == []

    def test_a_tied_head_follows_its_embedding(self, tied: Server) -> None:
        weights = without_head(weights_of(1))  # as named_parameters() has them
        self.update(tied, weights)
        assert tied.differences(weights) == []

    def test_a_tied_head_that_is_sent_as_well(self, tied: Server) -> None:
        weights = weights_of(2)
        weights[HEAD] = weights[EMBEDDING]  # as state_dict() has them
        self.applied_or_refused(tied, weights)

    def test_tensors_that_are_not_contiguous(self, server: Server) -> None:
        turned = {
            name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in weights_of(1).items()
        }
        assert not turned[QUERY].is_contiguous()
        self.update(server, turned)
        assert server.differences(weights_of(1)) == []

    def test_part_of_the_model_changes_nothing_else(self, server: Server) -> None:
        self.applied_or_refused(server, {NORM: weights_of(1)[NORM]})

    def test_part_of_a_fused_layer(self, server: Server) -> None:
        """VLLM keeps query, key and value in one weight; here the query comes alone."""
        self.applied_or_refused(server, {QUERY: weights_of(1)[QUERY]})

    def test_another_dtype_is_cast_or_refused(self, server: Server) -> None:
        self.applied_or_refused(server, {n: t.bfloat16() for n, t in weights_of(1).items()})

    def test_a_wrong_shape_is_refused(self, server: Server) -> None:
        self._refused(server, {**weights_of(1), MIDDLE: torch.ones(128, 63)})

    def test_an_empty_tensor_is_refused(self, server: Server) -> None:
        self._refused(server, {**weights_of(1), MIDDLE: torch.ones(0, 64)})

    def test_an_unknown_name_is_refused(self, server: Server) -> None:
        self._refused(server, {**weights_of(1), "model.layers.7.mlp.up_proj.weight": torch.ones(2)})

    def test_calls_out_of_order_are_refused(self, server: Server) -> None:
        old = server.held()
        assert not server.post("update_weights", {"update_info": {}}).ok
        assert not server.post("finish_weight_update").ok
        assert server.held() == old
        self.update(server, weights_of(1))
        assert server.differences(weights_of(1)) == []

    def test_an_update_without_tensors_changes_nothing(self, server: Server) -> None:
        old = server.held()
        with self.sending(server, weights_of(1)) as (trainer, _):
            assert server.post("start_weight_update").ok
            server.post("finish_weight_update")  # an engine may refuse it
            server.generate()
            assert server.held() == old
            self.send(trainer)
        assert server.differences(weights_of(1)) == []

    def test_unknown_fields_are_refused(self, server: Server) -> None:
        """In bodies that are right otherwise, where the engine's trainer sends any."""
        with self.sending(server, weights_of(1)) as (trainer, _):
            self.send(trainer)
            bodies = dict(trainer.client.calls)
        old = server.held()
        init, update = "init_weight_transfer_engine", "update_weights"
        assert not server.post(init, _with_field(bodies.get(init), "init_info")).ok
        assert server.post("start_weight_update").ok
        assert not server.post(update, _with_field(bodies.get(update), "update_info")).ok
        server.post("finish_weight_update")  # an engine may refuse it
        server.generate()
        assert server.held() == old
        self.update(server, weights_of(2))
        assert server.differences(weights_of(2)) == []

    def test_an_update_that_nobody_finishes_ends_with_the_next_trainer(
        self, server: Server
    ) -> None:
        assert server.post("start_weight_update").ok
        self.update(server, weights_of(1))
        assert server.differences(weights_of(1)) == []

    def test_an_engine_that_was_shut_down_is_opened_again(self, server: Server) -> None:
        if not hasattr(HTTPVLLMWeightSyncClient, "shutdown_weight_transfer_engine"):
            pytest.skip("vLLM before 0.32 has no endpoint to shut an engine down")
        for seed in (1, 2):
            assert server.post("shutdown_weight_transfer_engine").ok
            self.update(server, weights_of(seed))
            assert server.differences(weights_of(seed)) == []

    def test_requests_in_flight_are_answered(self, server: Server) -> None:
        done, failed = threading.Event(), list[Exception]()
        answers, updates = list[tuple[float, float]](), list[tuple[float, float]]()

        def ask() -> None:
            while not done.is_set():
                began = time.monotonic()
                try:
                    server.generate()
                except requests.RequestException as exc:
                    failed.append(exc)
                answers.append((began, time.monotonic()))

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()
        try:
            with self.sending(server, weights_of(0)) as (trainer, source):
                for seed in (1, 2, 3):
                    source.tensors = weights_of(seed)
                    began = time.monotonic()
                    if self.caller_pauses:
                        assert server.post("pause?mode=keep").ok
                    self.send(trainer)
                    if self.caller_pauses:
                        assert server.post("resume").ok
                    updates.append((began, time.monotonic()))
        finally:
            done.set()
            for thread in asking:
                thread.join()
        assert not failed
        for began, ended in updates:
            assert any(asked < ended and answered > began for asked, answered in answers)
        assert server.differences(weights_of(3)) == []

    def test_nothing_is_left_of_updates(self, server: Server) -> None:
        for _ in range(2):
            self.update(server, weights_of(1))
        before, names = server.resources(), Held.now()
        for _ in range(4):
            with self.sending(server, weights_of(0)) as (trainer, source):
                for seed in (1, 2, 3):
                    source.tensors = weights_of(seed)
                    self.send(trainer)
        after = server.resources()
        grown = {name: after[name] - before[name] for name in after}
        assert grown.pop("nbytes") < MODEL_NBYTES  # less than one of twelve updates
        assert {name: more for name, more in grown.items() if more > 0} == {}
        assert Held.now().since(names)["shm"] == []

    def applied_or_refused(self, server: Server, tensors: Tensors) -> None:
        """Send tensors that an engine may refuse; whatever it does, it does as a whole."""
        before = server.held()
        try:
            self.update(server, tensors)
        except StillWaits:
            raise
        except Exception:  # noqa: BLE001  # of the engine's own kind
            server.generate()
            assert server.held() == before
        else:
            assert server.differences({**weights_of(0), **tensors}) == []

    def _refused(self, server: Server, tensors: Tensors) -> None:
        """Send tensors that must be refused; the former weights stay, and updates go on."""
        with refusing():
            self.update(server, tensors)
        assert server.differences(weights_of(0)) == []
        self.update(server, weights_of(2))
        assert server.differences(weights_of(2)) == []


class VllmTrainerContract(VllmContract):
    """The tests of `TrainerWeightTransferEngine`, with vLLM's client for HTTP."""

    contract = "vLLM's TrainerWeightTransferEngine"

    def test_the_source_is_iterated_anew_and_to_its_end(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            for count in (1, 2, 3):
                self.send(trainer)
                assert (source.begun, source.ended) == (count, count)

    def test_the_weights_are_in_use_on_return(self, server: Server) -> None:
        with self.sending(server, weights_of(0)) as (trainer, source):
            for seed in (1, 2, 3):
                source.tensors = weights_of(seed)
                self.send(trainer)
                held = server.held()
                assert held == server.wanted(weights_of(seed))
                server.generate()

    def test_calls_of_the_client_are_in_order(self, server: Server) -> None:
        """An engine with a control plane of its own calls nothing."""
        with self.sending(server, weights_of(1)) as (trainer, _):
            for _ in range(2):
                self.send(trainer)
            calls = " ".join(path for path, _ in trainer.client.calls)
        update = "( start_weight_update( update_weights)+ finish_weight_update)"
        assert re.fullmatch(f"|init_weight_transfer_engine{update}{{2}}", calls), calls

    def test_an_error_of_the_source_is_raised(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            source.acts[MIDDLE] = fail
            with pytest.raises(PlantedError):
                self.send(trainer)

    def test_a_source_that_fails_leaves_the_former_weights(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            source.acts[MIDDLE] = fail
            with pytest.raises(PlantedError):
                self.send(trainer)
            within(self.bound_s, server.generate)
            assert server.differences(weights_of(0)) == []

    def test_the_update_after_one_that_failed(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            source.acts[MIDDLE] = fail
            with pytest.raises(PlantedError):
                self.send(trainer)
            source.acts.clear()
            self.send(trainer)
            assert server.differences(weights_of(1)) == []

    def test_a_refusal_of_the_server_is_raised(self, server: Server) -> None:
        with refusing():
            self.update(server, {**weights_of(1), MIDDLE: torch.ones(128, 63)})

    def test_a_tensor_that_the_source_leaves_out_is_an_error(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            source.left_out = {MIDDLE}
            with refusing():
                self.send(trainer)

    def test_a_second_trainer_after_the_first(self, server: Server) -> None:
        for seed in (1, 2):
            with self.sending(server, weights_of(seed)) as (trainer, _):
                self.send(trainer)
                trainer.shutdown()
                trainer.shutdown()
            assert server.differences(weights_of(seed)) == []

    def test_two_ranks_send_together(self, server: Server) -> None:
        answers = run_ranks(type(self), server)
        assert [answer["ended"] for answer in answers] == [[1, 2, 3]] * 2
        assert answers[1]["calls"] == []
        assert server.differences(weights_of(3)) == []

    def test_an_error_on_the_second_rank_ends_the_first(self, server: Server) -> None:
        answers = run_ranks(type(self), server, failing=1)
        assert "PlantedError" in answers[1]["error"]
        assert answers[0]["error"]
        self.update(server, weights_of(2))
        assert server.differences(weights_of(2)) == []

    def test_a_trainer_is_killed_before_it_sends(self, server: Server) -> None:
        self._killed(server, "connected", 0)

    def test_a_trainer_is_killed_at_its_first_tensor(self, server: Server) -> None:
        self._killed(server, "first tensor", 0, 1)

    def test_a_trainer_is_killed_in_the_middle(self, server: Server) -> None:
        self._killed(server, "middle", 0, 1)

    def test_a_trainer_is_killed_after_it_sent(self, server: Server) -> None:
        self._killed(server, "sent", 1)

    def test_a_server_is_killed_and_started_again(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            source.acts[MIDDLE] = server.end
            with refusing():
                self.send(trainer)
        server.start()
        self.update(server, weights_of(2))
        assert server.differences(weights_of(2)) == []

    def test_a_server_that_stands_still_is_an_error(self, server: Server) -> None:
        with self.sending(server, weights_of(1)) as (trainer, source):
            source.acts[MIDDLE] = partial(server.signal, signal.SIGSTOP)
            try:
                with refusing():
                    self.send(trainer)
            finally:
                server.signal(signal.SIGCONT)

    def test_nothing_is_left_in_the_trainer(self, server: Server) -> None:
        grown = run_child(leftovers, type(self), Address(server.url))
        assert grown == {"shm": [], "fds": 0, "threads": 0}

    def _killed(self, server: Server, phase: str, *seeds: int) -> None:
        """Kill a trainer; the server has weights of `seeds`, and the next update is whole."""
        kill_trainer(type(self), server, phase)
        within(self.bound_s, server.generate)
        assert server.held() in [server.wanted(weights_of(seed)) for seed in seeds]
        self.update(server, weights_of(2))
        assert server.differences(weights_of(2)) == []


# Child processes. They import the test's class by the name of its module.

Kind = type[VllmContract]
_SPAWN = multiprocessing.get_context("spawn")


def run_child(work: Callable[..., Any], *args: Any) -> Any:
    """Return what `work` returns in a process of its own."""
    ours, theirs = _SPAWN.Pipe()
    child = _SPAWN.Process(target=_report, args=(work, theirs, args), daemon=True)
    child.start()
    theirs.close()
    try:
        assert ours.poll(CHILD_S), "the child process sent nothing"
        result, error = ours.recv()
        assert not error, error
        return result
    finally:
        child.kill()
        child.join()


def _report(work: Callable[..., Any], pipe: Any, args: Sequence[Any]) -> None:
    try:
        pipe.send((work(*args), ""))
    except BaseException:  # noqa: BLE001  # raised by the test
        pipe.send((None, traceback.format_exc()))


def kill_trainer(kind: Kind, server: Server, phase: str) -> None:
    """Have a trainer that sends the weights of seed 1 killed at a phase."""
    child = _SPAWN.Process(target=_die, args=(kind, Address(server.url), phase), daemon=True)
    child.start()
    child.join(CHILD_S)
    code = child.exitcode
    child.kill()
    child.join()
    assert code == -signal.SIGKILL, f"the trainer ended with {code}"


def _die(kind: Kind, server: Address, phase: str) -> None:
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    source = Weights(weights_of(1))
    at = {"first tensor": EMBEDDING, "middle": MIDDLE}.get(phase)
    if at is not None:
        source.acts[at] = die
    trainer = kind.trainer(server, source)
    if phase == "sent":
        trainer.send_weights()
    if phase in ("connected", "sent"):
        die()
    trainer.send_weights()


def run_ranks(kind: Kind, server: Server, failing: int | None = None) -> list[dict[str, Any]]:
    """Return what each of two ranks saw in three updates; `failing` fails in the second one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> dict[str, Any]:
        arguments = kind, Address(server.url), store.port, rank, rank == failing
        answer: dict[str, Any] = run_child(_as_rank, *arguments)
        return answer

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def _as_rank(kind: Kind, server: Address, port: int, rank: int, fails: bool) -> dict[str, Any]:
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    source = Weights(weights_of(0))
    trainer = kind.trainer(server, source, rank)
    ended = []
    error = ""
    for seed in (1, 2, 3):
        source.tensors = weights_of(seed)
        if fails and seed == 2:
            source.acts[MIDDLE] = fail
        try:
            kind.send(trainer)
        except StillWaits:
            raise
        except Exception as exc:  # noqa: BLE001  # sent to the test
            error = repr(exc)
            break
        ended.append(source.ended)
    return {"ended": ended, "calls": trainer.client.calls, "error": error}


def leftovers(kind: Kind, server: Address) -> dict[str, object]:
    """Return what a trainer's process holds more of after ten more connections."""

    def connect() -> None:
        with kind.sending(server, weights_of(0)) as (trainer, source):
            for seed in (1, 2, 3):
                source.tensors = weights_of(seed)
                kind.send(trainer)

    for _ in range(3):
        connect()
    before = Held.now()
    for _ in range(10):
        connect()
    grown = Held.now().since(before)
    return {name: grown[name] for name in ("shm", "fds", "threads")}
