"""Where backends come from: entry points, those of weightsync as those of any package."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import weightsync as ws
from weightsync.backends import registry


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


def test_all_of_weightsync_are_entry_points() -> None:
    listed = {entry.name for entry in importlib.metadata.entry_points(group=registry.GROUP)}
    assert {"ipc", "tcp", "nixl"} <= listed == set(registry._entry_points())


def test_a_folder_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    to: Any = ws.WeightReceiver
    with pytest.raises(ws.BackendUnavailableError, match="not installed, and its backends"):
        ws.connect(nn.Linear(2, 2), to=to(nn.Linear(2, 2)).handle)
