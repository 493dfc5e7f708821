"""The weight transfer engine of a vLLM worker for `backend: weightsync`, and its RPC method."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.integrations.adapter_paths import adapter_of
from weightsync.integrations.vllm import names, rpc
from weightsync.integrations.vllm.sleeping import watch_workers
from weightsync.receiver import WeightReceiver
from weightsync.update.lifecycle import ApplyChoice
from weightsync.wire import codec
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

names.require("updates", "weightsync's engine cannot be used")

from vllm.config import set_current_vllm_config  # noqa: E402  # refused above where it is not there
from vllm.distributed.weight_transfer.base import WeightTransferEngine  # noqa: E402  # as above
from vllm.v1.worker.worker_base import WorkerBase  # noqa: E402  # as above

from weightsync.integrations.vllm.sink import VllmSink  # noqa: E402  # it imports vLLM, too

if TYPE_CHECKING:
    from weightsync.integrations.vllm.adapter_sink import WorkerAdapters

APPLY_VARIABLE = "WEIGHTSYNC_VLLM_APPLY"
"""`auto`, `staged` or `in_place`. vLLM's configuration of an engine has no field for it."""

SLICES_VARIABLE = "WEIGHTSYNC_VLLM_SLICES"
"""`on` or `off`: a worker of several stages whole tensors."""


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
        slices = os.environ.get(SLICES_VARIABLE, "on")
        if slices not in ("on", "off"):
            raise ConfigError(f"{SLICES_VARIABLE} must be on or off, not {slices!r}")
        sink = VllmSink(model, vllm_config, device, slices=slices == "on")
        self.receiver = WeightReceiver(sink, apply=apply)
        self._request: Request | None = None
        self._reply: Reply | None = None
        self._adapters: WorkerAdapters | None = None
        WorkerBase.weightsync = _answer_call
        watch_workers(WorkerBase, _receiver_of)

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
            if self._adapters is not None:
                self._adapters.close()

    def adapters(self, worker: Any) -> WorkerAdapters:
        """Return the adapters of this worker. Raises ConfigError for an engine without LoRA."""
        if self._adapters is None:
            names.require("adapters", "it takes no adapters")
            from weightsync.integrations.vllm.adapter_sink import (  # noqa: PLC0415  # as it needs them
                WorkerAdapters,
            )

            self._adapters = WorkerAdapters(worker.model_runner, self.receiver)
        return self._adapters

    def held_adapters(self, kept: Collection[str] | None) -> dict[str, list[str]]:
        """Return the versions of adapters that requests may use, and drop all but those `kept`."""
        if self._adapters is None:
            return {}
        if kept is not None:
            self._adapters.prune(kept)
        return self._adapters.held()

    def _handle(self, request: Request) -> None:
        """Dispatch the sender's request, if this is inside its RPC, else `request`."""
        pending = self._request
        self._reply = self.receiver.dispatch(request if pending is None else pending)

    def answer(self, worker: Any, request: Request) -> Reply:
        """Handle one request of our sender through the method of vLLM's worker for it."""
        self._request, self._reply = request, None
        try:
            with set_current_vllm_config(self.vllm_config):
                self._drive(worker, request)
                if self._reply is None:  # vLLM has no method for it
                    self._reply = self.receiver.dispatch(request)
        finally:
            self._request = None
        return self._reply

    def _drive(self, worker: Any, request: Request) -> None:
        open_id = self.receiver.status().update_id
        if isinstance(request, InitRequest):
            worker.init_weight_transfer_engine({})
        elif isinstance(request, UpdateRequest | StartRequest):
            if open_id is None:
                _end_session(worker)  # left by a dead sender, or a failed update
            if not _has_session(worker):
                worker.start_weight_update()
            if isinstance(request, UpdateRequest):
                worker.update_weights({})
        elif isinstance(request, FinishRequest) and _has_session(worker) and open_id is not None:
            worker.finish_weight_update()
        elif isinstance(request, AbortRequest):
            self._reply = self.receiver.dispatch(request)
            if self.receiver.status().update_id is None:
                _end_session(worker)


def _receiver_of(worker: Any) -> WeightReceiver | None:
    """Return the receiver in a worker, None where another engine of weights is in it."""
    engine = getattr(worker, "weight_transfer_engine", None)
    return engine.receiver if isinstance(engine, WeightsyncEngine) else None


def _has_session(worker: Any) -> bool:
    """Whether vLLM's own flag says that an update is open. It stays set when a sender dies."""
    return bool(getattr(worker, "_weight_update_active", False))


def _end_session(worker: Any) -> None:
    """Clear vLLM's flag, without finishing the update."""
    if _has_session(worker):
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()


def _answer_call(worker: Any, text: str) -> dict[str, Any]:
    """Answer a round of our sender. Called by vLLM's collective_rpc in every worker.

    Never raises: vLLM would keep the other workers' answers, and return them from the next call.
    """
    try:
        round_ = rpc.decode_round(text)
        engine = getattr(worker, "weight_transfer_engine", None)
        if not isinstance(engine, WeightsyncEngine):
            raise ConfigError("this worker's weight transfer engine is not weightsync's")
        place = _place(engine.vllm_config)
        if round_.below:
            answered = _answer_adapter(round_, engine, engine.adapters(worker), place)
        else:
            parts = _parts_of(round_, engine, engine.adapters(worker)) if round_.parts else {}
            answer, (rank, world) = partial(engine.answer, worker), place
            answered = rpc.answer_round(
                round_, engine.receiver, answer, rank=rank, world=world, parts=parts
            )
        answered["adapters"] = engine.held_adapters(round_.kept)
    except Exception as exc:  # noqa: BLE001  # returned to the sender, which raises it
        return rpc.encode_refusal(exc)
    return answered


def _answer_adapter(
    round_: rpc.Round, engine: WeightsyncEngine, adapters: WorkerAdapters, place: tuple[int, int]
) -> dict[str, Any]:
    """Answer a round to the receiver of an adapter, in one worker."""
    if round_.unload:
        _check_kept(round_)
        adapters.unload(adapter_of(round_.below))
        receiver, handle = engine.receiver, engine.receiver.dispatch
    else:
        (part,) = _parts_of(round_, engine, adapters).values()
        receiver, handle = part.receiver, part.handle
    rank, world = place
    return rpc.answer_round(round_, receiver, handle, rank=rank, world=world)


def _parts_of(
    round_: rpc.Round, engine: WeightsyncEngine, adapters: WorkerAdapters
) -> dict[str, rpc.Part]:
    """Return the receivers of a round's adapters, by their paths."""
    _check_kept(round_)
    return {
        path: rpc.Part(adapters.receiver(adapter_of(path)), engine.receiver)
        for path in round_.adapters
    }


def _check_kept(round_: rpc.Round) -> None:
    """Raise ConfigError where no engine of ours told which versions of adapters are kept."""
    if round_.kept is None:
        raise ConfigError(
            "the engine of this vLLM does not tell which versions of adapters its requests use: "
            "the plug-in of weightsync does not know this version of vLLM, or was not loaded"
        )


def _place(vllm_config: Any) -> tuple[int, int]:
    """Return the rank of this worker in its server, and the number of workers."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", 0)
    size = int(parallel.world_size)
    return replica * size + int(parallel.rank), int(parallel.world_size_across_dp)
