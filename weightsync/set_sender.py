"""`connect_set`: several parts of one trainer, sent in one update that commits all or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch.distributed as dist

from weightsync.arguments import as_flag
from weightsync.errors import (
    ConfigError,
    ConnectError,
    StaleVersionError,
    UnknownSenderError,
    shorten,
)
from weightsync.ranks.stop import StopSignal
from weightsync.report import SyncReport
from weightsync.runtime.tracebacks import concise
from weightsync.sender import WeightSender, check_settings, connect
from weightsync.transports.calls import CallThreads
from weightsync.transports.factory import Targets, targets_of, twins_of
from weightsync.update.lifecycle import version_after
from weightsync.update.sets import SetUpdate

_TRIES = 2
"""How often an update is tried."""
_WORTH_ANOTHER = (ConnectError, StaleVersionError, UnknownSenderError)
"""Errors after which each part has connected again, or knows a newer version."""


@concise
def connect_set(
    sources: Mapping[str, object] | Iterable[object], to: Targets, **options: Any
) -> SetSender:
    """Return a sender of several parts, whose updates commit on every receiver or on none.

    - `sources`: what `connect` takes, one for each part. Each is sent to the receiver at its own
      path below `to`, as an AdapterSource is; a model to the URL itself. A mapping has the path of
      each part: `{"": policy, "draft": draft}`.
    - `to`: a URL, or several, or transports, each with a receiver for every part (see
      `WeightReceiver(beside=)`); `weightsync serve` and vLLM engines have them for their model and
      for adapters.
    - `options`: as in `connect`, for all parts, without `on_failure`, `process_group` and `at`.

    Raises the errors of `connect`; ConfigError for fewer than two parts, for two of the same path,
    and in a trainer of several ranks, which cannot send a set yet. No part stays connected then.
    """
    for name in ("on_failure", "process_group", "at"):
        if name in options:
            raise ConfigError(f"a set has no {name}=: all of its parts are updated, or none")
    check_settings(options, of="connect_set()")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "a set is sent by a trainer of one rank; with several, connect() each part by itself"
        )
    if isinstance(sources, Mapping):
        parts: list[tuple[str | None, object]] = list(sources.items())
    else:
        parts = [(None, source) for source in sources]
    if len(parts) < 2:
        raise ConfigError(f"a set has two parts at least, and this has {len(parts)}; use connect()")
    of_parts = [targets_of(to, "to=")]
    of_parts += [twins_of(of_parts[0]) for _ in parts[1:]]
    with ExitStack() as opened:
        senders = [
            opened.enter_context(connect(source, of_part, at=path, **options))
            for (path, source), of_part in zip(parts, of_parts, strict=True)
        ]
        targets = [target for sender in senders for target in sender.targets]
        if len(set(targets)) < len(targets):
            raise ConfigError(
                "two parts of the set have the same receiver; give a mapping with the path of each"
            )
        _check_sets(senders)
        opened.pop_all()
    return SetSender(senders)


def _check_sets(senders: Iterable[WeightSender]) -> None:
    """Raise ConfigError where receivers of different parts would not finish together."""
    of_parts = [
        sorted(str(status.set_id or status.instance) for status in sender._statuses)
        for sender in senders
    ]
    if any(ids != of_parts[0] for ids in of_parts):
        targets = shorten(target for sender in senders for target in sender.targets)
        raise ConfigError(
            f"{targets} are not receivers of one set, and would commit the parts one after the "
            "other: a server that takes adapters has a set of its model and them, and "
            "WeightReceiver(..., beside=) makes one; connect() each part by itself elsewhere"
        )


class SetSender:
    """Sends the parts of a set; made by `connect_set`. Use it from one thread.

    `senders` has the sender of each part, in the order in which the parts were given.
    """

    def __init__(self, senders: Iterable[WeightSender]) -> None:
        self.senders = tuple(senders)
        self._threads: CallThreads[SyncReport] = CallThreads()

    def __repr__(self) -> str:
        return f"<SetSender of {len(self.senders)} parts at version {self.version}>"

    @property
    def version(self) -> int:
        """The last version of the set: the newest that receivers of any part hold."""
        return max(sender.version for sender in self.senders)

    @concise
    def send_weights(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        wake: bool = False,
    ) -> list[SyncReport]:
        """Send the current weights of all parts; return their reports when all are in use.

        All parts get the same version: `version`, by default one more than the newest. A server
        swaps all of them between two decode steps. Requests in flight keep the versions of adapters
        with which they were accepted. `wake` is that of `WeightSender.send_weights`.

        Raises the error of the part that failed first. Before the commit no receiver of any part
        has changed then, except those in place, which the error or their status calls TORN. Where a
        sender or a server dies during the commit, the next update of any part completes the set on
        servers that had begun, as an update of one part.
        """
        as_flag("wake", wake)
        woken = [sender._wake() for sender in self.senders] if wake else []
        for last in range(_TRIES - 1, -1, -1):
            given = version_after(self.version) if version is None else version
            update = SetUpdate(len(self.senders))
            errors, reports = self._send(update, given, label, rewind=rewind)
            if not errors:
                for sender, members in zip(self.senders, woken, strict=False):
                    sender._serve(members)
                return reports
            error = errors[0] if update.error is None else update.error
            again = update.again or (update.error is error and isinstance(error, _WORTH_ANOTHER))
            stays_old = version is not None and isinstance(error, StaleVersionError)
            if not (last and again) or stays_old:
                raise error
        raise AssertionError("the last try returns or raises")

    def _send(
        self, update: SetUpdate, version: int, label: str | None, *, rewind: bool
    ) -> tuple[list[BaseException], list[SyncReport]]:
        """Send all parts at once, each in a thread; return the errors, or the reports."""
        stops = [StopSignal() for _ in self.senders]
        futures: list[Future[SyncReport]] = [Future() for _ in self.senders]
        try:
            for sender, stop, future in zip(self.senders, stops, futures, strict=True):
                send = partial(sender._send_in_set, update, version, label, rewind, stop)
                self._threads.submit(send, future)
            wait(futures)
        except BaseException as exc:  # an interrupt: the parts that began end before it is raised
            update.failed(exc)
            for stop in stops:
                stop.set()
            update.await_parts()
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        return errors, [] if errors else [future.result() for future in futures]

    @concise
    def close(self) -> None:
        """Close the senders of all parts; see WeightSender.close."""
        with ExitStack() as closing:
            closing.callback(self._threads.close)
            for sender in self.senders:
                closing.callback(sender.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
