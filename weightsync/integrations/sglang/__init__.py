"""SGLang servers as receivers, named with their settings; a plain URL needs none of this.

Inside a process that holds an `sglang.Engine` there is nothing to join: what the engine takes as
tensors is pickled on the way to its workers. Give its server a URL, or write a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weightsync.integrations.sglang.files import WeightDirectory
from weightsync.integrations.sglang.server import Pause, SglangTarget, SglangTransport


def servers(
    urls: str | Iterable[str],
    *,
    directory: Path | str | None = None,
    pause: Pause = "auto",
    check_names: bool = True,
    token: str | None = None,
    verify_tls: bool | str = True,
) -> list[SglangTransport]:
    """Return transports to SGLang servers, for `to=`; weights are written once for all of them.

    `directory`: one that this host and the servers' see under the same path; None takes shared
    memory, for servers of this host. `pause`: what happens to requests in flight while weights are
    read; `keep` takes them back and computes their caches again, `wait` lets them end, `abort` ends
    them, `auto` is `keep` where SGLang's version makes that safe, else `wait`. `check_names`
    compares names with the servers' own checkpoint, where it can be read here. `token` and
    `verify_tls` are HttpTransport's. Raises ConfigError, ConnectError, AuthError,
    BackendUnavailableError for a server that must not be updated, ProtocolError for another kind.
    """
    shelf = WeightDirectory(None if directory is None else Path(directory))
    made: list[SglangTransport] = []
    try:
        for url in [urls] if isinstance(urls, str) else urls:
            target = SglangTarget(
                url=url.removeprefix("sglang+"),
                directory=None if directory is None else Path(directory),
                pause=pause,
                check_names=check_names,
            )
            made.append(SglangTransport(target, shelf, token=token, verify_tls=verify_tls))
    except BaseException:
        for transport in made:
            transport.close()
        raise
    return made
