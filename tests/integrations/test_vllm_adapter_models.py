"""Adapters in the API server of a vLLM: what is unloaded, and what is dropped under a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import weightsync as ws
from weightsync.integrations.vllm import adapter_models, rpc
from weightsync.integrations.vllm.adapter_names import AdapterPath
from weightsync.integrations.vllm.adapter_versions import SERVED
from weightsync.integrations.vllm.rpc import Round, WorkerAnswer, encode_round

PATH = str(AdapterPath("policy", 1, "a" * 16))


class NotFound(Exception):
    """Stands for vLLM's error."""


class Engine:
    """What of AsyncLLM is used: an engine of one worker that holds some adapters."""

    errored = False

    def __init__(self) -> None:
        self.held: dict[str, list[str]] = {"policy": [PATH]}
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.refusal: Exception | None = None
        self.finish_reason = "length"

    async def collective_rpc(self, method: str, _: Any, args: Any) -> Any:
        await self.may_answer.wait()
        if self.refusal is not None:
            return [rpc.encode_refusal(self.refusal)]
        sent = rpc.decode_round(args[0])
        if sent.unload:
            self.held = {}
        answer: dict[str, Any] = {"state": "READY", "version": 1, "apply": "staged"}
        answer |= {"nonce": sent.nonce, "rank": 0, "world": 1, "may_generate": True}
        assert rpc.decode_answers(sent, [dict(answer)], peer="") == [WorkerAnswer(**answer)]
        return [answer | {SERVED: dict(self.held)}]

    def generate(self, *args: Any, lora_request: Any = None) -> Any:
        async def outputs() -> AsyncIterator[Any]:
            one = SimpleNamespace(finish_reason=self.finish_reason, token_ids=[])
            yield SimpleNamespace(outputs=[one])

        return outputs()


class Models:
    """Stands for OpenAIServingModels."""

    def __init__(self, engine: Any) -> None:
        self.lora_requests: Any = {}

    async def unload_lora_adapter(self, name: str) -> str:
        del self.lora_requests[name]
        return "done"


class Installed:
    """An engine and the models of its server, which know each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind, models = type("Made", (Engine,), {}), type("MadeModels", (Models,), {})
        adapter_models.install(kind, models, NotFound)
        monkeypatch.setattr(adapter_models, "request_of", str)
        self.engine: Any = kind()
        self.models: Any = models(self.engine)

    async def ask(self) -> None:
        await self.engine.collective_rpc(rpc.METHOD, None, (encode_round(Round(nonce="0")),))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_reply_to_an_unload_comes_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        made = Installed(monkeypatch)
        await made.ask()
        assert list(made.models.lora_requests) == ["policy", "policy@1"]
        made.engine.may_answer.clear()
        unload = asyncio.ensure_future(made.models.unload_lora_adapter("policy"))
        await settle()
        assert list(made.models.lora_requests) == []
        assert not unload.done()
        made.engine.may_answer.set()
        assert await unload == "done"
        assert made.engine.held == {}

    asyncio.run(run())


def test_an_unload_that_a_worker_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        made = Installed(monkeypatch)
        await made.ask()
        made.engine.refusal = ws.ConfigError("not now")
        with pytest.raises(ws.ConfigError, match="not now"):
            await made.models.unload_lora_adapter("policy")
        await made.models.lora_requests.await_unloads()  # it is told once
        assert "policy" in made.models.lora_requests

    asyncio.run(run())


@pytest.mark.parametrize(
    ("held", "reason", "found"),
    [(False, "error", False), (True, "error", True), (False, "length", True)],
)
def test_a_version_that_is_dropped_after_its_name_was_looked_up(
    monkeypatch: pytest.MonkeyPatch, held: bool, reason: str, found: bool
) -> None:
    """An engine tells an error; of a version that is gone it is that of an unknown model."""

    async def run() -> None:
        made = Installed(monkeypatch)
        await made.ask()
        made.engine.finish_reason = reason
        if not held:
            made.engine.held = {}
        given = SimpleNamespace(lora_path=str(AdapterPath("policy", 1)))
        outputs = made.engine.generate("a prompt", lora_request=given)
        if found:
            assert len([output async for output in outputs]) == 1
            return
        with pytest.raises(NotFound, match="The model `policy@1` does not exist"):
            await anext(outputs)

    asyncio.run(run())


def test_other_requests_are_passed_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        made = Installed(monkeypatch)
        made.engine.finish_reason = "error"
        for given in (None, SimpleNamespace(lora_path="/tmp/adapter")):
            outputs = made.engine.generate("a prompt", lora_request=given)
            assert len([output async for output in outputs]) == 1

    asyncio.run(run())


def test_a_file_has_no_name_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a request of that version would be one of the file."""

    async def run() -> None:
        made = Installed(monkeypatch)
        made.models.is_base_model = "tiny".__eq__
        requests = made.models.lora_requests
        requests["policy@1"] = "a file"
        text = encode_round(Round(nonce="0", below="adapters/policy"))
        (refused,) = await made.engine.collective_rpc(rpc.METHOD, None, (text,))
        assert rpc.is_refusal(refused)
        assert "'policy@1' is the name of an adapter" in refused["problem"]
        del requests["policy@1"]
        await made.ask()
        for name in ("policy", "policy@1", "policy@9"):
            with pytest.raises(ws.ConfigError, match="'policy' is sent by a trainer"):
                requests[name] = "a file"
        requests["policy-of-a-file"] = "a file"

    asyncio.run(run())
