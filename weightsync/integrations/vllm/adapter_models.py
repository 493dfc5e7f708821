"""Adapters as models of vLLM's OpenAI API: `policy`, and `policy@7` for a version of it.

Runs in the process of the API server, which looks a request's model up by name. What the engine
holds is in the answers to each round of a sender, which pass through this process.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    MutableMapping,
)
from contextlib import aclosing
from typing import Any

from weightsync.errors import ConfigError, NotReadyError, shorten
from weightsync.integrations.adapter_paths import adapter_of, adapter_path
from weightsync.integrations.vllm import rpc as vllm_rpc
from weightsync.integrations.vllm.adapter_names import AdapterPath, path_of, request_of
from weightsync.integrations.vllm.adapter_versions import SERVED, is_ours

_ALIVE_S = 0.5


class SentAdapters:
    """The versions that the engine of one API server holds, by adapter, the one in use last."""

    def __init__(self) -> None:
        self.served: dict[str, list[str]] = {}
        self.models: Any = None

    def find(self, model: object) -> AdapterPath | None:
        """Return what a model's name names, if the engine holds it."""
        wanted = path_of(model) if isinstance(model, str) else None
        if wanted is None:
            return None
        paths = map(AdapterPath.parse, self.served.get(wanted.name, ()))
        return wanted if any(map(wanted.takes, paths)) else None

    def all(self) -> Iterator[AdapterPath]:
        """Yield every adapter, and every version of it, once."""
        for name, paths in self.served.items():
            yield AdapterPath(name)
            for version in dict.fromkeys(AdapterPath.parse(path).version for path in paths):
                yield AdapterPath(name, version)

    def refuse_taken(self, name: str) -> None:
        """Raise ConfigError for the name of the base model, or of an adapter from a file.

        Also where a file has the name of one of its versions.
        """
        models = self.models
        if models is None:
            return
        if models.is_base_model(name):
            raise ConfigError(f"{name!r} is the name of the base model of this server")
        requests = models.lora_requests
        files = requests.files if isinstance(requests, LoraRequests) else {}
        taken = [file for file in files if _adapter_named(file) == name]
        if taken:
            raise ConfigError(
                f"{shorten(map(repr, taken))} is the name of an adapter that this server loaded "
                "from a file; unload it (/v1/unload_lora_adapter), or send by another name"
            )


def _adapter_named(model: str) -> str | None:
    """Return the adapter that a model's name names, itself or a version of it; None for others."""
    path = path_of(model)
    return None if path is None else path.name


class LoraRequests(MutableMapping[str, Any]):
    """vLLM's LoRARequests by model name: its own, of files, and those of adapters that are sent."""

    def __init__(self, files: dict[str, Any], sent: SentAdapters, engine: Any) -> None:
        self.files = files
        self._sent = sent
        self._engine = engine
        self._unloads: set[asyncio.Task[Any]] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self.files:
            return self.files[name]
        path = self._sent.find(name)
        if path is None:
            raise KeyError(name)
        return request_of(path)

    def __iter__(self) -> Iterator[str]:
        yield from self.files
        yield from (path.model for path in self._sent.all())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, request: Any) -> None:
        adapter = _adapter_named(name)
        if name not in self.files and adapter in self._sent.served:
            raise ConfigError(
                f"the adapter {adapter!r} is sent by a trainer; unload it first, or load the file "
                "by another name"
            )
        self.files[name] = request

    def __delitem__(self, name: str) -> None:
        """Unload an adapter: one that is sent, with all of its versions."""
        if name in self.files:
            del self.files[name]
            return
        path = self._sent.find(name)
        if path is None:
            raise KeyError(name)
        if path.version is not None:
            raise ConfigError(f"{name!r} is one version of an adapter; unload {path.name!r}")
        paths = self._sent.served.pop(path.name)
        task = asyncio.get_running_loop().create_task(self._unload(path.name, paths))
        self._unloads.add(task)  # the loop itself keeps a weak reference

    async def await_unloads(self) -> None:
        """Wait until all workers have forgotten what was unloaded. Raises the error of a worker."""
        unloads, self._unloads = self._unloads, set()
        await asyncio.gather(*unloads)

    async def _unload(self, name: str, paths: list[str]) -> None:
        nonce = secrets.token_hex(8)
        sent = vllm_rpc.Round(nonce=nonce, below=adapter_path(name), unload=True)
        text = vllm_rpc.encode_round(sent)
        try:
            results = await self._engine.collective_rpc(vllm_rpc.METHOD, None, (text,))
            vllm_rpc.decode_answers(sent, results, peer="this vLLM")
        except Exception:
            self._sent.served.setdefault(name, paths)  # it is still there
            raise


