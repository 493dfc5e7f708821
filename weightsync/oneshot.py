"""One call a step, for loops that do not want to hold a sender."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.errors import ConfigError, SenderReplacedError
from weightsync.report import SyncReport
from weightsync.sending.targets import Targets
from weightsync.specs import Manifest
from weightsync.tensors import spec_of
from weightsync.trainer import DEFAULT_TIMEOUT_S, WeightSender, connect
from weightsync.weights.source import NamedTensors, find_ties

Settings = tuple[object, ...]


class _LatestTensors:
    """A WeightSource of whatever the last call was given; holds it no longer than the call."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.pairs: list[tuple[str, torch.Tensor]] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.pairs

    def stable_tensors(self) -> list[torch.Tensor] | None:
        return None

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        return [name for name, _ in self.pairs], [tensor for _, tensor in self.pairs]


@dataclass(slots=True)
class _Kept:
    """The connection of one target: what it was made for, and its sender."""

    settings: Settings
    sender: WeightSender
    latest: _LatestTensors | None


_lock = threading.RLock()
_kept: dict[Hashable, _Kept] = {}


def send_weights(  # noqa: PLR0913  # the settings of a connection, all keyword-only
    named_tensors: NamedTensors | Mapping[str, torch.Tensor] | nn.Module,
    to: Targets,
    *,
    packed: bool = True,
    version: int | None = None,
    label: str | None = None,
    rewind: bool = False,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    token: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    takeover: bool = False,
) -> SyncReport:
    """Send a module, a mapping or `(name, tensor)` pairs to `to`, as one whole update.

    The connection is made by the first call and kept per target; other names, shapes or settings
    make a new one; `close()` ends it. Between two calls it yields to other senders: processes may
    call this in turn for one receiver. `takeover` takes it from a sender that does not. A generator
    is drained before anything moves: pass a module,
    or use `connect` with a callable, where all tensors at once are too much. Raises what
    `connect` and `WeightSender.send_weights` raise.
    """
    with _lock:
        settings: Settings = (packed, dtype, verify, token, timeout_s)
        key = _key(to)
        if isinstance(named_tensors, nn.Module):
            source: object = named_tensors
            settings += (id(named_tensors),)
            pairs = None
        else:
            is_mapping = isinstance(named_tensors, Mapping)
            pairs = list(named_tensors.items() if is_mapping else named_tensors)  # type: ignore[union-attr]  # the isinstance above
            aliases = find_ties(pairs)
            pairs = [(name, tensor) for name, tensor in pairs if name not in aliases]
            specs = tuple(spec_of(name, tensor, dtype) for name, tensor in pairs)
            manifest = Manifest(specs, aliases)
            source = _LatestTensors(manifest)
            settings += (manifest.digest,)
        kept = _kept.get(key)
        if kept is None or kept.settings != settings:
            kept = _reconnect(key, settings, source, to, takeover=takeover)
        if kept.latest is not None and pairs is not None:
            kept.latest.pairs = pairs
        try:
            return kept.sender.send_weights(version, label=label, rewind=rewind)
        except SenderReplacedError:
            _kept.pop(key).sender.close()  # the next call connects anew
            raise
        finally:
            if kept.latest is not None:
                kept.latest.pairs = []


def close() -> None:
    """End every connection that `send_weights` keeps; adopted parameters are moved back.

    All of them are closed, also where one raises.
    """
    with _lock, ExitStack() as closing:
        for kept in _kept.values():
            closing.callback(kept.sender.close)
        _kept.clear()


def _reconnect(
    key: Hashable, settings: Settings, source: object, to: Targets, *, takeover: bool
) -> _Kept:
    old = _kept.pop(key, None)
    if old is not None:
        old.sender.close()
    packed, dtype, verify, token, timeout_s, *_ = settings
    latest = source if isinstance(source, _LatestTensors) else None
    sender = connect(
        source,
        to,
        dtype=None if latest else dtype,  # type: ignore[arg-type]  # unpacked from the tuple above
        packed=bool(packed),
        verify=bool(verify),
        token=token,  # type: ignore[arg-type]
        timeout_s=timeout_s,  # type: ignore[arg-type]
        takeover=takeover,
        yields=True,
    )
    kept = _kept[key] = _Kept(settings, sender, latest)
    return kept


def _key(to: Targets) -> Hashable:
    if isinstance(to, str) or callable(to):
        return to
    targets = tuple(to) if isinstance(to, Iterable) and not hasattr(to, "call") else (to,)
    if not targets:
        raise ConfigError("to= names no receiver")
    return targets


atexit.register(close)
