"""Ray actors as engines, for `wait_for_completion_or_failure`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.errors import ConfigError, MissingExtraError, ProcessLostError, install_hint

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        f"engines on Ray need the package {exc.name}; {install_hint('ray')}"
    ) from exc


class RayEngines:
    """Ray actors by name, each with the reference of the one call that it runs until its end."""

    def __init__(self, actors: Mapping[str, Any], run_refs: Mapping[str, Any]) -> None:
        """Take ownership: `close` kills the actors. Raises ConfigError if the names differ."""
        if actors.keys() != run_refs.keys() or not actors:
            raise ConfigError(
                f"the actors are named {sorted(actors)} and their calls {sorted(run_refs)}; each "
                "actor has one call, and there is at least one actor"
            )
        self._actors = dict(actors)
        self._names = {ref: name for name, ref in run_refs.items()}

    def poll(self) -> bool:
        """Return whether all calls have returned. Raises ProcessLostError if one failed."""
        refs = list(self._names)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in done:
            self._check(ref)
        return len(done) == len(refs)

    def close(self) -> None:
        """Kill the actors, which are not restarted. Idempotent."""
        if not ray.is_initialized():
            return
        while self._actors:
            _, actor = self._actors.popitem()
            ray.kill(actor)

    def _check(self, ref: Any) -> None:
        name = self._names[ref]
        try:
            ray.get(ref)
        except RayTaskError as exc:
            cause = exc.cause if isinstance(exc.cause, Exception) else exc
            raise ProcessLostError(
                f"the Ray actor {name} failed: {type(cause).__name__}: {cause}", process=name
            ) from exc
        except RayError as exc:
            raise ProcessLostError(
                f"the Ray actor {name} died: {type(exc).__name__}: {exc}", process=name
            ) from exc
