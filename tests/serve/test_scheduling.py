from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError, NotReadyError, ProtocolError
from weightsync.serve.messages import (
    EngineOutput,
    EngineRequest,
    Failed,
    ModelCard,
    SampledToken,
    SamplingParams,
    Step,
    StepResult,
)
from weightsync.serve.scheduling import OwnedEvent, PrefixCache, Scheduler
from weightsync.wire.problem import Problem

END = 0
CARD = ModelCard(
    name="m", directory="m", vocab_size=50, max_length=64, end_ids=[END], architecture="A"
)


def job(
    request_id: str, prompt: list[int], *, n: int = 1, tokens: int = 4, at_end: bool = True
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt=prompt,
        n=n,
        max_new_tokens=tokens,
        sampling_params=SamplingParams(temperature=0.0),
        stop_at_end=at_end,
    )


@dataclass
class Worker:
    """Makes steps as a worker must be able to, and refuses those that make no sense.

    The token of a row is a hash of its prompt and of all its tokens so far.
    """

    rows: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    version: int = 1
    refuses: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)

    def make(self, step: Step) -> StepResult:
        self.steps.append(step)
        for row in step.drop:
            del self.rows[row]
        for key in step.evict:
            del self.kept[key]
        assert not (step.new and step.rows)
        refused: dict[int, str] = {}
        chosen: list[SampledToken] = []
        for group in step.new:
            if group.reuse is not None:
                shared = group.reuse_length
                assert 0 < shared < len(group.prompt)
                assert self.kept[group.reuse][:shared] == group.prompt[:shared]
            if group.prompt[0] in self.refuses:
                refused[group.rows[0]] = "no such prompt"
                continue
            if group.keep_as is not None:
                self.kept[group.keep_as] = group.prompt
            for row in group.rows:
                assert row not in self.rows
                self.rows[row] = list(group.prompt)
                chosen.append(self._sample(row))
        assert not step.rows or set(step.rows) == set(self.rows)
        for row, token in zip(step.rows, step.tokens, strict=True):
            assert self.rows[row][-1] == token
            chosen.append(self._sample(row))
        return StepResult(number=step.number, version=self.version, sampled=chosen, refused=refused)

    def _sample(self, row: int) -> SampledToken:
        token = token_after(self.rows[row])
        self.rows[row].append(token)
        return SampledToken(row=row, token=token)


def token_after(tokens: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 7 + len(tokens)) % 11


def expected(asked: EngineRequest) -> list[int]:
    tokens = list(asked.prompt)
    made: list[int] = []
    while len(made) < asked.max_new_tokens:
        made.append(token_after([*tokens, *made]))
        if made[-1] == END and asked.stop_at_end:
            break
    return made


def run(scheduler: Scheduler, worker: Worker) -> list[OwnedEvent]:
    posts: list[OwnedEvent] = []
    while (step := scheduler.next_step()) is not None:
        posts += scheduler.done(worker.make(step))
    return posts


def completions(posts: list[OwnedEvent]) -> dict[tuple[bytes, str, int], tuple[list[int], str]]:
    tokens: dict[tuple[bytes, str, int], list[int]] = defaultdict(list)
    ended: dict[tuple[bytes, str, int], str] = {}
    for owner, event in posts:
        assert isinstance(event, EngineOutput)
        key = (owner, event.request_id, event.index)
        assert key not in ended, "a token after the end"
        if event.token is not None:
            tokens[key].append(event.token)
        if event.finish_reason:
            ended[key] = event.finish_reason
    assert set(ended) >= set(tokens)
    return {key: (tokens[key], ended[key]) for key in ended}


