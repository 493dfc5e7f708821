"""What the ranks of a trainer tell each other, in processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.crew import NAMING_TIMEOUT_S, Crew, Died, crew
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.ranks import comm
from weightsync.ranks.comm import RankComm, SingleRank, alone, join_ranks

TIMEOUT_S = 20.0
Seen = tuple[str, str, str]
"""An error as it can travel: its class, its message, and the class of its cause."""


def seen(act: Callable[[], Any]) -> Seen:
    try:
        act()
    except Exception as exc:  # noqa: BLE001  # every error is what is asked about
        return type(exc).__name__, str(exc), type(exc.__cause__).__name__
    return "", "", ""


def joined() -> RankComm:
    return join_ranks(None, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module", params=[2, 4])
def ranks_of(request: pytest.FixtureRequest) -> Iterator[tuple[int, Crew]]:
    with crew(request.param) as made:
        yield request.param, made


def talk(rank: int) -> tuple[list[bytes], bytes, bytes, list[bytes]]:
    ranks = joined()
    ranks.agree()
    told = ranks.exchange(b"x" * rank)
    heard = ranks.broadcast(b"\0handles" if rank == 0 else None)
    nothing = ranks.broadcast(b"" if rank == 0 else None)
    again = ranks.exchange(bytes([rank]) * 100_000)
    ranks.close()
    ranks.close()
    return told, heard, nothing, [body[:1] for body in again]


def talk_of_sizes(rank: int, sizes: list[int]) -> None:
    """Short payloads travel in another way than long ones, and the ranks' differ."""
    ranks = joined()
    for nbytes in sizes:
        bodies = [bytes([other + 1]) * max(nbytes - other, 0) for other in range(ranks.size)]
        assert ranks.exchange(bodies[rank]) == bodies, nbytes
        assert ranks.exchange(bodies[-1 - rank]) == bodies[::-1], nbytes
        assert ranks.broadcast(bodies[0] if rank == 0 else None) == bodies[0], nbytes
    ranks.close()


def reply_of_sizes(rank: int, sizes: list[int]) -> None:
    """Ranks reply where they wait for rank 0, which may not listen."""
    ranks = joined()
    for nbytes in sizes:
        replies = [bytes([other + 1]) * max(nbytes - other, 0) for other in range(ranks.size)]
        for said in (b"short", b"long" * 1000):
            for listens in (True, False):
                if rank == 0 and listens:
                    assert ranks.collect(replies[0]) == replies, nbytes
                elif rank and said == b"short":
                    ranks.expect(replies[rank])
                heard = ranks.broadcast(said if rank == 0 else None, reply=replies[rank])
                assert heard == said
        ranks.agree()
    ranks.close()


def collect_from_elsewhere(rank: int) -> tuple[Seen, Seen, list[bytes], Seen]:
    """Rank 0 wants replies, and another rank fails, or is in another call."""
    ranks = joined()
    error = ConfigError("no such target") if rank == 1 else None

    def reply(act: Callable[[], Any] | None) -> Any:
        if rank == 0:
            return ranks.collect(b"")
        return act() if act is not None and rank == 1 else ranks.broadcast(reply=b"x")

    first = seen(lambda: reply(lambda: ranks.agree(error)))
    second = seen(lambda: reply(lambda: ranks.agree(error)))
    on = ranks.exchange(b"on")
    return first, second, on, seen(lambda: reply(lambda: ranks.exchange(b"x")))


def two_groups(rank: int) -> list[list[bytes]]:
    first, second = joined(), joined()
    return [first.exchange(b"1%d" % rank), second.exchange(b"2%d" % rank)]


def bring(rank: int, bringers: dict[int, Exception]) -> tuple[Seen, tuple[str, ...]]:
    ranks = joined()
    try:
        ranks.agree(bringers.get(rank))
    except ManifestMismatchError as exc:
        missing = exc.missing
    except Exception:  # noqa: BLE001  # looked at below
        missing = ()
    error = seen(lambda: ranks.agree(bringers.get(rank)))
    ranks.agree()  # the group goes on
    return error, missing


def bring_elsewhere(rank: int) -> tuple[Seen, Seen, list[bytes]]:
    """One rank fails while the others are on their way into a call that it will not make."""
    ranks = joined()
    error = ConfigError("no such target") if rank == 1 else None
    first = seen(lambda: ranks.agree(error) if error else ranks.broadcast(b"x"))
    second = seen(lambda: ranks.agree(error) if error else ranks.exchange(b"x"))
    return first, second, ranks.exchange(b"on")


def out_of_step(rank: int) -> list[Seen]:
    ranks = joined()
    first = seen(ranks.agree) if rank == 0 else seen(lambda: ranks.exchange(b""))
    return [first, seen(ranks.agree)]


