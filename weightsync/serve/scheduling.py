"""Scheduling: the rows and prompts of the next step, and the prompts that are kept for reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from weightsync.errors import ConfigError, NotReadyError, ProtocolError, WeightSyncError
from weightsync.serve.messages import (
    EngineOutput,
    EngineRequest,
    Event,
    Failed,
    FinishReason,
    ModelCard,
    NewRows,
    RowId,
    SampledToken,
    Step,
    StepResult,
)
from weightsync.wire.problem import encode_error

MAX_KEPT_TOKENS = 4096
MAX_KEPT_PROMPTS = 32
MIN_SHARED_TOKENS = 16


@dataclass(slots=True)
class _Kept:
    tokens: tuple[int, ...]
    adapter: str = ""
    version: int | None = None
    """Version of the weights that read the first token; None until the prompt was read."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix of `length` tokens that a prompt shares with the kept prompt `key`.

    `version` is the version of the weights that read it.
    """

    key: int
    length: int
    version: int


class PrefixCache:
    """The prompts that workers keep, least recently used first; pure bookkeeping.

    They have at most `max_tokens` tokens in all. A prefix shorter than `min_shared` tokens is not
    reused, and a prompt cannot be reused before it was read.
    """

    def __init__(
        self,
        *,
        max_tokens: int = MAX_KEPT_TOKENS,
        max_prompts: int = MAX_KEPT_PROMPTS,
        min_shared: int = MIN_SHARED_TOKENS,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_prompts = max_prompts
        self._min_shared = min_shared
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._evicted: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_evicted(self) -> bool:
        """Whether the workers still have prompts that were evicted."""
        return bool(self._evicted)

    def find(self, prompt: list[int], adapter: str = "") -> PrefixMatch | None:
        """Return the kept prompt that shares the longest prefix with this one.

        Only one that the same version of an adapter has read, by its key ("": the base model).
        The last token of a prompt is always read again: its logits give the first new token.
        """
        best: PrefixMatch | None = None
        for key, kept in self._kept.items():
            if kept.version is None or kept.adapter != adapter:
                continue
            length = min(_shared(kept.tokens, prompt), len(prompt) - 1)
            if length >= self._min_shared and (best is None or length > best.length):
                best = PrefixMatch(key, length, kept.version)
        if best is not None:
            self._kept.move_to_end(best.key)
        return best

    def add(self, prompt: list[int], adapter: str = "") -> int | None:
        """Return a new key for a prompt that will be read, or None if it is not to be kept."""
        tokens = tuple(prompt)
        known = any(
            (kept.tokens, kept.adapter) == (tokens, adapter) for kept in self._kept.values()
        )
        if known or not self._min_shared < len(prompt) <= self._max_tokens:
            return None
        self._next += 1
        self._kept[self._next] = _Kept(tokens, adapter)
        self._shrink(spare=self._next)
        return self._next

    def read(self, key: int, version: int | None) -> None:
        """Note that a prompt was read with weights of `version`; None: it could not be read."""
        if version is None:  # no worker has it
            self._kept.pop(key, None)
            self._evicted = [evicted for evicted in self._evicted if evicted != key]
        elif key in self._kept:
            self._kept[key].version = version

    def clear(self, adapters: Collection[str] | None = None) -> None:
        """Evict all prompts, or those that these versions of adapters have read."""
        for key, kept in list(self._kept.items()):
            if adapters is None or kept.adapter in adapters:
                self._evict(key)

    def take_evicted(self) -> list[int]:
        """Return the keys of evicted prompts, each of them once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _shrink(self, *, spare: int) -> None:
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_prompts or self._total > self._max_tokens
        ):
            self._evict(next(key for key in self._kept if key != spare))

    @property
    def _total(self) -> int:
        return sum(len(kept.tokens) for kept in self._kept.values())

    def _evict(self, key: int) -> None:
        del self._kept[key]
        self._evicted.append(key)


def _shared(first: tuple[int, ...], second: list[int]) -> int:
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return min(len(first), len(second))


MAX_ROWS = 256
MAX_PROMPT_TOKENS_A_STEP = 4096
MAX_WAITING = 4096

Owner = bytes
"""The ZeroMQ identity of the API server that sent a request."""
Key = tuple[Owner, str]
OwnedEvent = tuple[Owner, Event]


@dataclass(slots=True)
class _Row:
    key: Key
    index: int
    request: EngineRequest
    token: int = 0
    count: int = 0
    prompt_version: int = 0

    def version(self, of_base: int) -> int:
        """The version of what generates: of the adapter, or of the base model without one."""
        of_adapter = self.request.adapter_version
        return of_base if of_adapter is None else of_adapter


@dataclass(slots=True)
class _RequestState:
    request: EngineRequest
    rows: dict[int, RowId | None] = field(default_factory=dict)
    """The row of each unfinished completion; None while it waits."""


