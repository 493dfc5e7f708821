"""What passes settings on to `connect` takes what `connect` takes, and names what it does not."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
from torch import nn

import weightsync as ws
from weightsync import sender, set_sender
from weightsync.integrations.trl import ServedRollouts, WeightSyncCallback
from weightsync.sender import ConnectSettings, check_settings

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = inspect.signature(ws.connect).parameters
SETTINGS = [name for name, each in PARAMETERS.items() if each.kind is each.KEYWORD_ONLY]
HINTS = get_type_hints(ws.connect)
VERL = "weightsync.integrations.verl"


def test_the_settings_are_those_of_connect() -> None:
    assert get_type_hints(ConnectSettings) == {name: HINTS[name] for name in SETTINGS}


@pytest.mark.parametrize(
    ("given", "others", "said"),
    [
        ([], {}, ""),
        (SETTINGS, {}, ""),
        (["pakced"], {}, "pakced: no setting of connect(), nor of it; did you mean packed?"),
        (["evry"], {"own": ["every"]}, "evry: no setting of connect(), nor of it; did you mean "
         "every?"),
        (["packed"], {"without": {"packed": "why"}}, "it takes no packed: why"),
        (["tokn", "timeout"], {}, "tokn: no setting of connect(), nor of it; did you mean token?; "
         "timeout: no setting of connect(), nor of it; did you mean timeout_s?"),
    ],
)  # fmt: skip
def test_names_that_are_no_settings(given: list[str], others: dict[str, Any], said: str) -> None:
    if not said:
        check_settings(given, of="it", **others)
        return
    with pytest.raises(ws.ConfigError) as caught:
        check_settings(given, of="it", **others)
    assert str(caught.value) == said


def test_a_name_that_is_near_none_lists_all_that_are_taken() -> None:
    with pytest.raises(ws.ConfigError, match=r"there are own, dtype, .*, scrub$") as caught:
        check_settings(["xyzzy"], of="it", own=["own"], without={"at": "why"})
    assert "\n" not in str(caught.value)


def verl(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], object]:
    """Return the check of verl's options, with the two names of verl that its module imports."""
    engine, registry = type("CheckpointEngine", (), {}), type("CheckpointEngineRegistry", (), {})
    registry.register = staticmethod(lambda _: lambda cls: cls)  # type: ignore[attr-defined]
    package, module = ModuleType("verl"), ModuleType("verl.checkpoint_engine")
    module.CheckpointEngine = engine  # type: ignore[attr-defined]  # as verl has it
    module.CheckpointEngineRegistry = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", package)
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine", module)
    monkeypatch.setitem(sys.modules, VERL, module)  # so that it is not there after the test
    del sys.modules[VERL]
    engine_class = importlib.import_module(VERL).WeightsyncCheckpointEngine
    return lambda options: engine_class(1 << 20, **options)._options


def test_options_of_verl_are_settings_of_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    options_of: Any = verl(monkeypatch)
    sources_and_endpoints = {"dtype", "rename", "quantize", "backend", "at"}
    sources_and_endpoints |= {"token", "verify_tls", "process_group"}
    for name in SETTINGS:
        value = PARAMETERS[name].default
        if name in sources_and_endpoints:
            with pytest.raises(ws.ConfigError, match=f"takes no {name}: "):
                options_of({name: value})
        else:
            options = options_of({name: value})
            taken = getattr(options, name) if hasattr(options, name) else options.settings[name]
            assert taken == value
    with pytest.raises(ws.ConfigError, match=r"engine_kwargs\.weightsync; did you mean apply\?"):
        options_of({"aply": "staged"})
    with pytest.raises(ws.ConfigError, match=r"engine_kwargs\.weightsync: "):
        options_of({"apply": "stagd"})


def test_the_callback_gives_connect_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(sender, "connect", lambda *_, **settings: given.update(settings))
    settings: Any = {name: object() for name in SETTINGS}
    WeightSyncCallback("http://127.0.0.1:9", **settings)._connect(nn.Linear(1, 1))
    assert given == settings


def test_a_set_gives_connect_each_setting_or_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"on_failure", "process_group", "at"}

    def connected(source: object, to: object, **settings: Any) -> None:
        given.append(settings)
        raise ws.ConnectError("enough")

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(set_sender, "connect", connected)
    for name in refused:
        with pytest.raises(ws.ConfigError, match=f"a set has no {name}=: "):
            ws.connect_set([{}, {}], "http://127.0.0.1:9", **{name: None})
    settings = {name: PARAMETERS[name].default for name in SETTINGS if name not in refused}
    with pytest.raises(ws.ConnectError):
        ws.connect_set({"": {}, "draft": {}}, "http://127.0.0.1:9", **settings)
    assert settings.items() <= given[0].items()


@pytest.mark.parametrize("module", ["openrlhf/trainer.py", "skyrl/trainer.py", "rollouts.py"])
def test_what_a_wrapper_does_not_take_are_settings_with_reasons(module: str) -> None:
    """`make test-openrlhf`, `make test-skyrl` and `make test-verl` raise them."""
    tree = ast.parse((ROOT / "weightsync" / "integrations" / module).read_text(encoding="utf-8"))
    (named,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "_NOT_TAKEN"
        and node.value is not None
    )
    assert named.keys() < set(SETTINGS)
    assert all(named.values())


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: WeightSyncCallback("http://127.0.0.1:9", tokn="x"), "token"),  # type: ignore[call-arg]  # misspelt
        (lambda: WeightSyncCallback("http://127.0.0.1:9", at_strat=True), "at_start"),  # type: ignore[call-arg]  # as above
        (lambda: ws.connect_set([{}, {}], "http://127.0.0.1:9", pakced=True), "packed"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_nearest(
    call: Callable[[], object], near: str
) -> None:
    with pytest.raises(ws.ConfigError, match=rf"did you mean {near}\?$"):
        call()


def test_the_callback_s_own_settings_are_all_known() -> None:
    parameters = inspect.signature(WeightSyncCallback).parameters.values()
    own = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in own:
        with pytest.raises(ws.ConfigError, match=rf"did you mean {name}\?"):
            WeightSyncCallback("http://127.0.0.1:9", **{f"{name}_": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "other_defaults"),
    [
        (ws.send_weights, {"packed"}),  # pairs have no place in which they could be read
        (ServedRollouts.__init__, {"timeout_s"}),  # of generation
    ],
)
def test_what_has_a_few_settings_has_those_of_connect(
    made: Callable[..., object], other_defaults: set[str]
) -> None:
    parameters, hints = inspect.signature(made).parameters, get_type_hints(made)
    shared = [name for name in parameters if name in SETTINGS]
    assert len(shared) >= 3
    for name in shared:
        assert set(_kinds(hints[name])) <= set(_kinds(HINTS[name])), name
        if name not in other_defaults:
            assert parameters[name].default == PARAMETERS[name].default, name


def _kinds(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", None) or (hint,)


def passing(tree: ast.AST) -> Iterator[str]:
    """Yield the functions that are called with `**settings` and are `connect`, or check them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            is_passed = any(keyword.arg is None for keyword in node.keywords)
            if name == "check_settings" or (name == "connect" and is_passed):
                yield name


def test_what_passes_settings_on_checks_their_names() -> None:
    found = 0
    for path in (ROOT / "weightsync").rglob("*.py"):
        if "testing" in path.parts:  # calls of ours
            continue
        names = set(passing(ast.parse(path.read_text(encoding="utf-8"))))
        assert "connect" not in names or "check_settings" in names, path
        found += "connect" in names
    assert found >= 4  # connect_set, TRL, verl, vLLM's trainer API
