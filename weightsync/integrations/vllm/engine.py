"""The engine that a vLLM worker makes for `backend: weightsync`, and its RPC entry point."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.v1.worker.worker_base import WorkerBase

from weightsync.errors import ConfigError
from weightsync.integrations.vllm import rpc
from weightsync.integrations.vllm.rpc import Round, WorkerAnswer
from weightsync.integrations.vllm.sink import VllmSink
from weightsync.receiver import WeightReceiver
from weightsync.update.lifecycle import ApplyChoice
from weightsync.wire import codec, problem
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    InitRequest,
    Reply,
    Request,
    ShutdownRequest,
    StartRequest,
    UpdateRequest,
)

APPLY_VARIABLE = "WEIGHTSYNC_VLLM_APPLY"
"""`auto`, `staged` or `in_place`; vLLM's own configuration of an engine is its name alone."""


class WeightsyncEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
    """The receiving half of weightsync inside one vLLM worker.

    Driven by vLLM through the methods of its contract, and by our sender through the door, which
    answers. An update that comes through vLLM's own endpoints is an anonymous session: dicts of
    `names`, `dtype_names`, `shapes` and `ipc_handles`, as `weightsync serve` takes them.
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module):
        super().__init__(config, vllm_config, device, model)
        apply = cast(ApplyChoice, os.environ.get(APPLY_VARIABLE, "auto"))
        self.receiver = WeightReceiver(VllmSink(model, vllm_config, device), apply=apply)
        self._asked: Request | None = None
        self._replied: Reply | None = None
        WorkerBase.weightsync = _door

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open what a sender offers."""
        self._handle(InitRequest(init_info=codec.parse_init_info(init_info)))

    def start_weight_update(self) -> None:
        """Open an update; the model is touched when weights go into it, not before."""
        if not isinstance(self._asked, UpdateRequest):
            self._handle(StartRequest())

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load one message, in place or aside."""
        if isinstance(self._asked, UpdateRequest):
            self._handle(self._asked)
            return
        try:
            self._handle(UpdateRequest(update_info=codec.parse_update_info(update_info)))
        except BaseException as exc:  # vLLM has ended its session already
            self.receiver.dispatch(AbortRequest(reason=f"{type(exc).__name__}: {exc}"))
            raise

    def finish_weight_update(self) -> None:
        """Put the weights to use."""
        self._handle(FinishRequest())

    def shutdown(self) -> None:
        """Close every mapping, and give up what is open. vLLM may start anew with `init`."""
        if isinstance(self._asked, ShutdownRequest):
            self._handle(self._asked)
        else:
            self.receiver.close(for_good=False)

    def _handle(self, request: Request) -> None:
        """Have the receiver answer what is asked at the door, else `request`."""
        asked = self._asked
        self._replied = self.receiver.dispatch(request if asked is None else asked)

    def answer(self, worker: Any, request: Request) -> Reply:
        """Answer one request of our sender by the method of vLLM's worker that belongs to it."""
        self._replied = None
        with self._asking(request), set_current_vllm_config(self.vllm_config):
            self._drive(worker, request)
            if self._replied is None:  # vLLM has no word for it
                self._replied = self.receiver.dispatch(request)
        return self._replied

    def _drive(self, worker: Any, request: Request) -> None:
        session = _Session(worker)
        open_id = self.receiver.status().update_id
        if isinstance(request, InitRequest):
            worker.init_weight_transfer_engine({})
        elif isinstance(request, UpdateRequest | StartRequest):
            if open_id is None:
                session.end()  # of a sender that died, or an update that failed
            if not session.active:
                worker.start_weight_update()
            if isinstance(request, UpdateRequest):
                worker.update_weights({})
        elif isinstance(request, FinishRequest) and session.active and open_id is not None:
            worker.finish_weight_update()
        elif isinstance(request, AbortRequest):
            self._replied = self.receiver.dispatch(request)
            if self.receiver.status().update_id is None:
                session.end()

    @contextmanager
    def _asking(self, request: Request) -> Iterator[None]:
        self._asked = request
        try:
            yield
        finally:
            self._asked = None

    def at_door(self, worker: Any, told: Round) -> WorkerAnswer:
        """Answer a round; what a request raises is an answer too."""
        rank, world = _place(self.vllm_config)
        call = rpc.addressed(told, rank)
        reply = wrong = None
        if call is not None:
            try:
                request = codec.decode_request(call.call, call.body.encode())
                answered = self.answer(worker, request)
                reply = codec.encode(answered).decode()
            except Exception as exc:  # noqa: BLE001  # it is told to the sender, who raises it
                wrong = problem.encode_problem(problem.to_problem(exc)).decode()
        return self._stand(told, rank, world, reply, wrong)

    def _stand(
        self, told: Round, rank: int, world: int, reply: str | None, wrong: str | None
    ) -> WorkerAnswer:
        status = self.receiver.status()
        watched = told.watched.get(rank)
        return WorkerAnswer(
            nonce=told.nonce,
            rank=rank,
            world=world,
            state=status.state,
            version=status.version,
            apply=status.apply,
            may_generate=status.may_generate,
            sender_lives=not watched or self.receiver.sender_alive(watched),
            reply=reply,
            problem=wrong,
        )


class _Session:
    """vLLM's own note that an update is open, which outlives a sender that died."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def active(self) -> bool:
        return bool(getattr(self._worker, "_weight_update_active", False))

    def end(self) -> None:
        """Close it without finishing."""
        if self.active:
            self._worker._weight_update_active = False
            self._worker.weight_transfer_engine.reset_weight_update_target()


def _door(worker: Any, text: str) -> dict[str, Any]:
    """Answer a round of our sender; called by vLLM's collective_rpc in every worker.

    Never raises: vLLM would leave the answers of the other workers behind, for the next call.
    """
    try:
        told = rpc.decode_round(text)
        engine = getattr(worker, "weight_transfer_engine", None)
        if not isinstance(engine, WeightsyncEngine):
            raise ConfigError("this worker's weight transfer engine is not weightsync's")
        return rpc.encode_answer(engine.at_door(worker, told))
    except Exception as exc:  # noqa: BLE001  # it is told to the sender, who raises it
        return rpc.encode_refusal(exc)


def _place(vllm_config: Any) -> tuple[int, int]:
    """Return the rank of this worker among all of its server, and their number."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", 0)
    size = int(parallel.world_size)
    return replica * size + int(parallel.rank), int(parallel.world_size_across_dp)