def _sent_of(engine: Any) -> SentAdapters:
    if not hasattr(engine, "_weightsync_adapters"):
        engine._weightsync_adapters = SentAdapters()
    found: SentAdapters = engine._weightsync_adapters
    return found


async def _pass_on(call: Callable[[], Awaitable[Any]], engine: Any, text: object) -> Any:
    """Pass a round on to the engine, and note what that answers of its adapters."""
    sent, round_ = _sent_of(engine), vllm_rpc.find_adapter_round(text)
    try:
        for path in () if round_ is None or round_.unload else round_.adapters:
            sent.refuse_taken(adapter_of(path))
    except ConfigError as exc:
        return [vllm_rpc.encode_refusal(exc)]
    results = await call()
    for result in results if isinstance(results, list) else ():
        served = result.pop(SERVED, None) if isinstance(result, dict) else None
        if served is not None:
            sent.served = served
    return results


async def _while_alive(engine: Any, call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the engine's answer to a call. Raises vLLM's error for an engine that has ended.

    vLLM tells that to requests for completions alone: another call would wait for ever, and with
    it the server, which ends when its calls have.
    """
    task = asyncio.ensure_future(call())
    try:
        while not (await asyncio.wait({task}, timeout=_ALIVE_S))[0]:
            if engine.errored:
                raise engine.dead_error
        return task.result()
    finally:
        task.cancel()


async def _find_later(engine: Any, model: str) -> bool:
    """Whether the engine holds an adapter now, and not when it answered its last round."""
    text = vllm_rpc.encode_round(vllm_rpc.Round(nonce=secrets.token_hex(8)))
    await engine.collective_rpc(vllm_rpc.METHOD, None, (text,))
    return _sent_of(engine).find(model) is not None


async def _outputs_of(
    engine: Any, given: Any, outputs: AsyncGenerator[Any], not_found: type[Exception]
) -> AsyncIterator[Any]:
    """Yield the outputs of a request of an adapter that is sent.

    Raises `not_found` where the adapter was dropped after its name was looked up: of that, the
    engine says no more than that the request is an error.
    """
    model = AdapterPath.parse(given.lora_path).model
    async with aclosing(outputs):
        async for output in outputs:
            refused = any(o.finish_reason == "error" and not o.token_ids for o in output.outputs)
            if refused and not await _find_later(engine, model):
                raise not_found(f"The model `{model}` does not exist.")
            yield output


def install(client: Any, models: Any, not_found: type[Exception]) -> None:
    """Have the classes AsyncLLM and OpenAIServingModels know the adapters that are sent.

    `not_found` is vLLM's error for a model that is not there. Idempotent. Raises AttributeError
    where the classes have not what is wrapped.
    """
    if hasattr(client, "weightsync_adapters"):
        return
    rpc, generate = client.collective_rpc, client.generate
    make, unload = models.__init__, models.unload_lora_adapter

    @functools.wraps(rpc)
    async def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(rpc, self, method, *args, **kwargs)
        given = args[1] if len(args) > 1 else kwargs.get("args", ())
        if method != vllm_rpc.METHOD or len(given) != 1:
            return await call()
        return await _pass_on(functools.partial(_while_alive, self, call), self, given[0])

    @functools.wraps(make)
    def init(self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        make(self, engine_client, *args, **kwargs)
        sent = _sent_of(engine_client)
        sent.models = self
        self.lora_requests = LoraRequests(self.lora_requests, sent, engine_client)

    @functools.wraps(generate)
    def generate_named(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, given = generate(self, *args, **kwargs), kwargs.get("lora_request")
        if given is None or not is_ours(given):
            return outputs
        return _outputs_of(self, given, outputs, not_found)

    @functools.wraps(unload)
    async def unload_lora_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await unload(self, *args, **kwargs)
        await self.lora_requests.await_unloads()
        return answer

    client.collective_rpc, client.generate = collective_rpc, generate_named
    models.__init__, models.unload_lora_adapter = init, unload_lora_adapter
    client.weightsync_adapters = _sent_of


def install_offline(engine: Any) -> None:
    """Have the class LLMEngine forget a request that its engine refuses.

    It notes a request before it gives it to the engine, and would wait for one that is refused.
    Idempotent. Raises AttributeError where the class has not what is wrapped.
    """
    if hasattr(engine, "weightsync_adapters"):
        return
    add = engine.add_request

    @functools.wraps(add)
    def add_request(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return add(self, request_id, *args, **kwargs)
        except (ConfigError, NotReadyError):  # ours; vLLM raises none
            self.abort_request([request_id])
            raise

    engine.add_request = add_request
    engine.weightsync_adapters = True
