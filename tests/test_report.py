"""The report of an update, as numbers, as plain data and as a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from weightsync.report import ReceiverReport, SyncReport

RECEIVER = ReceiverReport(
    target="http://a", path="shared_memory", apply="staged", verified="held", stall_s=0.002
)


def report(nbytes: int = 2_000_000_000, seconds: Mapping[str, float] | None = None) -> SyncReport:
    return SyncReport(
        version=7,
        label=None,
        update_id="u",
        tensors=3,
        nbytes=nbytes,
        packed=False,
        path="shared_memory",
        apply="staged",
        verified="held",
        stall_s=0.002,
        seconds=seconds or {"transfer": 0.3, "total": 0.5},
        control_nbytes=900,
        control_messages=2,
        peak_extra_nbytes=0,
        receivers=(RECEIVER,),
        skipped_paths={"cuda_ipc": "no GPU"},
    )


def test_speed_is_bytes_over_the_whole_update() -> None:
    assert report().gbps == pytest.approx(4.0)
    assert report(nbytes=0).gbps == 0.0
    assert report(seconds={"total": 0.0}).gbps == 0.0


def test_plain_data_has_every_field_and_fits_json() -> None:
    plain = report().to_dict()
    assert set(plain) == {field.name for field in fields(SyncReport)} | {"gbps"}
    again = json.loads(json.dumps(plain))
    assert again["receivers"][0]["target"] == "http://a"
    assert again["skipped_paths"] == {"cuda_ipc": "no GPU"}


def test_reads_as_one_line() -> None:
    text = str(report())
    assert "\n" not in text
    for part in ("version 7", "2000.0 MB in 3 tensors", "unpacked, staged", "verified: held"):
        assert part in text
    assert "4.00 GB/s, stall 2.00 ms; transfer 300.0 ms, total 500.0 ms" in text


def test_says_who_was_dropped_and_that_it_rolled_forward() -> None:
    assert "rolled forward" not in str(report())
    text = str(replace(report(), rule="roll-forward", dropped={"http://b": "no answer"}))
    assert "; rolled forward; dropped http://b: no answer; skipped cuda_ipc: " in text


def test_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        report().version = 8  # type: ignore[misc]  # that it is refused is what is tested


def test_the_former_names_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="`path`"):
        assert report().road == "shared_memory"
    with pytest.warns(DeprecationWarning, match="`skipped_paths`"):
        assert report().skipped_roads == {"cuda_ipc": "no GPU"}
    with pytest.warns(DeprecationWarning, match="`path`"):
        assert RECEIVER.road == "shared_memory"
