"""`weightsync.integrations.verl` where verl, or a verl with checkpoint engines, is missing."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from weightsync.errors import BackendUnavailableError

NAME = "weightsync.integrations.verl"
SAID = r"needs the extra server and a verl with checkpoint engines, 0\.9\.1"


@pytest.mark.parametrize("verl", [None, ModuleType("verl")], ids=["none", "too old"])
def test_the_version_that_works_is_named(
    monkeypatch: pytest.MonkeyPatch, verl: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "verl", verl)
    monkeypatch.delitem(sys.modules, "verl.checkpoint_engine", raising=False)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(BackendUnavailableError, match=SAID):
        importlib.import_module(NAME)


def test_a_missing_server_extra_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    engines = ModuleType("verl.checkpoint_engine")
    vars(engines).update(CheckpointEngine=object, CheckpointEngineRegistry=object)
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine", engines)
    monkeypatch.delitem(sys.modules, "weightsync.integrations.rollouts", raising=False)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(BackendUnavailableError, match=rf"{SAID} \(import of uvicorn"):
        importlib.import_module(NAME)
