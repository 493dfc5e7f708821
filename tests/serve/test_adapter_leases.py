"""Versions of adapters: which requests may use, and when workers drop them."""

from __future__ import annotations

import pytest

from weightsync.serve.adapter_leases import AdapterLeases
from weightsync.serve.messages import AdapterVersion
from weightsync.serve.requests import ModelName, RequestError


def held(*keys: str, retired: bool = False) -> list[AdapterVersion]:
    """Versions by their keys, `name@version#commit`."""
    found = []
    for key in keys:
        name, _, rest = key.partition("@")
        version = int(rest.partition("#")[0])
        found.append(AdapterVersion(name=name, version=version, key=key, retired=retired))
    return found


def keys(leases: AdapterLeases) -> list[str]:
    return [one.key for one in leases.served]


def test_a_name_is_the_newest_version_and_a_number_is_that_one() -> None:
    leases = AdapterLeases()
    leases.note(0, held("policy@1#1", "judge@1#2", "policy@2#3"))
    assert leases.find("policy", None).key == "policy@2#3"
    assert leases.find("policy", 1).key == "policy@1#1"
    assert leases.find("judge", None).key == "judge@1#2"


def test_a_rewind_makes_an_older_number_the_newest() -> None:
    leases = AdapterLeases()
    leases.note(0, held("policy@7#1", "policy@3#2"))
    assert leases.find("policy", None).key == "policy@3#2"


def test_a_number_that_came_twice_is_the_later_one() -> None:
    leases = AdapterLeases()
    leases.note(0, held("policy@1#1", "policy@1#2"))
    assert leases.find("policy", 1).key == "policy@1#2"


@pytest.mark.parametrize(("name", "version"), [("judge", None), ("policy", 9), ("", None)])
def test_what_is_not_held_is_a_404_that_names_what_is(name: str, version: int | None) -> None:
    leases = AdapterLeases(base="tiny")
    leases.note(0, held("policy@1#1"))
    with pytest.raises(RequestError, match="is not served here; use tiny") as refused:
        leases.find(name, version)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_a_version_is_in_use_once_every_worker_holds_it() -> None:
    leases = AdapterLeases(2)
    leases.note(0, held("policy@1#1", "policy@2#2"))
    assert keys(leases) == []
    leases.note(1, held("policy@1#1"))
    assert keys(leases) == ["policy@1#1"]
    leases.note(1, held("policy@1#1", "policy@2#2"))
    assert keys(leases) == ["policy@1#1", "policy@2#2"]


def test_old_versions_go_when_no_request_uses_them() -> None:
    leases = AdapterLeases(kept=2)
    leases.note(0, held("policy@1#1", "policy@2#2", "policy@3#3", "judge@1#4"))
    assert leases.unneeded({"policy@1#1"}) == []
    assert leases.unneeded(set()) == ["policy@1#1"]
    assert leases.unneeded(set()) == []  # it is told once
    assert keys(leases) == ["policy@2#2", "policy@3#3", "judge@1#4"]


def test_a_state_from_before_the_drop_brings_nothing_back() -> None:
    leases = AdapterLeases(kept=1)
    both = held("policy@1#1", "policy@2#2")
    leases.note(0, both)
    assert leases.unneeded(set()) == ["policy@1#1"]
    leases.note(0, [*both, *held("judge@1#3")])
    assert keys(leases) == ["policy@2#2", "judge@1#3"]
    leases.note(0, held("policy@2#2", "judge@1#3"))
    assert keys(leases) == ["policy@2#2", "judge@1#3"]


def test_an_unloaded_one_stays_for_what_uses_it() -> None:
    leases = AdapterLeases()
    leases.note(0, held("policy@1#1"))
    leases.note(0, held("policy@1#1", retired=True))
    assert keys(leases) == []
    with pytest.raises(RequestError):
        leases.find("policy", 1)
    assert leases.unneeded({"policy@1#1"}) == []
    assert leases.unneeded(set()) == ["policy@1#1"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (None, ModelName()),
        ("tiny", ModelName()),
        ("my@model", ModelName()),
        ("policy", ModelName("policy")),
        ("policy@7", ModelName("policy", 7)),
        ("policy@x", ModelName("policy@x")),
        ("policy@\u0663", ModelName("policy@\u0663")),
        ("policy@" + "9" * 30, ModelName("policy@" + "9" * 30)),
        ("@7", ModelName("@7")),
        ("", ModelName("")),
    ],
)
def test_what_a_model_names(text: str | None, name: ModelName) -> None:
    assert ModelName.parse(text, ("tiny", "my@model")) == name


def test_what_workers_have_dropped_is_not_remembered() -> None:
    leases = AdapterLeases(kept=1)
    for i in range(50):
        leases.note(0, held(f"policy@{i}#{i}", f"policy@{i + 1}#{i + 1}"))
        leases.unneeded([])
    assert len(leases._forgotten) == 1
