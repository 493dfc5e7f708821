"""Ten thousand deltas, each on top of the last: every receiver still has the trainer's bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.e2e import processes
from tests.soak import chains
from tests.soak.sizes import SOAK

TURN = 50


@dataclass(frozen=True)
class Size:
    """`warm_up` are updates until every buffer has its size; `growth` may follow."""

    updates: int
    warm_up: int
    growth: float


QUICK = Size(updates=50, warm_up=100, growth=0.01)
WHOLE = Size(updates=10_000, warm_up=1_000, growth=0.01)


@pytest.mark.parametrize(
    ("coding", "changes", "size"),
    [
        pytest.param("values", "recorded", QUICK, id="values-recorded-quick"),
        *(
            pytest.param(*kind, WHOLE, id="-".join([*kind, "whole"]), marks=SOAK)
            for kind in [("lines", "random"), ("values", "random"), ("values", "recorded")]
        ),
    ],
)
@pytest.mark.usefixtures("shm_clean")
def test_a_chain_of_deltas_drifts_nowhere_and_grows_nowhere(
    coding: str, changes: str, size: Size
) -> None:
    with processes.host() as host:
        kind = {"by_value": coding == "values", "recorded": changes == "recorded"}
        host.run(chains.begin, kind)
        host.run(chains.send, 1)  # the whole model, on which the first delta builds
        for _ in range(size.warm_up // TURN):
            first = host.run(chains.send, TURN)
        assert first["coded"] is (coding == "values")
        held = host.run(chains.memory)
        for _ in range(size.updates // TURN):
            sent = host.run(chains.send, TURN)
            assert not sent["differing"]
            assert not sent["whole"]
            assert sent["extra_nbytes"] <= first["extra_nbytes"]
        grown = {kind: n / held[kind] - 1 for kind, n in host.run(chains.memory).items()}
        host.run(chains.end)
    print(
        f"{size.updates} deltas by {coding}, {changes}:",
        *(f"{k} {g:+.2%}" for k, g in grown.items()),
    )
    assert max(grown.values()) <= size.growth
