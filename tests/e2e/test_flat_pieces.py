"""Models of FSDP1, whose ranks hold runs of elements; test_streams.py sends each kind, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crew import Crew, crew
from tests.e2e import ranks_at_work as work
from tests.e2e.processes import Host
from tests.e2e.test_ranks import check_sent, receivers, start


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    with crew(2) as two:
        yield {2: two}


@pytest.mark.parametrize("kind", ["flat", "flat_kept", "flat_originals", "accelerated"])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_after_a_forward_pass_alone(ranks: Crew, host: Host, kind: str) -> None:
    """What the optimizer writes next is the shard, that is sent, and it trains on."""
    to = receivers(host, 1)
    start(ranks, to, kind)
    for version in (1, 2, 3):
        sent = ranks.run(work.generate_and_send)
        check_sent(sent, to, version)
    assert ranks.run(work.train_alone, kind, 3) == [full for _, full in sent]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_copy_is_sent_while_the_trainer_steps(ranks: Crew, host: Host) -> None:
    """Each rank copies its runs alone."""
    to = receivers(host, 1)
    start(ranks, to, "flat")
    for version in (1, 2):
        sent = ranks.run(work.send_copy_and_step)
        check_sent([(outcome, full) for outcome, full, _ in sent], to, version)
        assert sum(copied for _, _, copied in sent) <= 1.2 * sent[0][0].result.nbytes


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_deltas(ranks: Crew, host: Host) -> None:
    to = receivers(host, 1)
    start(ranks, to, "flat", delta="always")
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send)
        check_sent(sent, to, version)
        assert sent[0][0].result.delta.sent is (version > 1)