jobs = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=1, max_size=12),
        st.integers(1, 4),
        st.integers(1, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    asked=jobs,
    max_rows=st.integers(4, 9),
    max_prompt=st.integers(1, 30),
    max_kept=st.integers(1, 40),
    arrivals=st.lists(st.integers(0, 3), max_size=12),
)
def test_every_completion_is_what_it_would_be_alone(
    asked: list[tuple[list[int], int, int, bool]],
    max_rows: int,
    max_prompt: int,
    max_kept: int,
    arrivals: list[int],
) -> None:
    scheduler = Scheduler(
        CARD,
        max_rows=max_rows,
        max_prompt_tokens=max_prompt,
        kept=PrefixCache(max_tokens=max_kept, min_shared=2, max_prompts=3),
    )
    worker = Worker()
    wanted = {
        f"r{i}": job(f"r{i}", prompt, n=n, tokens=tokens, at_end=at_end)
        for i, (prompt, n, tokens, at_end) in enumerate(asked)
    }
    posts: list[OwnedEvent] = []
    todo = list(wanted.values())
    for steps in arrivals:
        if todo:
            scheduler.submit(b"api", todo.pop())
        for _ in range(steps):
            step = scheduler.next_step()
            if step is not None:
                posts += scheduler.done(worker.make(step))
    for late in todo:
        scheduler.submit(b"api", late)
    posts += run(scheduler, worker)
    got = completions(posts)
    assert len(got) == sum(one.n for one in wanted.values())
    for (_, request_id, _index), (tokens, reason) in got.items():
        right = expected(wanted[request_id])
        assert tokens == right
        stopped = wanted[request_id].stop_at_end and right[-1] == END
        assert reason == ("stop" if stopped else "length")
    assert worker.rows == {}
    assert (scheduler.running, scheduler.waiting, scheduler.num_requests) == (0, 0, 0)
    assert len(worker.kept) == scheduler.kept_prompts <= 3


def test_arriving_prompts_do_not_stop_those_at_work() -> None:
    scheduler, worker = Scheduler(CARD), Worker()
    scheduler.submit(b"a", job("first", [1, 2], tokens=30, at_end=False))
    for i in range(20):
        scheduler.submit(b"a", job(f"late{i}", [3], tokens=1))
        step = scheduler.next_step()
        assert step is not None
        scheduler.done(worker.make(step))
    kinds = [bool(step.new) for step in worker.steps]
    assert not any(a and b for a, b in pairwise(kinds))
    assert kinds.count(False) == 10


def test_first_come_is_first_served_whatever_fits() -> None:
    scheduler, worker = Scheduler(CARD, max_rows=4), Worker()
    scheduler.submit(b"a", job("wide", [1], n=3, tokens=3, at_end=False))
    scheduler.submit(b"a", job("wider", [1], n=4, tokens=3, at_end=False))
    scheduler.submit(b"a", job("narrow", [1], n=1, tokens=3, at_end=False))
    order = list(dict.fromkeys(event.request_id for _, event in run(scheduler, worker)))  # type: ignore[union-attr]  # no answers here
    assert order == ["wide", "wider", "narrow"]


def test_cancelled_completions_say_so_and_cancelled_jobs_say_nothing() -> None:
    scheduler, worker = Scheduler(CARD), Worker()
    scheduler.submit(b"a", job("one", [1], n=3, tokens=9, at_end=False))
    scheduler.submit(b"a", job("gone", [2], n=2, tokens=9, at_end=False))
    first = scheduler.next_step()
    assert first is not None
    scheduler.done(worker.make(first))
    assert scheduler.cancel(b"b", "one", 1) == []  # another server's job of that name
    (post,) = scheduler.cancel(b"a", "one", 1)
    assert post == (
        b"a",
        EngineOutput(request_id="one", index=1, prompt_version=1, finish_reason="abort"),
    )
    assert scheduler.cancel(b"a", "one", 1) == []
    assert scheduler.cancel(b"a", "gone") == []
    got = completions(run(scheduler, worker))
    assert {(rid, index) for _, rid, index in got} == {("one", 0), ("one", 2)}
    assert worker.rows == {}


def test_aborted_jobs_end_with_what_they_have_even_while_they_wait() -> None:
    scheduler, worker = Scheduler(CARD, max_rows=1), Worker()
    scheduler.submit(b"a", job("one", [1], tokens=9, at_end=False))
    scheduler.submit(b"b", job("two", [1]))
    step = scheduler.next_step()
    assert step is not None
    scheduler.done(worker.make(step))
    ended = scheduler.abort_all()
    assert [(owner, e.finish_reason) for owner, e in ended if isinstance(e, EngineOutput)] == [
        (b"a", "abort"),
        (b"b", "abort"),
    ]
    assert run(scheduler, worker) == []
    assert worker.rows == {}


