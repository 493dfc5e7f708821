"""A callback for the trainers of transformers and TRL: sends the model while it is trained.

    sync = WeightSyncCallback("http://127.0.0.1:8000")
    trainer = GRPOTrainer(..., callbacks=[sync], rollout_func=ServedRollouts("http://127.0.0.1:8000"))

With `ServedRollouts` that server generates the completions that the trainer learns from. Both take
`adapter="policy"`: then the adapter of a PEFT model is all that moves.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

import torch.distributed as dist
from torch import nn

from weightsync import sender as sending
from weightsync.errors import ConfigError, MissingExtraError, install_hint
from weightsync.integrations.adapter_paths import check_name
from weightsync.integrations.adapters import AdapterSource
from weightsync.integrations.trl_rollouts import ServedRollouts
from weightsync.report import SyncReport
from weightsync.sender import ConnectSettings, WeightSender, check_settings
from weightsync.transports.factory import Targets

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as exc:
    raise MissingExtraError(
        f"the trainers' callback needs transformers ({exc}); {install_hint('trl')}"
    ) from exc

__all__ = ["ConnectSettings", "ServedRollouts", "WeightSyncCallback"]

logger = logging.getLogger(__name__)

Source = Callable[[nn.Module], object]

_OWN_SETTINGS = ("every", "at_start", "at_end", "adapter", "adapter_only", "source", "wake")


class WeightSyncCallback(TrainerCallback):
    """Sends the trained model to `to` while a transformers or TRL trainer trains it.

    It connects when training begins, on every rank. It sends before the first step (`at_start`),
    after every `every`-th optimizer step, and at the end where the last weights were not sent
    (`at_end`). The trainer waits for each update, so that generation continues with the new
    weights. Versions are `WeightSender`'s; the update's label is the step, `step-12`.

    With `wake` it wakes servers that sleep while the trainer computes: see `send_weights`.

    A PEFT model is sent with its active adapters merged in. With `adapter="policy"` its adapter
    alone is sent, by that name, to servers that load adapters: see AdapterSource. With
    `adapter_only` it is sent whole once and then its adapter alone, for receivers that hold a PEFT
    model of the same config. `source` is called with the model, and returns the callable or
    WeightSource to send instead. Give one of the three. `settings` are those of `connect`.

    The log gets `sync/version`, and of the updates since its last entry the mean `sync/seconds`,
    `sync/gbps` over all of their time, and the longest `sync/stall_s`. An update at the end is an
    entry of its own. For wandb and similar loggers, register the callback with `add_to`.

    The connection is closed when training ends, or when the callback raises. A context manager
    around `trainer.train()` also ends it when training fails elsewhere. An error of `connect` or
    `send_weights` ends the training on all ranks. Raises ConfigError for invalid settings.
    """

    def __init__(
        self,
        to: Targets,
        *,
        every: int = 1,
        at_start: bool = True,
        at_end: bool = True,
        wake: bool = False,
        adapter: str | None = None,
        adapter_only: bool = False,
        source: Source | None = None,
        **settings: Unpack[ConnectSettings],
    ) -> None:
        if every < 1:
            raise ConfigError(f"every is a number of steps, at least 1, not {every}")
        check_settings(settings, of="WeightSyncCallback", own=_OWN_SETTINGS)
        chosen = {"adapter": adapter, "adapter_only": adapter_only or None, "source": source}
        given = [name for name, value in chosen.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both say what is sent; give one of them")
        if adapter is not None:
            check_name(adapter)
            if settings.get("rename") is not None:
                raise ConfigError(
                    "rename= is not applied to an adapter, which is sent under the names of PEFT's "
                    "checkpoints; leave it out"
                )
        self.version = 0
        self.last_report: SyncReport | None = None
        self._to, self._settings, self._source = to, settings, source
        self._every, self._at_start, self._at_end = every, at_start, at_end
        self._wake = wake
        self._adapter, self._adapter_only = adapter, adapter_only
        self._sender: WeightSender | None = None
        self._sent_step: int | None = None
        self._unlogged: list[SyncReport] = []
        self._trainer: Trainer | None = None

    def add_to(self, trainer: Trainer) -> Self:
        """Register before the trainer's other callbacks, so that their logs contain the values."""
        trainer.callback_handler.callbacks.insert(0, self)
        self._trainer = trainer
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Connect, and send where `at_start`. Called by the trainer, with a sharded model."""
        model: nn.Module = kwargs["model"]
        self.close()
        self._sent_step, self._unlogged = None, []
        self._sender = self._connect(model)
        if self._sender_is_alone():
            atexit.register(self.close)
        if self._at_start:
            self._sync(model, state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Send after every `every`-th step. Called by the trainer after the optimizer's step."""
        if state.global_step % self._every == 0:
            self._sync(kwargs["model"], state.global_step)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Send the last weights if the receivers lack them, and close. Called by the trainer."""
        behind = self._sent_step != state.global_step or args.load_best_model_at_end
        if self._at_end and behind and self._sender is not None:
            self._sync(kwargs["model"], state.global_step)
        self.close()
        if self._unlogged:
            found, self._unlogged = _values(self._unlogged), []
            if self._trainer is not None:
                self._trainer.log(found)
            else:
                state.log_history.append({**found, "step": state.global_step})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the updates since the last entry. Called by the trainer for each entry."""
        if not logs or not self._unlogged or any(name.startswith("eval_") for name in logs):
            return
        found = _values(self._unlogged)
        self._unlogged = []
        logs.update(found)
        if state.log_history:  # the entry was copied there before this was called
            state.log_history[-1].update(found)

    def close(self) -> None:
        """Close the connection; parameters move back. Every rank calls it. Idempotent."""
        atexit.unregister(self.close)
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if value is None or self._sender_is_alone():
            self.close()
        elif self._sender is not None:
            # The other ranks may wait in a collective of the training until this process ends.
            self._sender = None
            logger.warning("training failed: shared memory is released when this process ends")

    def _sender_is_alone(self) -> bool:
        return not dist.is_initialized() or dist.get_world_size() == 1

    def _connect(self, model: nn.Module) -> WeightSender:
        settings = self._settings
        source: object = model
        if self._source is not None:
            source = self._source(model)
        elif (self._adapter_only or self._adapter is not None) and not is_peft(model):
            argument = "adapter_only" if self._adapter_only else "adapter="
            raise ConfigError(
                f"{argument} sends a PEFT model's adapter, and a {type(model).__name__} is "
                "trained; leave it out, or give the trainer a peft_config"
            )
        elif self._adapter is not None:
            settings = settings.copy()
            source = AdapterSource(model, self._adapter, dtype=settings.pop("dtype", None))
        elif is_peft(model) and not self._adapter_only:
            source, settings = _merged(model, settings)
        return sending.connect(source, self._to, **settings)

    def _sync(self, model: nn.Module, step: int) -> None:
        if self._sender is None:
            raise ConfigError(
                "the callback was closed while training goes on; close it after trainer.train()"
            )
        try:
            report = self._send(self._sender, model, f"step-{step}")
        except BaseException:
            sender, self._sender = self._sender, None
            _close_after_failure(sender)
            raise
        self._sent_step, self.version, self.last_report = step, report.version, report
        self._unlogged.append(report)
        logger.info("%s: %s", report.label, report)

    def _send(self, sender: WeightSender, model: nn.Module, label: str) -> SyncReport:
        if not self._adapter_only or self._sent_step is None:
            return sender.send_weights(label=label, wake=self._wake)
        from weightsync.integrations.huggingface import (  # noqa: PLC0415 - only where peft is used
            adapter_tensors,
        )

        with sender.update(label=label, partial=True, wake=self._wake) as update:
            update.send(adapter_tensors(model))
        report = update.last_report
        if report is None:
            raise AssertionError("an update that ended well has a report")
        return report


