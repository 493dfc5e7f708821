"""The versions of adapters that an engine's requests may use; runs in the process of vLLM's engine.

Every request of every API server is accepted by vLLM's `EngineCore`, and every round of a sender
goes through it to the workers. So it decides, in one place, which version a request uses, and which
versions the workers keep: those in use by requests, and the newest of each adapter.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from weightsync.errors import ConfigError, shorten
from weightsync.integrations.adapter_paths import adapter_of
from weightsync.integrations.vllm import rpc as vllm_rpc
from weightsync.integrations.vllm.adapter_names import (
    FIRST_ID,
    LAST_ID,
    SCHEME,
    AdapterPath,
    request_of,
)

KEPT_VARIABLE = "WEIGHTSYNC_VLLM_ADAPTER_VERSIONS"
"""How many of the newest versions of each adapter stay, beside those that requests use."""
DEFAULT_KEPT = 2

SERVED = "served"
"""The key of an answer that has the versions of all adapters, for the API server."""


class AdapterVersions:
    """Versions by adapter, the one in use last, and the requests that use them. Thread-safe.

    A version is in use once every worker holds it. A request keeps the version with which it was
    accepted. `kept` is how many of the newest versions of each adapter stay. `next_id` is the first
    number that is tried for a version.
    """

    def __init__(self, kept: int = DEFAULT_KEPT, *, next_id: int = FIRST_ID) -> None:
        self._kept = kept
        self._next_id = next_id
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._held: dict[str, list[str]] = {}
        self._accepted: dict[str, str] = {}

    @property
    def served(self) -> dict[str, list[str]]:
        """The versions that a request may name, by adapter, the one in use last."""
        with self._lock:
            return {name: list(paths) for name, paths in self._held.items()}

    def accept(self, request_id: str, path: str) -> tuple[AdapterPath, int]:
        """Return the version that a request uses and its number, and keep it until `added`.

        A version has its number for as long as workers keep it, and no other has it meanwhile.
        Raises ConfigError for an adapter, or a version of it, that the engine does not hold.
        """
        wanted = AdapterPath.parse(path)
        with self._lock:
            paths = self._held.get(wanted.name, [])
            found = next((p for p in reversed(paths) if wanted.takes(AdapterPath.parse(p))), None)
            if found is not None:
                self._accepted[request_id] = found
                return AdapterPath.parse(found), self._id_of(found)
        names = [AdapterPath.parse(path).model for path in paths]
        raise ConfigError(
            f"no adapter {wanted.model!r} is held; "
            + (f"held are {shorten(names)}" if names else f"{wanted.name!r} was never sent")
        )

    def _id_of(self, path: str) -> int:
        """Return the number of a version. The lock is held."""
        if path not in self._ids:
            used = set(self._ids.values())
            while self._next_id in used or self._next_id >= LAST_ID:
                self._next_id = FIRST_ID if self._next_id >= LAST_ID else self._next_id + 1
            self._ids[path] = self._next_id
            self._next_id += 1
        return self._ids[path]

    def added(self, request_id: str) -> None:
        """Note that a request is among the scheduler's, or was refused."""
        with self._lock:
            self._accepted.pop(request_id, None)

    def keep(self, running: Collection[str]) -> list[str]:
        """Return the versions that workers keep, and forget the others: no request may use them.

        `running` are those of the scheduler's requests.
        """
        with self._lock:
            used = {*running, *self._accepted.values()}
            for name, paths in self._held.items():
                old = paths[: -self._kept]
                self._held[name] = [p for p in old if p in used] + paths[-self._kept :]
            kept = used.union(*self._held.values())
            self._ids = {path: number for path, number in self._ids.items() if path in kept}
            return sorted(kept)

    def answered(self, of_workers: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """Note what the workers hold, by adapter: what all hold may be used from now on."""
        first, *others = of_workers or [{}]
        common = {
            name: [path for path in paths if all(path in other.get(name, ()) for other in others)]
            for name, paths in first.items()
        }
        with self._lock:
            self._held = {name: paths for name, paths in common.items() if paths}

    def unloaded(self, name: str) -> Callable[[], None]:
        """Forget an adapter: no further request may use it. Return what takes that back."""
        with self._lock:
            paths = self._held.pop(name, None)

        def take_back() -> None:
            with self._lock:
                if paths is not None:
                    self._held.setdefault(name, paths)

        return take_back


def kept_of(environment: Mapping[str, str]) -> int:
    """Return the number of versions that stay, as an environment says it. Raises ConfigError."""
    text = environment.get(KEPT_VARIABLE, str(DEFAULT_KEPT))
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 1 << 20:
        raise ConfigError(f"{KEPT_VARIABLE} is a number from 1 on, not {text!r:.20}")
    return int(text)


def install(core: Any) -> None:  # noqa: C901  # four wrappers, each a few lines
    """Have every engine of the class `core`, vLLM's EngineCore, decide which versions are used.

    Idempotent. Raises AttributeError where the class has not what is wrapped.
    """
    if hasattr(core, "weightsync_versions"):
        return
    rpc, preprocess, add = core.collective_rpc, core.preprocess_add_request, core.add_request
    add_lora = core.add_lora

    @functools.wraps(rpc)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        def call(text: str) -> Any:
            return rpc(self, method, timeout, (text,), kwargs)

        if method == vllm_rpc.METHOD and len(args) == 1:
            return _pass_on(call, self, args[0])
        return rpc(self, method, timeout, args, kwargs)

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        """Run in the thread that receives requests, before their blocks are hashed."""
        given = request.lora_request
        if given is None or not is_ours(given):
            return preprocess(self, request)
        versions = _versions_of(self)
        path, number = versions.accept(request.request_id, given.lora_path)
        request.lora_request = request_of(path, number)
        try:
            return preprocess(self, request)
        except BaseException:
            versions.added(request.request_id)
            raise

    @functools.wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return add(self, request, *args, **kwargs)
        finally:
            if request.lora_request is not None and is_ours(request.lora_request):
                _versions_of(self).added(request.request_id)

    @functools.wraps(add_lora)
    def add_lora_of_file(self: Any, lora_request: Any) -> Any:
        if not is_ours(lora_request):
            return add_lora(self, lora_request)
        raise ConfigError(
            f"{lora_request.lora_path!r:.120} is sent by a trainer and is no file: requests name "
            "its model, and nothing has to be loaded"
        )

    core.collective_rpc, core.preprocess_add_request = collective_rpc, preprocess_add_request
    core.add_request, core.add_lora = add_request, add_lora_of_file
    core.weightsync_versions = _versions_of


_making = threading.Lock()


def _versions_of(engine: Any) -> AdapterVersions:
    with _making:  # requests and rounds come in threads of their own
        if not hasattr(engine, "_weightsync_versions"):
            engine._weightsync_versions = AdapterVersions(kept_of(os.environ))
        found: AdapterVersions = engine._weightsync_versions
        return found


def _pass_on(call: Callable[[str], Any], engine: Any, text: object) -> Any:
    """Pass a round on to the workers, and note which versions of adapters they hold after it.

    Also after a round to the base model, which may commit adapters of a set. To the receivers of
    adapters it goes with the versions that workers keep.
    """
    sent = vllm_rpc.find_adapter_round(text)
    take_back: Callable[[], None] | None = None
    if sent is not None:
        try:
            names = [adapter_of(path) for path in sent.adapters]
            versions = _versions_of(engine)
        except ConfigError as exc:
            return [vllm_rpc.encode_refusal(exc)]
        if sent.unload:
            take_back = versions.unloaded(names[0])
        requests = [request.lora_request for request in engine.scheduler.requests.values()]
        running = {given.lora_path for given in requests if given is not None and is_ours(given)}
        text = vllm_rpc.encode_round(msgspec.structs.replace(sent, kept=versions.keep(running)))
    results = call(str(text))
    known = isinstance(results, list) and hasattr(engine, "_weightsync_versions")
    refused = known and any(map(vllm_rpc.is_refusal, results))
    if refused and take_back is not None:
        take_back()
    if known and not refused:
        versions = _versions_of(engine)
        versions.answered([result.get("adapters", {}) for result in results])
        for result in results:
            result[SERVED] = versions.served
    return results


def is_ours(request: Any) -> bool:
    """Whether a LoRARequest names an adapter that is sent."""
    return str(request.lora_path).startswith(SCHEME)
