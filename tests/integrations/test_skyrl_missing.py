"""`weightsync.integrations.skyrl` where SkyRL is missing, or is one of another shape."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from weightsync.errors import BackendUnavailableError, MissingExtraError

NAME = "weightsync.integrations.skyrl"
SYNC = "skyrl.backends.skyrl_train.weight_sync"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))  # so that none is left behind
    del sys.modules[NAME]


def test_without_skyrl_the_version_that_works_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl", None)
    with pytest.raises(MissingExtraError, match=r"this needs SkyRL 0\.4 .*\(.*skyrl") as caught:
        importlib.import_module(NAME)
    assert "\n" not in str(caught.value)


def test_what_another_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SYNC
    while package:  # each parent is a package without files
        module = ModuleType(package)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, package, module)
        package = package.rpartition(".")[0]
    for name in ("weight_senders", "control_plane", "sources"):
        monkeypatch.setitem(sys.modules, f"{SYNC}.{name}", ModuleType(name))
    lacks = "lacks weight_sync._VLLM_RECEIVE_BACKENDS, weight_sync.get_transfer_strategy, weight_s"
    with pytest.raises(BackendUnavailableError, match=lacks) as caught:
        importlib.import_module(NAME)
    assert str(caught.value).endswith(": use 0.4")
    assert "\n" not in str(caught.value)
