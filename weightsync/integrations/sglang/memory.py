"""An SGLang server whose schedulers are receivers, by our plug-in: rounds to all of its ranks.

Rounds travel as the `action` of /weights_checker, which SGLang hands to every rank. A scheduler
stops for the commit by itself, so a sender never pauses it. No server has run this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from weightsync.errors import BackendUnavailableError, ConfigError, ConnectError, ProtocolError
from weightsync.integrations.sglang.files import WeightDirectory
from weightsync.integrations.sglang.server import (
    GREETING_S,
    SglangControl,
    SglangFacts,
    SglangTarget,
    SglangTransport,
    check_host,
)
from weightsync.integrations.vllm import rpc
from weightsync.integrations.vllm.rpc import WorkerAnswer
from weightsync.integrations.vllm.server import VllmServer, VllmWorkerTransport
from weightsync.transports.base import Transport
from weightsync.wire.messages import (
    FinishRequest,
    LabelRequest,
    PauseRequest,
    Request,
    ResetCacheRequest,
    ResumeRequest,
)

ROUND = "weightsync:"
"""The prefix of an `action` of /weights_checker that is a round of ours."""


class SglangRounds(SglangControl):
    """Calls to a server with our plug-in, as those to a vLLM server are made."""

    def rpc(self, text: str, *, timeout_s: float) -> object:
        """Send a round to all ranks, and return their answers."""
        found = self.request("weights_checker", {"action": f"{ROUND}{text}"}, timeout_s)
        try:
            return msgspec.json.decode(str(found.get("message", "")))
        except msgspec.DecodeError as exc:
            raise ProtocolError(
                f"{self.target} does not answer as weightsync's plug-in does; is it loaded in all "
                "of its processes?"
            ) from exc

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether a user has paused generation."""
        sent = rpc.Round(nonce="paused")
        results = self.rpc(rpc.encode_round(sent), timeout_s=timeout_s)
        return any(a.paused for a in rpc.decode_answers(sent, results, peer=self.target))

    def resume(self, *, timeout_s: float) -> None:
        """Resume generation."""
        self.proceed(timeout_s=timeout_s)

    def wake_up(self, tags: Sequence[str] | None, *, timeout_s: float) -> None:
        """Raise ConfigError: SGLang refuses to resume what it has not released."""
        raise ConfigError(f"{self.target}: wake SGLang with POST /resume_memory_occupation")

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        """Flush the prefix cache. Raises RemoteError while requests are running."""
        self.flush_cache(timeout_s=timeout_s)


class SglangServer(VllmServer):
    """Sends rounds to all ranks of one server, which need no pause."""

    def _run(self, requests: dict[int, Request], timeout_s: float) -> dict[int, WorkerAnswer]:
        first = next(iter(requests.values()))
        if isinstance(first, PauseRequest):
            if first.mode == "wait":
                raise ConfigError(
                    f"{self.control.target}: SGLang cannot wait for requests to end; pause with "
                    "keep or abort"
                )
            self.control.pause(first.mode, timeout_s=timeout_s)
        elif isinstance(first, ResumeRequest):
            self.control.resume(timeout_s=timeout_s)
        elif isinstance(first, ResetCacheRequest):
            self.control.reset_prefix_cache(timeout_s=timeout_s)
        elif isinstance(first, LabelRequest):
            self.control.set_version(first.new_version, timeout_s=timeout_s)
        answers = self._send(requests, timeout_s)
        if isinstance(first, FinishRequest) and not self._failed(answers):
            version = first.weight_version or str(self._answers[0].version)
            self.control.set_version(version, timeout_s=timeout_s)
        return answers


def transports_to(
    target: SglangTarget,
    weight_dir: Callable[[], WeightDirectory],
    *,
    token: str | None = None,
    verify_tls: bool | str = True,
    patience_s: float = 300.0,
) -> Sequence[Transport]:
    """Return a transport to each rank of a server with our plug-in; else one, by files.

    Also by files where the target names a directory. Raises as SglangControl.greet, and
    ConfigError for a server of another host that takes files, where no directory is named.
    """
    if target.directory is not None:
        weight_dir()  # refused before the server is called, where it is none
    control = SglangRounds(target.url, token, verify_tls=verify_tls)
    control.pause_mode = target.pause
    try:
        facts = control.greet(timeout_s=GREETING_S)
    except ConnectError:
        if target.directory is None:
            check_host(control.target)
        raise
    if facts.in_memory and target.directory is None:
        return _ranks_of(target, control, facts)
    return [
        SglangTransport(
            target,
            weight_dir(),
            token=token,
            verify_tls=verify_tls,
            patience_s=patience_s,
            greeted=(control, facts),
        )
    ]


def _ranks_of(
    target: SglangTarget, control: SglangRounds, facts: SglangFacts
) -> list[VllmWorkerTransport]:
    """Return a transport to every rank of a server with our plug-in. Raises as the first round."""
    if facts.replicas > 1:
        raise BackendUnavailableError(
            f"{control.target} has {facts.replicas} data parallel replicas, of which each would "
            "be updated at another time; start one server per replica, and name them all"
        )
    if target.pause != "auto" or not target.check_names:
        raise ConfigError(
            f"{control.target} takes weights in memory, where names are always checked and its "
            "schedulers stop by themselves: pause= and names= are for updates by files; leave "
            "them out, or name a directory"
        )
    server = SglangServer(control, timeout_s=GREETING_S)
    return [VllmWorkerTransport(server, rank) for rank in range(server.workers)]
