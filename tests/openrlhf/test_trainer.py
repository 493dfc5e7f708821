"""The trainer's half on two ranks, to a receiver beside them; and ranks that disagree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crew import Crew, crew
from tests.e2e import processes
from tests.e2e.processes import Host
from tests.openrlhf import ranks


@pytest.fixture(scope="module")
def trainers() -> Iterator[Crew]:
    """Two ranks, which import DeepSpeed for a minute where the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.crew.WAIT_S", 240.0)
        with crew(2) as two:
            yield two


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with processes.host() as made:
        yield made
        made.forget()


def test_every_rank_sends_and_has_the_report(trainers: Crew, host: Host) -> None:
    to = host.receiver("http", model="decoder")
    trainers.run(ranks.make, to.url)
    for version in (1, 2, 3):
        sent = trainers.run(ranks.broadcast)
        assert [outcome.text for outcome, _ in sent] == ["", ""]
        held = to.digests()
        assert {name: held[name] for name in sent[0][1]} == sent[0][1]
        assert to.reading() == version
    trainers.run(ranks.close)


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        ("a base in 4 bits", "ConfigError", "--ds.load_in_4bit: weights that bitsandbytes has"),
        ("another timeout", "ConfigError", "timeout_s"),
        ("another model", "ManifestMismatchError", "rank 1"),
        ("no engine", "ConfigError", "to= names no receiver"),
    ],
)
def test_ranks_that_disagree_raise_one_line_on_all(
    trainers: Crew, host: Host, other: str, kind: str, said: str
) -> None:
    to = host.receiver("http", model="decoder")
    trainers.run(ranks.make, to.url, other)
    outcomes = [outcome for outcome, _ in trainers.run(ranks.broadcast)]
    assert {outcome.kind for outcome in outcomes} == {kind}
    for outcome in outcomes:
        assert said in outcome.text
        assert "\n" not in outcome.text
    assert to.reading() == 0, "the engine is as it was"
    trainers.run(ranks.make, to.url)
    assert [outcome.text for outcome, _ in trainers.run(ranks.broadcast)] == ["", ""]
    trainers.run(ranks.close)