class Recording:
    """A group that remembers the objects of its collectives, without holding them."""

    def __init__(self, group: Any) -> None:
        self.works: list[weakref.ref[dist.Work]] = []
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., dist.Work]:
        def call(*args: object) -> dist.Work:
            work: dist.Work = getattr(self._group, name)(*args)
            self.works.append(weakref.ref(work))
            return work

        return call


def hold_works(_: int) -> tuple[bool, bool]:
    ranks = joined()
    recording = ranks._group = Recording(ranks._group)
    ranks.exchange(b"x")
    last = recording.works[-1]
    held = last() is not None
    ranks.close()
    return held, last() is not None


def close_meanwhile(rank: int) -> str:
    """Rank 0 closes its group while another thread of it waits for the other ranks."""
    ranks = joined()
    if rank:
        time.sleep(1.5)
        return ""
    found: list[Seen] = []
    waiting = threading.Thread(target=lambda: found.append(seen(ranks.agree)))
    waiting.start()
    time.sleep(0.5)
    ranks.close()
    waiting.join(TIMEOUT_S)
    return found[0][0]


def missing_one(rank: int, absent: list[int]) -> Seen | list[bytes]:
    """The absent ranks come later, when the others have given up once and come again."""
    store = dist.distributed_c10d._get_default_store()
    present = [other for other in range(dist.get_world_size()) if other not in absent]
    if rank in absent:
        store.wait([f"given up {other}" for other in present])
        return joined().exchange(b"%d" % rank)
    store.set(f"present {rank}", "1")
    store.wait([f"present {other}" for other in present])  # none is absent by being slow
    error = seen(lambda: join_ranks(None, timeout_s=TIMEOUT_S, join_timeout_s=2.0))
    store.set(f"given up {rank}", "1")
    joined().exchange(b"")
    return error


