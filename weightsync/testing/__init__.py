"""A test kit for training loops: lost messages and dying receivers, all in one process."""

from __future__ import annotations

from weightsync.testing.faults import ACTS, Act, Event, Fault, Faults
from weightsync.testing.faulty_transport import FaultyTransport
from weightsync.testing.fleet import FleetMember, InProcessFleet, TinyModel

__all__ = [
    "ACTS",
    "Act",
    "Event",
    "Fault",
    "Faults",
    "FaultyTransport",
    "FleetMember",
    "InProcessFleet",
    "TinyModel",
]
