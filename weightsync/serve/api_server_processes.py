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
from weightsync.serve.process_control import shutdown


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The index of an API server among `client_count`, and its own ZeroMQ addresses."""

    client_index: int
    client_count: int
    input_address: str
    output_address: str
    stats_update_address: str | None = None


class APIServerProcessManager:
    """API server processes, started at once. They end when the manager is closed or collected.

    Each process runs `target(ready, sock, config, *args)`: a function of a module, which calls
    `ready()` once and serves until SIGTERM. `sock` is one listening socket for all of them, and
    `config` is the ClientConfig of the process.
    """

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
        """Start one process per address, and return before they are ready.

        The caller keeps `sock` and may close it now. Raises ConfigError when addresses are missing.
        """
        count = len(input_addresses)
        if not count or len(output_addresses) != count:
            raise ConfigError(
                f"{count} input addresses and {len(output_addresses)} output addresses are given; "
                "each API server needs one of both, and there is at least one server"
            )
        self._children = []
        addresses = zip(input_addresses, output_addresses, strict=True)
        for index, (input_address, output_address) in enumerate(addresses):
            config = ClientConfig(
                client_index=index,
                client_count=count,
                input_address=input_address,
                output_address=output_address,
                stats_update_address=stats_update_address,
            )
            name = f"api server {index}"
            spec = ChildSpec(name=name, target=target, args=(sock, config, *args))
            self._children.append(Child(spec))
        self.processes: list[BaseProcess] = [child.process for child in self._children]
        self._finalizer = weakref.finalize(self, shutdown, self.processes)
        for child in self._children:
            child.start()

    def close(self) -> None:
        """End the processes: SIGTERM, 5 s in all, then SIGKILL to them and their descendants.

        Idempotent.
        """
        self._finalizer()
        for child in self._children:
            child.close()