class TestTogether:
    def test_every_payload_arrives_everywhere(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        told = [b"x" * rank for rank in range(size)]
        firsts = [bytes([rank]) for rank in range(size)]
        assert crew.run(talk) == [(told, b"\0handles", b"", firsts)] * size

    def test_payloads_of_any_size(self, ranks_of: tuple[int, Crew]) -> None:
        edge = comm._INLINE_NBYTES
        sizes = [0, 1, *range(edge - 2, edge + 4), 1024, 1025, 1 << 20]
        ranks_of[1].run(talk_of_sizes, sizes)
        ranks_of[1].run(reply_of_sizes, sizes)

    def test_a_collective_is_freed_by_no_thread_of_gloo(self, ranks_of: tuple[int, Crew]) -> None:
        """At interpreter exit that would abort the process."""
        size, crew = ranks_of
        assert crew.run(hold_works) == [(True, False)] * size

    def test_a_close_while_another_thread_waits(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        assert crew.run(close_meanwhile) == ["TransferError", *[""] * (size - 1)]

    def test_two_senders_of_one_trainer(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        wanted = [[prefix + b"%d" % rank for rank in range(size)] for prefix in (b"1", b"2")]
        assert crew.run(two_groups) == [wanted] * size

    def test_one_ranks_error_is_raised_on_all(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        error = ManifestMismatchError("layer 3 is gone", missing=["layer.3"])
        results = crew.run(bring, {1: error})
        for rank, (raised, missing) in enumerate(results):
            cause = "ManifestMismatchError" if rank == 1 else "NoneType"
            assert raised == ("ManifestMismatchError", "rank 1: layer 3 is gone", cause)
            assert missing == ("layer.3",)
        assert len(results) == size

    def test_a_foreign_error_keeps_its_name(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        last = size - 1
        raised = [error for error, _ in crew.run(bring, {last: ZeroDivisionError("by zero")})]
        assert {error[:2] for error in raised} == {
            ("RemoteError", f"rank {last}: ZeroDivisionError: by zero")
        }
        assert raised[last][2] == "ZeroDivisionError"

    def test_of_several_errors_the_first_ranks_is_raised(self, ranks_of: tuple[int, Crew]) -> None:
        _, crew = ranks_of
        results = crew.run(bring, {0: ConfigError("wrong"), 1: ValueError("other")})
        assert {error[:2] for error, _ in results} == {
            ("ConfigError", "rank 0: wrong (rank 1 too)")
        }

    def test_an_error_reaches_ranks_in_another_call(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        for first, second, later in crew.run(bring_elsewhere):
            assert first[:2] == second[:2] == ("ConfigError", "rank 1: no such target")
            assert later == [b"on"] * size

    def test_replies_from_ranks_in_another_call(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        for first, second, on, last in crew.run(collect_from_elsewhere):
            assert first[:2] == second[:2] == ("ConfigError", "rank 1: no such target")
            assert on == [b"on"] * size
            assert last[0] == "ProtocolError"
            assert "rank 1 in exchange()" in last[1]

    def test_ranks_in_different_calls_are_told(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        for first, later in crew.run(out_of_step):
            kind, message, _ = first
            assert kind == "ProtocolError"
            assert "not in step: rank 0 in agree()" in message
            assert message.count("in exchange()") == 1
            assert later[0] == "TransferError"
        assert size

    def test_a_rank_that_does_not_connect_is_named(self, ranks_of: tuple[int, Crew]) -> None:
        size, crew = ranks_of
        absent = [1, 3] if size == 4 else [1]
        named = "ranks 1 and 3 of 4" if size == 4 else "rank 1 of 2"
        results = crew.run(missing_one, absent)
        for rank, result in enumerate(results):
            if rank in absent:
                assert result == [b"%d" % rank if rank in absent else b"" for rank in range(size)]
                continue
            kind, message, _ = result
            assert kind == "TransferTimeout"
            assert message.startswith(f"{named} did not call connect() within 2 s")


def in_a_sub_group(rank: int) -> tuple[list[bytes], Seen]:
    """The odd ranks alone, whose messages name them as the whole job does."""
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    ranks = join_ranks(groups[rank % 2], timeout_s=TIMEOUT_S)
    told = ranks.exchange(b"%d" % rank)
    return told, seen(lambda: ranks.agree(ConfigError("no") if rank >= 2 else None))


def not_a_member(_: int) -> Seen:
    group = dist.new_group([0, 1])
    return seen(lambda: join_ranks(group, timeout_s=TIMEOUT_S).agree())


def of_one(rank: int) -> bool:
    groups = [dist.new_group([member]) for member in range(4)]
    return isinstance(join_ranks(groups[rank], timeout_s=TIMEOUT_S), SingleRank)


def test_sub_groups() -> None:
    with crew(4) as made:
        results = made.run(in_a_sub_group)
        assert [told for told, _ in results] == [[b"0", b"2"], [b"1", b"3"]] * 2
        assert [error[1] for _, error in results] == ["rank 2: no", "rank 3: no"] * 2
        kinds = [kind for kind, _, _ in made.run(not_a_member)]
        assert kinds == ["", "", "ConfigError", "ConfigError"]
        assert made.run(of_one) == [True] * 4


KEPT: list[RankComm] = []
"""What a rank that stays away does not close."""


def lose_one(rank: int, loser: int, how: str) -> tuple[Seen, Seen] | None:
    ranks = join_ranks(None, timeout_s=TIMEOUT_S if how == "dies" else 2.0)
    ranks.agree()
    if rank == loser and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == loser:
        KEPT.append(ranks)
        return None
    first = seen(lambda: ranks.broadcast(b"x" if rank == 0 else None))
    return first, seen(ranks.agree)


@pytest.mark.parametrize(("size", "loser"), [(2, 1), (4, 0), (4, 2)])
def test_a_rank_that_dies_is_named_by_all_others(size: int, loser: int) -> None:
    with crew(size) as made:
        results = made.run(lose_one, loser, "dies")
        assert isinstance(results.pop(loser), Died)
        for first, later in results:
            assert first[0] == later[0] == "TransferError"
            assert first[1].startswith(f"rank {loser} of {size} did not answer")
            assert "connect again" in later[1]


def test_a_rank_that_stays_away_is_named_by_all_others() -> None:
    with crew(3) as made:
        results = made.run(lose_one, 1, "stays away")
        assert results.pop(1) is None
        errors = [first for first, _ in results]
        assert "TransferTimeout" in {kind for kind, _, _ in errors}
        for kind, message, _ in errors:
            assert kind in {"TransferTimeout", "TransferError"}
            assert message.startswith("rank 1 of 3 did not answer")


class TestAlone:
    def test_the_same_interface(self) -> None:
        ranks = alone()
        assert (ranks.rank, ranks.size, ranks.names) == (0, 1, (0,))
        assert ranks.exchange(b"a") == [b"a"]
        assert ranks.broadcast(b"b") == b"b"
        ranks.agree()
        with pytest.raises(KeyError, match="mine"):
            ranks.agree(KeyError("mine"))
        ranks.close()

    def test_without_torch_distributed(self) -> None:
        assert isinstance(join_ranks(None, timeout_s=1), SingleRank)

    def test_a_broadcast_needs_a_payload(self) -> None:
        with pytest.raises(ConfigError, match="rank 0 has to give"):
            alone().broadcast(None)


def lose_one_meanwhile(rank: int) -> Seen:
    """Rank 3 dies while rank 0 is busy elsewhere, for longer than the others take to ask."""
    ranks = joined()
    ranks.agree()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + NAMING_TIMEOUT_S + 1.5
    while rank == 0 and time.monotonic() < until:
        ranks.attend()
        time.sleep(0.1)
    return seen(lambda: ranks.broadcast(b"x" if rank == 0 else None))


def test_a_busy_first_rank_is_not_taken_for_dead() -> None:
    with crew(4) as made:
        errors = made.run(lose_one_meanwhile)
        assert isinstance(errors.pop(3), Died)
        for kind, message, _ in errors:
            assert kind == "TransferError"
            assert message.startswith("rank 3 of 4 did not answer")