def test_a_prompt_that_cannot_be_read_fails_alone() -> None:
    scheduler, worker = Scheduler(CARD), Worker(refuses={9})
    scheduler.submit(b"a", job("bad", [9, *range(1, 30)], n=2))
    scheduler.submit(b"a", job("good", [1]))
    posts = run(scheduler, worker)
    failed = [event for _, event in posts if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["bad"]
    problem = msgspec.json.decode(failed[0].problem, type=Problem)
    assert (problem.error, problem.detail) == ("ConfigError", "no such prompt")
    assert [
        rid for _, rid, _ in completions([p for p in posts if isinstance(p[1], EngineOutput)])
    ] == ["good"]
    assert scheduler.kept_prompts == 0


def test_failing_all_tells_every_job_once_why() -> None:
    scheduler = Scheduler(CARD)
    scheduler.submit(b"a", job("one", [1], n=4))
    scheduler.submit(b"b", job("two", [1]))
    posts = scheduler.fail_all(NotReadyError("torn", state="TORN"))
    assert [(owner, e.request_id) for owner, e in posts if isinstance(e, Failed)] == [
        (b"a", "one"),
        (b"b", "two"),
    ]
    assert scheduler.next_step() is None


def test_the_versions_of_tokens_and_of_the_prompt_are_told() -> None:
    scheduler = Scheduler(CARD, kept=PrefixCache(min_shared=2))
    worker = Worker(version=3)
    prompt = [1, 2, 3, 4, 1]
    scheduler.submit(b"a", job("old", prompt, tokens=2, at_end=False))
    step = scheduler.next_step()
    assert step is not None
    scheduler.done(worker.make(step))
    worker.version = 4
    versions = [(e.version, e.prompt_version) for _, e in run(scheduler, worker)]  # type: ignore[union-attr]  # deltas
    assert versions == [(4, 3)]
    scheduler.submit(b"a", job("reuses", [*prompt, 2], tokens=1))
    scheduler.submit(b"a", job("other", [2], tokens=1))
    reused = {e.request_id: e for _, e in run(scheduler, worker) if isinstance(e, EngineOutput)}
    assert (reused["reuses"].version, reused["reuses"].prompt_version) == (4, 3)
    assert (reused["other"].version, reused["other"].prompt_version) == (4, 4)
    scheduler.submit(b"a", job("reuses it", [*prompt, 2, 2], tokens=1))
    (post,) = run(scheduler, worker)
    assert isinstance(post[1], EngineOutput)
    assert post[1].prompt_version == 3  # what was kept of "reuses" began with the old one
    scheduler.clear_cache()
    scheduler.submit(b"a", job("fresh", [*prompt, 3], tokens=1))
    (post,) = run(scheduler, worker)
    assert isinstance(post[1], EngineOutput)
    assert post[1].prompt_version == 4


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (job("x", []), "empty or has token ids outside 0 to 49"),
        (job("x", [50]), "empty or has token ids outside 0 to 49"),
        (job("x", [1] * 61, tokens=4), "take 65 tokens, the model has room for 64"),
        (job("x", [1], n=0), "0 completions of one prompt are requested; ask for 1 to 256"),
        (job("x", [1], n=257), "257 completions"),
        (job("x", [1], tokens=0), "max_new_tokens must be at least 1"),
    ],
)
def test_what_the_model_cannot_take_is_refused(asked: EngineRequest, reason: str) -> None:
    scheduler = Scheduler(CARD)
    with pytest.raises(ConfigError, match=reason):
        scheduler.submit(b"a", asked)
    assert scheduler.num_requests == 0


def test_numbers_are_used_once() -> None:
    scheduler, worker = Scheduler(CARD), Worker()
    scheduler.submit(b"a", job("one", [1]))
    with pytest.raises(ProtocolError, match="request one is in progress already"):
        scheduler.submit(b"a", job("one", [1]))
    step = scheduler.next_step()
    assert step is not None
    result = worker.make(step)
    scheduler.done(result)
    with pytest.raises(ProtocolError, match="got the result of step 1, expected step none"):
        scheduler.done(result)