def is_peft(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model; does not import peft."""
    peft = sys.modules.get("peft")
    model = getattr(model, "_orig_mod", model)
    return peft is not None and isinstance(model, peft.PeftModel)


def _merged(model: nn.Module, settings: ConnectSettings) -> tuple[object, ConnectSettings]:
    from weightsync.integrations.huggingface import (  # noqa: PLC0415 - only where peft is used
        MergedSource,
    )

    if settings.get("rename") is not None:
        raise ConfigError(
            "rename= is not applied to a model with adapters, which is sent under the names of its "
            "base model; leave it out, or give source= a callable that yields (name, tensor)"
        )
    rest = settings.copy()
    rest.pop("rename", None)
    return MergedSource(model, dtype=rest.pop("dtype", None)), rest


def _close_after_failure(sender: WeightSender) -> None:
    try:
        sender.close()
    except Exception:
        logger.debug("the sender could not be closed", exc_info=True)


def _values(reports: list[SyncReport]) -> dict[str, float]:
    seconds = sum(r.seconds["total"] for r in reports)
    return {
        **reports[-1].metrics(),
        "sync/seconds": seconds / len(reports),
        "sync/gbps": sum(r.nbytes for r in reports) / seconds / 1e9 if seconds else 0.0,
        "sync/stall_s": max(r.stall_s for r in reports),
    }
