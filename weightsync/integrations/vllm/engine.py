"""The weight transfer engine of a vLLM worker for `backend: weightsync`, and its RPC method."""

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
"""`auto`, `staged` or `in_place`. vLLM's configuration of an engine has no field for it."""


class WeightsyncEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
    """The receiver inside one vLLM worker.

    vLLM calls the methods of its contract; our sender calls the RPC method, which returns replies.
    An update through vLLM's own endpoints is an anonymous session: dicts of `names`,
    `dtype_names`, `shapes` and `ipc_handles`, as for `weightsync serve`.
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module):
        super().__init__(config, vllm_config, device, model)
        apply = cast(ApplyChoice, os.environ.get(APPLY_VARIABLE, "auto"))
        self.receiver = WeightReceiver(VllmSink(model, vllm_config, device), apply=apply)
        self._request: Request | None = None
        self._reply: Reply | None = None
        WorkerBase.weightsync = _answer_call

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the memory that a sender offers."""
        self._handle(InitRequest(init_info=codec.parse_init_info(init_info)))

    def start_weight_update(self) -> None:
        """Open an update. The model is not changed before weights are loaded into it."""
        if not isinstance(self._request, UpdateRequest):
            self._handle(StartRequest())

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load one message, in place or staged."""
        if isinstance(self._request, UpdateRequest):
            self._handle(self._request)
            return
        try:
            self._handle(UpdateRequest(update_info=codec.parse_update_info(update_info)))
        except BaseException as exc:  # vLLM has ended its session already
            self.receiver.dispatch(AbortRequest(reason=f"{type(exc).__name__}: {exc}"))
            raise

    def finish_weight_update(self) -> None:
        """Put the weights into use."""
        self._handle(FinishRequest())

    def shutdown(self) -> None:
        """Abort an open update and close every mapping. vLLM may call `init` again."""
        if isinstance(self._request, ShutdownRequest):
            self._handle(self._request)
        else:
            self.receiver.close(for_good=False)

    def _handle(self, request: Request) -> None:
        """Dispatch the sender's request, if this is inside its RPC, else `request`."""
        pending = self._request
        self._reply = self.receiver.dispatch(request if pending is None else pending)

    def answer(self, worker: Any, request: Request) -> Reply:
        """Handle one request of our sender through the method of vLLM's worker for it."""
        self._reply = None
        with self._asking(request), set_current_vllm_config(self.vllm_config):
            self._drive(worker, request)
            if self._reply is None:  # vLLM has no method for it
                self._reply = self.receiver.dispatch(request)
        return self._reply

    def _drive(self, worker: Any, request: Request) -> None:
        session = _Session(worker)
        open_id = self.receiver.status().update_id
        if isinstance(request, InitRequest):
            worker.init_weight_transfer_engine({})
        elif isinstance(request, UpdateRequest | StartRequest):
            if open_id is None:
                session.end()  # left by a dead sender, or a failed update
            if not session.active:
                worker.start_weight_update()
            if isinstance(request, UpdateRequest):
                worker.update_weights({})
        elif isinstance(request, FinishRequest) and session.active and open_id is not None:
            worker.finish_weight_update()
        elif isinstance(request, AbortRequest):
            self._reply = self.receiver.dispatch(request)
            if self.receiver.status().update_id is None:
                session.end()

    @contextmanager
    def _asking(self, request: Request) -> Iterator[None]:
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def answer_round(self, worker: Any, round_: Round) -> WorkerAnswer:
        """Answer a round. An error of a request is part of the answer."""
        rank, world = _place(self.vllm_config)
        call = rpc.addressed(round_, rank)
        reply = wrong = None
        if call is not None:
            try:
                request = codec.decode_request(call.call, call.body.encode())
                answered = self.answer(worker, request)
                reply = codec.encode(answered).decode()
            except Exception as exc:  # noqa: BLE001  # returned to the sender, which raises it
                wrong = problem.encode_problem(problem.to_problem(exc)).decode()
        return self._worker_answer(round_, rank, world, reply, wrong)

    def _worker_answer(
        self, round_: Round, rank: int, world: int, reply: str | None, wrong: str | None
    ) -> WorkerAnswer:
        status = self.receiver.status()
        watched = round_.watched.get(rank)
        return WorkerAnswer(
            nonce=round_.nonce,
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
    """vLLM's own flag that an update is open. It stays set when a sender dies."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def active(self) -> bool:
        return bool(getattr(self._worker, "_weight_update_active", False))

    def end(self) -> None:
        """Clear the flag, without finishing the update."""
        if self.active:
            self._worker._weight_update_active = False
            self._worker.weight_transfer_engine.reset_weight_update_target()


def _answer_call(worker: Any, text: str) -> dict[str, Any]:
    """Answer a round of our sender. Called by vLLM's collective_rpc in every worker.

    Never raises: vLLM would keep the other workers' answers, and return them from the next call.
    """
    try:
        round_ = rpc.decode_round(text)
        engine = getattr(worker, "weight_transfer_engine", None)
        if not isinstance(engine, WeightsyncEngine):
            raise ConfigError("this worker's weight transfer engine is not weightsync's")
        return rpc.encode_answer(engine.answer_round(worker, round_))
    except Exception as exc:  # noqa: BLE001  # returned to the sender, which raises it
        return rpc.encode_refusal(exc)


def _place(vllm_config: Any) -> tuple[int, int]:
    """Return the rank of this worker in its server, and the number of workers."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", 0)
    size = int(parallel.world_size)
    return replica * size + int(parallel.rank), int(parallel.world_size_across_dp)
