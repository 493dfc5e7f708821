"""The rows of clusters on paper: one is planned, and adds up."""

from __future__ import annotations

import pytest

from benchmarks import clusters


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "LAYOUTS", (("fsdp=16", "tp=16,dp=2"),))
    (row,) = clusters.rows("llama3-70b")
    found = dict(zip(clusters.HEAD[4:], row[4:], strict=True))
    # Two chains, of the hosts with the first half of each tensor and those with the second.
    assert found["chains"] == "2"
    sent, received = (
        float(found[name]) for name in ("GB from a trainer host", "GB to a receiving host")
    )
    assert sent == pytest.approx(141.1 / 2, rel=0.01)
    assert received == pytest.approx(141.1 / 2, rel=0.01)
    assert found["of the mean"] == "1.00"
    assert float(found["s at 25"]) == pytest.approx(141.1 / 2 / 3.125, rel=0.01)
    assert float(found["one uplink, s at 400"]) == pytest.approx(141.1 / 50, rel=0.05)
