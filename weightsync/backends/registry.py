"""Backends by name: those of weightsync, of installed packages, and of the program itself."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import torch

from weightsync.backends.base import Backend, TransferOptions, check_contract, expect, naming
from weightsync.errors import BackendUnavailableError, ConfigError

logger = logging.getLogger(__name__)

GROUP = "weightsync.backends"
"""The entry point group in which a package lists its backends: `name = "package.module:Class"`."""

_NAME = r"[A-Za-z_][\w.-]{0,63}"
"""As in messages: weightsync.wire.offers.BackendName."""
_NAME_RULE = "a name begins with a letter or _, and has letters, digits, and _.-"

_HINTS = {
    **dict.fromkeys(
        ("cuda_ipc", "shared_memory"), "it is a path of backend='ipc', which chooses it"
    ),
    "nccl": (
        "NCCL needs one group of all processes, which a process that dies or joins breaks, and it "
        "refuses a trainer and a server on one GPU: use 'auto', or 'nixl' for RDMA between hosts"
    ),
    "gloo": "use 'auto', or 'tcp' for sockets between hosts",
}
"""Advice by names that users know from reports and from other systems."""

BackendChoice = str | Backend | Sequence[str | Backend]

_lock = threading.Lock()
_registered: dict[str, Backend] = {}
_ENDPOINTS_S = 10.0
_Known = tuple[dict[str, Any], dict[str, str]]
_endpoints: dict[tuple[torch.device, tuple[str, ...]], tuple[float, _Known]] = {}


def register_backend(backend: Backend | type[Backend]) -> None:
    """Make a backend known in this process, on either side, under its `name`.

    Raises ConfigError for an object that is no Backend, methods that it lacks or that take other
    parameters, and a name that is taken.
    """
    made = _checked(backend, "register_backend()")
    with _lock:
        if made.name in _registered or made.name in _entry_points():
            raise ConfigError(f"backend {made.name!r} is registered already; choose another name")
        _registered[made.name] = made


def backend_names() -> list[str]:
    """Every backend that `get_backend` knows, importable or not."""
    return sorted({*_entry_points(), *_registered})


def get_backend(name: str) -> Backend:
    """Return the backend of that name, imported when first asked for.

    Raises ConfigError for an unknown name and for an object that is no backend,
    BackendUnavailableError where its import fails.
    """
    known = _registered.get(name)
    if known is not None:
        return known
    entry = _entry_points().get(name)
    if entry is None:
        names = ", ".join(["auto", *backend_names()])
        hint = _HINTS.get(name, f"known: {names}")
        raise ConfigError(f"there is no backend {name!r}; {hint}")
    try:
        made = _checked(entry.load(), f"the entry point {entry.value}")
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:  # foreign code, and a native library can fail anyhow
        raise BackendUnavailableError(f"backend {name!r} cannot be imported: {exc}") from exc
    if made.name != name:
        raise ConfigError(f"the entry point {entry.value} is called {name!r}, its name {made.name}")
    with _lock:
        return _registered.setdefault(name, made)


def choose_backends(choice: BackendChoice) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends that a sender may use, and why the others of `auto` cannot be.

    Raises ConfigError for a name or an object that is none, BackendUnavailableError for one that
    was named and cannot be imported.
    """
    if isinstance(choice, str) and choice == "auto":
        return _usable()
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        if not choice:
            raise ConfigError("backend is an empty list; leave it out, or name one")
        return [_one(entry) for entry in choice], {}
    return [_one(choice)], {}


def adjusted(backend: Backend, options: TransferOptions) -> TransferOptions:
    """Return a backend's options. Raises its ConfigError, and one that names what it returned."""
    with naming(f"backend {backend.name!r}: adjust()", ConfigError):
        made: TransferOptions = expect(
            backend.adjust(options), TransferOptions, f"backend {backend.name!r}: adjust() returned"
        )
    return made


def endpoints(
    backends: Iterable[Backend], device: torch.device
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what each backend says of this process, and why others cannot be used here.

    A backend whose endpoint() fails, or returns what cannot be sent, is one of the others: the
    paths of every other backend work on.
    """
    facts: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for backend in backends:
        try:
            facts[backend.name] = msgspec.to_builtins(backend.endpoint(device))
        except BackendUnavailableError as exc:
            reasons[backend.name] = str(exc)
        except Exception as exc:  # noqa: BLE001  # foreign code
            reasons[backend.name] = f"endpoint() failed: {type(exc).__name__}: {exc}"
            logger.warning("backend %s: %s", backend.name, reasons[backend.name])
    return facts, reasons


def known_endpoints(device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the same for all backends that are known here, as of the last seconds.

    A status is asked for often; what a backend lacked when a receiver started may come later.
    """
    key = device, tuple(backend_names())
    made, known = _endpoints.get(key, (0.0, ({}, {})))
    now = time.monotonic()
    if not made or now - made > _ENDPOINTS_S:
        usable, broken = _usable()
        facts, reasons = endpoints(usable, device)
        known = facts, {**broken, **reasons}
        _endpoints[key] = now, known
    return known


def _one(choice: object) -> Backend:
    return get_backend(choice) if isinstance(choice, str) else _checked(choice, "backend=")


def _usable() -> tuple[list[Backend], dict[str, str]]:
    usable: list[Backend] = []
    reasons: dict[str, str] = {}
    for name in backend_names():
        if not re.fullmatch(_NAME, name):  # no message can carry it, not even as a reason
            logger.warning("backend %r is left out: %s", name, _NAME_RULE)
            continue
        try:
            usable.append(get_backend(name))
        except (BackendUnavailableError, ConfigError) as exc:
            reasons[name] = str(exc)
    return usable, reasons


def _checked(backend: Any, where: str) -> Backend:
    """Return an instance. Raises ConfigError naming what the contract asks for and is not there."""
    made = backend
    if isinstance(backend, type) and issubclass(backend, Backend):
        check_contract(backend, Backend)
        with naming(f"{backend.__name__}()", BackendUnavailableError):
            made = backend()
    if not isinstance(made, Backend):
        seen = made.__name__ if inspect.isclass(made) else f"a {type(made).__name__}"
        raise ConfigError(f"{where}: {seen} is no weightsync.Backend, and no name of one")
    check_contract(type(made), Backend)
    check_name(getattr(made, "name", None), f"the name of the backend {type(made).__name__}")
    expect(made.requires, Mapping, f"backend {made.name!r}: requires is")
    expect(made.max_readers, int | None, f"backend {made.name!r}: max_readers is")
    return made


def check_name(name: object, what: str) -> None:
    """Raise ConfigError for a name of a backend or a path that no message can carry."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise ConfigError(f"{what} is {name!r}; {_NAME_RULE}")


@cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points by name, those of weightsync among them.

    Raises BackendUnavailableError where weightsync itself is not installed.
    """
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if "ipc" not in found:
        raise BackendUnavailableError(
            "weightsync is imported from a folder and not installed, and its backends are entry "
            "points of an installation; install it with pip"
        )
    return found
