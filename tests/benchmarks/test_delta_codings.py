"""The benchmark of delta codings, at a size of a few seconds: each coding is lossless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zstandard", reason="the extra `delta`")

from benchmarks.delta_codings import (
    FIRST_LAYER,
    Changes,
    Coding,
    codings,
    main,
    measure,
    one_tensor,
    random_bits,
    random_changes,
)
from benchmarks.peer_codings import PEERS, Bits, Flat, Pair, PeerCoding
from benchmarks.rivals.registry import RIVALS
from benchmarks.shapes import smollm2

ALL = codings()
DENSE_AND_SPARSE = (0.5, 0.01, 0.0003)


def changes_of_every_size() -> Changes:
    """Changes by every difference of bit patterns, at gaps of up to 2^17."""
    random = np.random.default_rng(2)
    gaps = np.concatenate([random.integers(1, 600, 3000), [254, 255, 256, 510, 65_536, 1 << 17]])
    positions = np.cumsum(gaps).astype(np.uint64)
    old = random_bits(int(positions[-1]) + 100)
    now = old[positions] + every_step(len(positions))
    return Changes.between("all", positions, one_tensor(old), now)


def every_step(count: int) -> Bits:
    steps = np.random.default_rng(3).integers(1, 1 << 16, count).astype(np.uint16)
    steps[: count // 2] = 1
    steps[-4:] = 1 << 15, (1 << 15) - 1, (1 << 16) - 1, 255
    return steps


@pytest.mark.parametrize("coding", ALL, ids=lambda coding: coding.name)
def test_a_coding_decodes_to_what_was_coded(coding: Coding) -> None:
    sets = [random_changes(1 << 16, share) for share in DENSE_AND_SPARSE]
    nothing = random_changes(64, 0.0)
    for changes in (*sets, changes_of_every_size(), nothing):
        positions, now = coding.decode(coding.encode(changes), changes.old)
        assert np.array_equal(positions, changes.positions)
        assert np.array_equal(now, changes.now)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_body_of_several_tensors_is_applied_to_them(peer: PeerCoding) -> None:
    everything = changes_of_every_size()
    some, none = random_changes(1 << 14, 0.02), random_changes(96, 0.0)
    pairs = [
        Pair(Flat(changes.old.bits, columns), changes.new)
        for changes, columns in ((some, 576), (none, 96), (everything, 1), (some, 1 << 14))
    ]
    tensors = [Flat(pair.old.bits.copy(), pair.old.columns) for pair in pairs]
    peer.apply(peer.encode(pairs), tensors)
    for pair, tensor in zip(pairs, tensors, strict=True):
        assert np.array_equal(tensor.bits, pair.new)


def test_the_comparison_has_the_codings_of_all_others() -> None:
    assert list(RIVALS["delta/http_body"].ways) == [peer.name for peer in PEERS]


def test_a_coding_that_loses_something_is_found() -> None:
    loses = Coding(
        "loses", ALL[0].encode, lambda data, old: ALL[0].decode(data, one_tensor(old.bits + 1))
    )
    with pytest.raises(ValueError, match=r"loses decodes random, 1.0% to other values"):
        measure(loses, random_changes(1 << 12, 0.01), 0.0)


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.npz"
    arrays: dict[str, Any] = {}
    for step in (1, 2):
        changes = random_changes(576, 0.1)  # of each tensor; the smallest has 576 values
        for tensor in smollm2():
            if not tensor.name.startswith(FIRST_LAYER):
                continue
            key = f"1e-06/{step}/{tensor.name.replace(FIRST_LAYER, 'model.layers.15.')}"
            arrays[f"{key}/gaps"] = np.diff(changes.positions, prepend=np.uint64(0)).astype("u4")
            arrays[f"{key}/before"], arrays[f"{key}/now"] = changes.before, changes.now
    np.savez(path, **arrays)
    toy = ["--recorded", str(path), "--values", "4096", "--seconds", "0"]

    main([*toy, "--json"])
    measured = json.loads(capsys.readouterr().out)
    assert {one["coding"] for one in measured} == {coding.name for coding in ALL}
    assert all(one["nbytes_per_value"] > 0 for one in measured)

    main(toy)
    printed = capsys.readouterr().out
    assert "| 1e-06, step 1 | 1e-06, step 2 | all recorded | random, 1.0% |" in printed
