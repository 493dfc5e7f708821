"""A profile of updates: its phases add up, and what it watches is still there."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import profile_update, profile_watch
from benchmarks.profile_watch import INSIDE, RECEIVER, REST, SENDER, Span, phases

HERE = [
    Span("begin", 1, 2),
    Span("leave", 3, 3.5),
    Span("own", 4, 9),
    Span("own wait", 5, 6),
    Span("transfer", 0.5, 12),
    Span("finish", 13, 18),
]
THERE = [
    Span("copy", 6, 7),
    Span("copy", 7, 8.5),
    Span("table", 8.5, 9),
    Span("run", 5, 9.5),
    Span("prepare", 9.5, 10),
    Span("dispatch", 4, 11),
    Span("commit", 15, 16),
    Span("dispatch", 14, 17),
]


def test_phases_add_up_to_the_update() -> None:
    found = phases(Span("send", 0, 20), HERE, THERE)
    beside = {name: s for name, s in found.items() if name.startswith("beside")}
    assert list(beside.values()) == [4, 1]
    assert sum(found.values()) - sum(beside.values()) == 20
    assert found["start message on its way"] == 1
    assert found[INSIDE["copy"]] == 2.5
    assert [s for name, s in found.items() if name.startswith(REST)] == [1.5, 1, 2]


def test_a_phase_that_no_path_has_is_no_line() -> None:
    found = phases(Span("send", 0, 20), HERE, THERE)
    said = profile_update.report({"one": found})
    assert "| copy | 2500000 (12.5%) |" in said
    assert INSIDE["fingerprint"] not in said
    assert said.endswith("| sum, without what is beside | 20000000 |")


@pytest.mark.parametrize("places", [SENDER, RECEIVER])
def test_what_is_watched_exists(places: dict[str, dict[str, str]]) -> None:
    for place, methods in places.items():
        module, _, owner = place.partition(":")
        kind = getattr(importlib.import_module(module), owner)
        missing = {name for method, name in methods.items() if not hasattr(kind, method)}
        assert missing <= profile_watch.OPTIONAL, place