class Scheduler:
    """The requests of one replica: waiting requests, first come first served, and running rows.

    Call `next_step` and `done` in turn. A step either reads prompts or gives every row a token.
    Between two steps of tokens there is at most one step of prompts, so that new requests cannot
    stop the running ones. Not thread-safe.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        max_rows: int = MAX_ROWS,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS_A_STEP,
        kept: PrefixCache | None = None,
    ) -> None:
        self._card = card
        self._end_ids = frozenset(card.end_ids)
        self._max_rows = max_rows
        self._max_prompt_tokens = max_prompt_tokens
        self._kept = PrefixCache() if kept is None else kept  # an empty one is falsy
        self._requests: dict[Key, _RequestState] = {}
        self._waiting: OrderedDict[Key, EngineRequest] = OrderedDict()
        self._rows: dict[RowId, _Row] = {}
        self._drop: list[RowId] = []
        self._step: Step | None = None
        self._reading: list[tuple[NewRows, int | None]] = []
        self._steps = 0
        self._next_row = 0
        self._just_read = False

    @property
    def running(self) -> int:
        """The number of running rows."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """The number of completions that wait."""
        return sum(request.n for request in self._waiting.values())

    @property
    def num_requests(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether there is a step to make."""
        return bool(self._rows or self._waiting or self._drop or self._kept.has_evicted)

    @property
    def kept_prompts(self) -> int:
        """The number of prompts whose attention cache is kept."""
        return len(self._kept)

    def submit(self, owner: Owner, request: EngineRequest) -> None:
        """Add a request to the waiting ones. Raises as `check`; ProtocolError for an id in use."""
        key = (owner, request.request_id)
        if key in self._requests:
            raise ProtocolError(
                f"request {request.request_id} is in progress already; use a new id"
            )
        self.check(request)
        self._requests[key] = _RequestState(request, dict.fromkeys(range(request.n)))
        self._waiting[key] = request

    def cancel(self, owner: Owner, request_id: str, index: int | None = None) -> list[OwnedEvent]:
        """End a request without further events (`index` None), or one completion of it.

        An unknown request is no error: it may have ended while the message was on its way.
        """
        key = (owner, request_id)
        found = self._requests.get(key)
        if found is None:
            return []
        if index is None:
            self._forget(key)
            return []
        return [self._end(key, index, "abort")] if index in found.rows else []

    def abort_all(self) -> list[OwnedEvent]:
        """End every request with the tokens that it has."""
        posts = [
            self._end(key, index, "abort")
            for key, found in list(self._requests.items())
            for index in list(found.rows)
        ]
        self._waiting.clear()
        return posts

    def fail_all(self, error: WeightSyncError) -> list[OwnedEvent]:
        """End every request with an error."""
        problem = encode_error(error)
        posts = [(key[0], Failed(request_id=key[1], problem=problem)) for key in self._requests]
        for key in list(self._requests):
            self._forget(key)
        return list[OwnedEvent](posts)

    def clear_cache(self, adapters: Collection[str] | None = None) -> None:
        """Stop the reuse of prompts that were read so far: all, or those of these adapters."""
        self._kept.clear(adapters)

    @property
    def adapters_in_use(self) -> set[str]:
        """The keys of the versions of adapters that unfinished requests use."""
        return {found.request.adapter_key for found in self._requests.values()} - {""}

    def next_step(self) -> Step | None:
        """Return the next step, or None when there is no work."""
        drop, self._drop = self._drop, []
        evict = self._kept.take_evicted()  # before `_admit`, whose prompts may reuse others
        rows = list(self._rows)
        new = [] if self._just_read and rows else self._admit()
        self._just_read = bool(new)
        if new:
            rows = []
        if not (new or rows or drop or evict):
            return None
        self._steps += 1
        self._step = Step(
            number=self._steps,
            drop=drop,
            evict=evict,
            new=new,
            rows=rows,
            tokens=[self._rows[row].token for row in rows],
        )
        return self._step

    def done(self, result: StepResult) -> list[OwnedEvent]:
        """Process rank 0's result of the last step; return the events for the API servers."""
        if self._step is None or result.number != self._step.number:
            expected = self._step.number if self._step else "none"
            raise ProtocolError(f"got the result of step {result.number}, expected step {expected}")
        self._step = None
        for group, reused_version in self._reading:
            read = group.rows[0] not in result.refused
            version = result.version if reused_version is None else reused_version
            for row in group.rows:
                if row in self._rows:
                    self._rows[row].prompt_version = self._rows[row].version(version)
            if group.keep_as is not None:
                self._kept.read(group.keep_as, version if read else None)
        self._reading.clear()
        refused = [self._refuse(row, reason) for row, reason in result.refused.items()]
        return [*(post for post in refused if post), *self._token_posts(result)]

    def check(self, request: EngineRequest, *, ahead: int = 0) -> None:
        """Raise ConfigError for a request that the model cannot take.

        Raises NotReadyError if too many wait. `ahead` is the number of requests that wait outside
        the scheduler.
        """
        card = self._card
        if not 1 <= request.n <= self._max_rows:
            raise ConfigError(
                f"{request.n} completions of one prompt are requested; ask for 1 to "
                f"{self._max_rows}"
            )
        if request.max_new_tokens < 1:
            raise ConfigError("max_new_tokens must be at least 1")
        prompt = request.prompt
        if not prompt or not 0 <= min(prompt) <= max(prompt) < card.vocab_size:
            raise ConfigError(
                f"the prompt is empty or has token ids outside 0 to {card.vocab_size - 1}; encode "
                "it with the model's own tokenizer"
            )
        total = len(prompt) + request.max_new_tokens
        if total > card.max_length:
            raise ConfigError(
                f"prompt and completion take {total} tokens, the model has room for "
                f"{card.max_length}; shorten the prompt or max_new_tokens"
            )
        if len(self._waiting) + ahead >= MAX_WAITING:
            raise NotReadyError(
                f"{MAX_WAITING} requests wait already; try again later", state="BUSY"
            )

    def _admit(self) -> list[NewRows]:
        """Start waiting requests, up to the limits of rows and of prompt tokens per step."""
        new: list[NewRows] = []
        room = self._max_rows - len(self._rows)
        tokens = self._max_prompt_tokens
        while self._waiting:
            key, request = next(iter(self._waiting.items()))
            wanted = list(self._requests[key].rows)
            if len(wanted) > room or (new and len(request.prompt) > tokens):
                break
            del self._waiting[key]
            room -= len(wanted)
            tokens -= len(request.prompt)
            new.append(self._new_rows(key, request, wanted))
        return new

    def _new_rows(self, key: Key, request: EngineRequest, wanted: Sequence[int]) -> NewRows:
        rows = range(self._next_row, self._next_row + len(wanted))
        self._next_row += len(wanted)
        read = replace(request, inputs=None)  # images are read once, and are large
        self._requests[key].request = read
        for index, row in zip(wanted, rows, strict=True):
            self._requests[key].rows[index] = row
            self._rows[row] = _Row(key, index, read)
        # The token ids do not contain the images, so equal ids may be different prompts.
        adapter, cached = request.adapter_key, request.inputs is None
        known = self._kept.find(request.prompt, adapter) if cached else None
        group = NewRows(
            rows=list(rows),
            completions=list(wanted),
            prompt=request.prompt,
            sampling_params=request.sampling_params,
            reuse=known.key if known else None,
            reuse_length=known.length if known else 0,
            keep_as=self._kept.add(request.prompt, adapter) if cached else None,
            adapter=adapter,
            inputs=request.inputs,
        )
        self._reading.append((group, known.version if known else None))
        return group

    def _token_posts(self, result: StepResult) -> Iterable[OwnedEvent]:
        for chosen in result.sampled:
            row = self._rows.get(chosen.row)
            if row is not None:  # otherwise it was cancelled during the step
                yield self._took(row, chosen, result.version)

    def _took(self, row: _Row, chosen: SampledToken, version: int) -> OwnedEvent:
        row.token = chosen.token
        row.count += 1
        finish: FinishReason | None = None
        if row.request.stop_at_end and chosen.token in self._end_ids:
            finish = "stop"
        elif row.count >= row.request.max_new_tokens:
            finish = "length"
        if finish:
            self._close(row.key, row.index)
        return row.key[0], EngineOutput(
            request_id=row.key[1],
            index=row.index,
            token=chosen.token,
            version=row.version(version),
            prompt_version=row.prompt_version,
            base_version=version if row.request.adapter_key else None,
            logprob=chosen.logprob,
            top=chosen.top,
            finish_reason=finish,
        )

    def _end(self, key: Key, index: int, reason: FinishReason) -> OwnedEvent:
        number = self._requests[key].rows[index]
        prompt_version = 0 if number is None else self._rows[number].prompt_version
        self._close(key, index)
        return key[0], EngineOutput(
            request_id=key[1], index=index, prompt_version=prompt_version, finish_reason=reason
        )

    def _refuse(self, first_row: RowId, reason: str) -> OwnedEvent | None:
        row = self._rows.get(first_row)
        if row is None:
            return None
        problem = encode_error(ConfigError(reason))
        dropped = len(self._drop)
        self._forget(row.key)
        del self._drop[dropped:]  # no worker has made these rows
        return row.key[0], Failed(request_id=row.key[1], problem=problem)

    def _close(self, key: Key, index: int) -> None:
        """Remove one completion, and with the last one its request."""
        found = self._requests[key]
        row = found.rows.pop(index)
        if row is not None:
            del self._rows[row]
            self._drop.append(row)
        if not found.rows:
            self._requests.pop(key)
            self._waiting.pop(key, None)

    def _forget(self, key: Key) -> None:
        for index in list(self._requests[key].rows):
            self._close(key, index)
