"""Servers of other engines: which one a URL names, and which one answers there."""

from __future__ import annotations

from typing import Literal

from weightsync.integrations.sglang.server import SglangTarget, is_sglang
from weightsync.integrations.vllm.server import is_vllm, plain_url

Engine = Literal["vllm", "sglang"]


def read_target(target: str) -> tuple[str, Engine | None]:
    """Return the plain URL of what `push --to` takes, and the engine that it names, if any.

    Raises ConfigError for a scheme of an engine with something else than a URL.
    """
    if (url := plain_url(target)) is not None:
        return url, "vllm"
    if (sglang := SglangTarget.parse(target)) is not None:
        return sglang.url, "sglang"
    return target, None


def find_engine(
    url: str, token: str | None, trusted: bool | str, timeout_s: float
) -> Engine | None:
    """Ask the server at a plain URL whether it is of another engine."""
    if is_vllm(url, token, verify_tls=trusted, timeout_s=timeout_s):
        return "vllm"
    if is_sglang(url, token, verify_tls=trusted, timeout_s=timeout_s):
        return "sglang"
    return None
