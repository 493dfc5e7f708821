"""OpenRLHF's actor with a vLLM engine, as a receiver.

Imported in the engines' processes, which shall not import DeepSpeed.
"""

from __future__ import annotations

from typing import Any, NoReturn

from openrlhf.trainer.ray import vllm_engine

from weightsync.errors import ConfigError
from weightsync.integrations.openrlhf import plain_class
from weightsync.integrations.vllm.plugin import BACKEND

_Actor: Any = plain_class(vllm_engine.RolloutRayActor)


class WeightsyncRolloutActor(_Actor):  # type: ignore[misc]  # OpenRLHF has no types
    """A RolloutRayActor whose engine takes weights from weightsync's senders.

    It passes on to vLLM what `vllm_targets` calls of an engine. OpenRLHF's own calls of an update
    are refused: a trainer that makes them was not replaced.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, *args: Any, **kwargs: Any
    ) -> None:
        await super().__init__(*args, **{**kwargs, "weight_transfer_config": {"backend": BACKEND}})

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  # vLLM's
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of all workers; see vLLM's AsyncLLM."""
        results: list[Any] = await self.llm.collective_rpc(method, timeout, args, kwargs)
        return results

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return bool(await self.llm.is_paused())

    async def pause_generation(self, mode: str = "keep") -> None:
        """Pause generation; by default as OpenRLHF does."""
        await self.llm.pause_generation(mode=mode)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Reset the prefix cache; return whether it was reset."""
        return bool(await self.llm.reset_prefix_cache(reset_running_requests))

    async def update_weight_version(self, version: str) -> None:
        """Set the version of the weights that vLLM reports."""
        await self.llm.update_weight_version(version)

    async def init_process_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("init_process_group")

    async def update_weight(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("update_weight")

    async def update_weight_cuda_ipc(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("update_weight_cuda_ipc")


def _refuse(call: str) -> NoReturn:
    raise ConfigError(
        f"{call}: this engine takes weights by weightsync, and its trainer is OpenRLHF's own; call "
        "weightsync.integrations.openrlhf.install() in the program that makes both"
    )
