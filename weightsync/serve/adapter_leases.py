"""The versions of adapters that the requests of a replica use; pure bookkeeping of its core."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weightsync.errors import shorten
from weightsync.serve.messages import AdapterVersion
from weightsync.serve.requests import RequestError

DEFAULT_KEPT = 2


class AdapterLeases:
    """Which versions of adapters requests may use, and which no request uses any more.

    A version is in use once every worker holds it. A request keeps the version with which it was
    accepted: workers drop none before `unneeded` names it. `kept` is how many of the newest
    versions of each adapter stay for requests to come. `base` is the base model's name, for errors.
    """

    def __init__(self, workers: int = 1, *, kept: int = DEFAULT_KEPT, base: str = "") -> None:
        self._kept = kept
        self._base = base
        self._of_workers: list[Sequence[AdapterVersion]] = [()] * workers
        self._forgotten: set[str] = set()
        self._held: dict[str, AdapterVersion] = {}

    @property
    def served(self) -> list[AdapterVersion]:
        """The versions that a request may name, the newest of each adapter last."""
        return [held for held in self._held.values() if not held.retired]

    def note(self, worker: int, held: Sequence[AdapterVersion]) -> None:
        """Note what a worker holds, in the order of its commits."""
        if held == self._of_workers[worker]:
            return
        self._of_workers[worker] = held
        first, *others = [{one.key: one for one in each} for each in self._of_workers]
        # A state that was sent before `forget` arrived still has what is forgotten.
        self._forgotten &= set(first).union(*others)
        self._held = {
            key: one
            for key, one in first.items()
            if key not in self._forgotten and all(key in other for other in others)
        }

    def find(self, name: str, version: int | None) -> AdapterVersion:
        """Return the version that a request uses. Raises RequestError where there is none."""
        of_name = [one for one in self.served if one.name == name]
        found = [one for one in of_name if version in (None, one.version)]
        if found:
            return found[-1]
        wanted = name if version is None else f"{name}@{version}"
        known = [f"{one.name}@{one.version}" for one in of_name]
        raise RequestError(
            f"model {wanted!r} is not served here; use {shorten([self._base, *known])}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def unneeded(self, used: Collection[str]) -> list[str]:
        """Return the keys of versions that workers drop now, and forget them.

        `used` are the keys that requests use.
        """
        newest: dict[str, list[str]] = {}
        for one in self.served:
            newest.setdefault(one.name, []).append(one.key)
        stay = {key for keys in newest.values() for key in keys[-self._kept :]}.union(used)
        gone = [key for key in self._held if key not in stay]
        for key in gone:
            del self._held[key]
        self._forgotten.update(gone)
        return gone
