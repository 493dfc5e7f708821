"""API server processes that share one listening socket."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from weightsync.errors import ConfigError
from weightsync.serve.child_process import Child, ChildSpec
from weightsync.serve.process_ends import shutdown


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which of `client_count` API servers this is, and the ZeroMQ addresses that are its own."""

    client_index: int
    client_count: int
    input_address: str
    output_address: str
    stats_update_address: str | None = None


def api_server_specs(
    target: Callable[..., None],
    sock: socket.socket,
    *,
    input_addresses: Sequence[str],
    output_addresses: Sequence[str],
    args: tuple[Any, ...] = (),
    stats_update_address: str | None = None,
) -> list[ChildSpec]:
    """Return what starts one API server per address, for `Supervisor.start`.

    Each runs `target(ready, sock, config, *args)`, where `sock` is one listening socket for all and
    `config` its ClientConfig. Raises ConfigError when addresses are missing.
    """
    count = len(input_addresses)
    if not count or len(output_addresses) != count:
        raise ConfigError(
            f"{count} input addresses and {len(output_addresses)} output addresses are given; each "
            "API server needs one of both, and there is at least one server"
        )
    configs = [
        ClientConfig(
            client_index=index,
            client_count=count,
            input_address=entrance,
            output_address=exit_,
            stats_update_address=stats_update_address,
        )
        for index, (entrance, exit_) in enumerate(
            zip(input_addresses, output_addresses, strict=True)
        )
    ]
    return [
        ChildSpec(
            name=f"api server {config.client_index}", target=target, args=(sock, config, *args)
        )
        for config in configs
    ]


class APIServerProcessManager:
    """API server processes, started at once; ended when this is closed or collected."""

    def __init__(
        self,
        target: Callable[..., None],
        sock: socket.socket,
        *,
        input_addresses: Sequence[str],
        output_addresses: Sequence[str],
        args: tuple[Any, ...] = (),
        stats_update_address: str | None = None,
    ) -> None:
        """Start them; see api_server_specs. `sock` stays the caller's, who may close it now."""
        specs = api_server_specs(
            target,
            sock,
            input_addresses=input_addresses,
            output_addresses=output_addresses,
            args=args,
            stats_update_address=stats_update_address,
        )
        self._children = [Child(spec) for spec in specs]
        self.processes: list[BaseProcess] = [child.process for child in self._children]
        self._finalizer = weakref.finalize(self, shutdown, self.processes)
        for child in self._children:
            child.start()

    def close(self) -> None:
        """End them: SIGTERM, 5 s in all, then SIGKILL to them and their descendants. Idempotent."""
        self._finalizer()
        for child in self._children:
            child.close()
