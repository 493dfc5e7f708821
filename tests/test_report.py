"""The report of an update, as numbers, as plain data and as a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from weightsync.report import COMPARED, DeltaReport, ReceiverReport, SyncReport

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
    assert set(plain) == {field.name for field in fields(SyncReport)} | {"gbps", "peer"}
    again = json.loads(json.dumps(plain))
    assert again["receivers"][0]["target"] == "http://a"
    assert again["skipped_paths"] == {"cuda_ipc": "no GPU"}


def test_reads_as_one_line() -> None:
    plain = replace(report(), skipped_paths={})
    assert str(plain) == (
        "version 7 in 500.0 ms: 2000.0 MB in 3 tensors by shared_memory (unpacked, staged, "
        "verified: held), 4.00 GB/s, stall 2.00 ms"
    )


def test_the_line_of_a_large_update_has_160_characters_at_most() -> None:
    large = replace(
        report(nbytes=2 * 10**12, seconds={"transfer": 99.0, "total": 100.0}),
        version=1_000_000,
        tensors=37_000,
        path="shared_memory+cuda_ipc",
        apply="in_place",
        verified="arrived",
        stall_s=100.0,
        skipped_paths={},
    )
    assert len(str(large)) <= 160


def test_says_who_was_dropped_and_that_it_rolled_forward() -> None:
    assert "rolled forward" not in str(report())
    text = str(replace(report(), rule="roll-forward", dropped={"http://b": "no answer"}))
    assert "; rolled forward; dropped http://b: no answer; skipped cuda_ipc: " in text


def test_what_was_compared_is_said_in_the_same_words_everywhere() -> None:
    page = (Path(__file__).parent.parent / "docs" / "concepts.md").read_text()
    for text in (page.replace("`", "").replace("*", ""), SyncReport.__doc__ or ""):
        words = " ".join(text.replace("`", "").split())
        for level, sentence in COMPARED.items():
            assert f"{level}: {sentence}" in words
    assert report().compared == COMPARED["held"]
    assert replace(report(), verified="arrived").compared == COMPARED["arrived"]
    assert replace(report(), verified="none").compared == COMPARED["none"]
    whole = replace(report(), delta=DeltaReport(reason="the first one"))
    assert whole.compared == COMPARED["held"]


def test_a_delta_says_which_part_was_compared() -> None:
    delta = DeltaReport(sent=True, lines=310, share=0.031, sampled=0.0158, nbytes=100_000)
    sent = replace(report(), delta=delta, skipped_paths={})
    assert str(sent).endswith(
        "; a delta of 0.1 MB, verified in 3.10% of the lines and a sample of 1.58%"
    )
    assert sent.compared == (
        f"{COMPARED['held']}; that are 3.10% of the lines, which changed, and a sample of 1.58% of "
        "all lines was read besides"
    )


def test_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        report().version = 8  # type: ignore[misc]  # that it is refused is what is tested
