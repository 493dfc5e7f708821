"""A round to an engine of vLLM that ends meanwhile: it ends, too, and does not wait for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weightsync.integrations.vllm import adapter_models, rpc
from weightsync.integrations.vllm.rpc import Round, encode_round


class EngineDead(Exception):
    """Stands for vLLM's error."""


class Client:
    """What of AsyncLLM is used; `answer` None is an engine that never answers."""

    answer: Any = None
    generate: Any = None

    def __init__(self) -> None:
        self.errored = False
        self.dead_error = EngineDead("the engine is dead")
        self.cancelled = False
        self.called = asyncio.Event()

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.called.set()
        if self.answer is not None:
            return self.answer
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class Models:
    """Stands for OpenAIServingModels."""

    def __init__(self, engine_client: Any) -> None: ...

    async def unload_lora_adapter(self, request: Any) -> None: ...


@pytest.fixture
def kind() -> type[Client]:
    class Made(Client):
        pass

    class MadeModels(Models):
        pass

    adapter_models.install(Made, MadeModels, LookupError)
    return Made


ROUNDS = [Round(nonce="0"), Round(nonce="0", below="adapters/policy")]


@pytest.mark.parametrize("sent", ROUNDS, ids=["base", "adapter"])
def test_a_round_to_an_engine_that_ends(kind: type[Client], sent: Round) -> None:
    async def run() -> None:
        client = kind()
        asked = asyncio.ensure_future(
            client.collective_rpc(rpc.METHOD, None, (encode_round(sent),))
        )
        await client.called.wait()
        await asyncio.sleep(1.2)  # the engine computes, and is looked at meanwhile
        assert not asked.done()
        client.errored = True
        with pytest.raises(EngineDead):
            await asyncio.wait_for(asked, 5)
        await asyncio.sleep(0)
        assert client.cancelled

    asyncio.run(run())


@pytest.mark.parametrize("sent", ROUNDS, ids=["base", "adapter"])
def test_a_round_that_is_answered_or_cancelled(kind: type[Client], sent: Round) -> None:
    async def run() -> None:
        client = kind()
        client.answer = [{"rank": 0}]
        given = (encode_round(sent),)
        assert await client.collective_rpc(rpc.METHOD, None, given) == [{"rank": 0}]
        client.answer = None
        client.called.clear()
        asked = asyncio.ensure_future(client.collective_rpc(rpc.METHOD, None, given))
        await client.called.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.sleep(0)
        assert client.cancelled

    asyncio.run(run())
