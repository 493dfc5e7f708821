"""A test kit: lost messages and dying receivers in one process, and the contract of backends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightsync.testing.faults import ACTS, Act, Event, Fault, Faults
from weightsync.testing.faulty_transport import FaultyTransport
from weightsync.testing.fleet import FleetMember, InProcessFleet, TinyModel

if TYPE_CHECKING:  # else by __getattr__: it needs pytest, and the rest does not
    from weightsync.testing.backend_contract import BackendContract

__all__ = [
    "ACTS",
    "Act",
    "BackendContract",
    "Event",
    "Fault",
    "Faults",
    "FaultyTransport",
    "FleetMember",
    "InProcessFleet",
    "TinyModel",
]

_CONTRACT = "weightsync.testing.backend_contract"
_PROCESSES = "weightsync.testing.contract_processes"


def __getattr__(name: str) -> Any:
    if name != "BackendContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        pytest = importlib.import_module("pytest")
        pytest.register_assert_rewrite(_CONTRACT, _PROCESSES)  # so that a failure shows the values
        return importlib.import_module(_CONTRACT).BackendContract
    except ImportError as exc:
        raise AttributeError(f"{__name__}.{name} needs pytest ({exc})") from exc
