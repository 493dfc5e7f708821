"""vLLM's names of the versions of an adapter: the path, the id and the name of a LoRARequest.

vLLM tells adapters apart by these three: cached blocks by name and path, tables of workers by id,
and the adapters of one step by name. So each version has its own name and path, made of what it
holds: two versions never share a block, and a version that is sent again has those that it had. Its
id is a number that the engine gives it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from weightsync.errors import ConfigError
from weightsync.integrations.adapter_paths import NAME

SCHEME = "weightsync://"

FIRST_ID, LAST_ID = 1 << 30, (1 << 31) - 1
"""The ids of versions: beyond those of files, which vLLM counts from 1, and in 32 bits, which is
what the tables of its GPU workers take."""

_PATH = re.compile(rf"weightsync://({NAME})(?:/v([0-9]{{1,19}})(?:/([0-9a-f]{{16}}))?)?")


@dataclass(frozen=True, slots=True)
class AdapterPath:
    """An adapter, a `version` of it, or with its `digest` the weights themselves.

    Without a version it is the one in use, without a digest the newest of that number.
    """

    name: str
    version: int | None = None
    digest: str = ""

    @classmethod
    def parse(cls, path: str) -> AdapterPath:
        """Return what a path names. Raises ConfigError for another path."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise ConfigError(f"{path!r:.120} is no adapter of weightsync: {SCHEME}NAME[/vVERSION]")
        name, version, digest = found.groups()
        return cls(name, None if version is None else int(version), digest or "")

    def __str__(self) -> str:
        parts = [self.name, *([] if self.version is None else [f"v{self.version}"])]
        return SCHEME + "/".join([*parts, self.digest] if self.digest else parts)

    @property
    def model(self) -> str:
        """The name of the model in requests: `policy`, or `policy@7`."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @property
    def lora_name(self) -> str:
        """The name for vLLM, which takes two requests of one name for the same weights.

        A number may come again with other weights, and a file's adapter may be named `policy@7`.
        """
        return f"{self.model}/{self.digest}" if self.digest else self.model

    def takes(self, other: AdapterPath) -> bool:
        """Whether `other` is what this path names."""
        return (
            self.name == other.name
            and self.version in (None, other.version)
            and self.digest in ("", other.digest)
        )


def path_of(model: str) -> AdapterPath | None:
    """Return what a model's name in a request names: `policy` or `policy@7`; None for others."""
    name, at, version = model.partition("@")
    text = f"{SCHEME}{name}/v{version}" if at else SCHEME + name
    return AdapterPath.parse(text) if _PATH.fullmatch(text) else None


def request_of(path: AdapterPath, number: int = LAST_ID) -> Any:
    """Return vLLM's LoRARequest for an adapter. The engine replaces one without a `number`."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415  # the senders' side has no vLLM

    return LoRARequest(lora_name=path.lora_name, lora_int_id=number, lora_path=str(path))


def adapter_request(name: str, version: int | None = None) -> Any:
    """Return a LoRARequest for `LLM.generate`: of an adapter that is sent, or a version of it.

    Without a version each request uses the one that is in use when the engine accepts it.
    """
    path = AdapterPath(name, version)
    AdapterPath.parse(str(path))
    return request_of(path)
