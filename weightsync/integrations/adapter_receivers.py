"""The receivers of one server's adapters, each made when its name is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from weightsync.errors import ConfigError
from weightsync.integrations.adapter_paths import check_name
from weightsync.receiver import WeightReceiver

MAX_ADAPTERS = 64


class AdapterReceivers:
    """At most MAX_ADAPTERS receivers by the names of adapters. Every method is thread-safe.

    `make` makes the receiver of a name. `taken` are names that no adapter may have. A receiver that
    holds nothing, and that no sender uses, gives its place to another one: what was refused to a
    sender, and what was only asked about, does not stay. The one that was asked for longest ago
    goes first, since one that has just been returned is about to be used.
    """

    def __init__(
        self, make: Callable[[str], WeightReceiver], *, taken: Collection[str] = ()
    ) -> None:
        self._make = make
        self._taken = frozenset(taken)
        self._lock = threading.Lock()
        self._receivers: dict[str, WeightReceiver] = {}

    @property
    def names(self) -> list[str]:
        """The names that have a receiver."""
        with self._lock:
            return list(self._receivers)

    def get(self, name: str) -> WeightReceiver:
        """Return the receiver of an adapter; the first call makes it.

        Raises ConfigError for a name that is taken or is none, and where MAX_ADAPTERS are in use.
        """
        check_name(name)
        if name in self._taken:
            raise ConfigError(f"{name!r} is the name of the base model of this server")
        with self._lock:
            known = self._receivers.pop(name, None)
            if known is not None:
                self._receivers[name] = known
                return known
        made = self._make(name)
        with self._lock:
            found = self._receivers.setdefault(name, made)
            full = len(self._receivers) > MAX_ADAPTERS
            empty = [n for n, r in self._receivers.items() if n != name and _is_unused(r)]
            dropped = [self._receivers.pop(n) for n in empty[:1]] if full else []
            if full and not dropped:
                del self._receivers[name]
        if found is not made:
            dropped.append(made)
        for receiver in dropped:
            receiver.close()
        if full and not dropped:
            made.close()
            raise ConfigError(
                f"this server holds {MAX_ADAPTERS} adapters, which is the most; unload one"
            )
        return found

    def has(self, name: str, receiver: WeightReceiver) -> bool:
        """Whether an adapter has this very receiver."""
        with self._lock:
            return self._receivers.get(name) is receiver

    def remove(self, name: str) -> None:
        """Close the receiver of an adapter, if there is one, and forget it."""
        with self._lock:
            receiver = self._receivers.get(name)
        if receiver is None:
            return
        receiver.close()
        with self._lock:
            if self._receivers.get(name) is receiver:
                del self._receivers[name]

    def close(self, *, for_good: bool = True) -> None:
        """Close all receivers; see WeightReceiver.close."""
        with self._lock:
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.close(for_good=for_good)


def _is_unused(receiver: WeightReceiver) -> bool:
    status = receiver.status()  # its version says nothing: 0 may be one that was sent
    return not (status.last_finished or receiver.open_update or status.senders)
