"""SGLang servers as receivers, with settings of their own; a plain URL needs none of this.

An `sglang.Engine` in the trainer's process is not supported. Use a server with a URL, or write a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weightsync.integrations.sglang.files import WeightDirectory
from weightsync.integrations.sglang.memory import transports_to
from weightsync.integrations.sglang.server import Pause, SglangTarget
from weightsync.transports.base import Transport


def servers(
    urls: str | Iterable[str],
    *,
    directory: Path | str | None = None,
    pause: Pause = "auto",
    check_names: bool = True,
    token: str | None = None,
    verify_tls: bool | str = True,
) -> list[Transport]:
    """Return transports to SGLang servers, for `to=`; files are written once for all of them.

    A server with weightsync's plug-in takes weights in memory, by a transport for each rank, unless
    a `directory` is named.

    `directory` is visible to this host and to the servers' under the same path; None is shared
    memory, for servers of this host. `pause` decides about requests in flight while servers
    read weights: `keep` retracts them and computes their caches again, `wait` lets them end,
    `abort` ends them, `auto` is `keep` where SGLang's version makes that safe, else `wait`.
    `check_names` compares names with the servers' own checkpoint, where this process can read it.
    `token` and `verify_tls` are HttpTransport's. Raises ConfigError, ConnectError, AuthError,
    BackendUnavailableError for a server that must not be updated, and ProtocolError for a server of
    another kind.
    """
    weight_dir = WeightDirectory(None if directory is None else Path(directory))
    made: list[Transport] = []
    try:
        for url in [urls] if isinstance(urls, str) else urls:
            target = SglangTarget(
                url=url.removeprefix("sglang+"),
                directory=None if directory is None else Path(directory),
                pause=pause,
                check_names=check_names,
            )
            made += transports_to(target, lambda: weight_dir, token=token, verify_tls=verify_tls)
    except BaseException:
        for transport in made:
            transport.close()
        raise
    return made
