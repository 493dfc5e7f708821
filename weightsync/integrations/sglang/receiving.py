"""The receiver in a scheduler process of SGLang, and the rounds that all ranks answer together.

It imports nothing of SGLang: `plugin` has the engine that does. No server has run it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from weightsync.errors import (
    ConfigError,
    ProtocolError,
    TransferError,
    WeightSyncError,
    shorten,
)
from weightsync.integrations.vllm import rpc
from weightsync.integrations.vllm.writes import Place, TensorKey, WriteWatch, places_of
from weightsync.receiver import WeightReceiver
from weightsync.specs import Manifest, ManifestDifference, TensorSpec, refuse_inner
from weightsync.tensors import TORCH_DTYPES, dtype_name
from weightsync.weights.sinks.base import HookSink, NamedTensor
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, FinishRequest, SleepTag

logger = logging.getLogger(__name__)

FAMILIES = frozenset(
    {
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Classes of models whose `load_weights` was read: it writes parameters, and derives nothing."""

WEIGHTS = "weights"
MEMORY_TAGS = ("kv_cache", WEIGHTS, "cuda_graph")
"""The tags of SGLang's memory."""
_KEPT = 256
"""Trials of a loader: one for each message of an update."""
Answers = list[dict[str, Any]]
Handler = Callable[[], dict[str, Any]]


class Engine(Protocol):
    """The parts of one scheduler process that are used, in its loop's thread, between two batches.

    `rank` of `world` scheduler processes, which all handle the same requests in the same order.
    `stop`, `start` and `flush_cache` change what the scheduler does next: all ranks call them for
    the same round, or none.
    """

    rank: int
    world: int

    @property
    def model(self) -> nn.Module:
        """The model in use."""

    @property
    def paused(self) -> bool:
        """Whether the scheduler runs no batch."""

    def check(self) -> None:
        """Raise ConfigError for a server whose weights must not be updated."""

    def gather(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, by rank. A collective call."""

    def stop(self) -> None:
        """Run no batch from now on; requests at work are retracted, and computed again later."""

    def start(self) -> None:
        """Run batches again."""

    def flush_cache(self) -> bool:
        """Forget caches of former weights. Returns False where requests use them."""

    def load(self, pairs: Iterable[NamedTensor]) -> None:
        """Give a whole model, or a part of it, to the model's loader."""


class SchedulerReceiver:
    """Answers the rounds of senders in one scheduler process; `stage` is where weights wait.

    Every rank is given the same rounds. A round that commits stops the scheduler on every rank,
    commits, and starts it again where all ranks then have one whole version. Until then the
    scheduler runs no batch, also where a user continues it.
    """

    def __init__(self, engine: Engine, stage: torch.device | str) -> None:
        self._engine = engine
        self._held = False
        self._asleep: frozenset[str] = frozenset()
        self._starts_awake = False
        self._users_pause = False
        self._checked = False
        self.receiver = WeightReceiver(ModelSink(engine, stage), apply="staged")

    def answer(self, text: str) -> str:
        """Return the answers of all ranks to one round, as JSON. A collective call; never raises.

        An error of a rank is part of its answer, so that the other ranks do not wait for it.
        """
        if not self._held and not self._starts_awake:
            self._users_pause = self._engine.paused
        round_, finish = rpc.Round(nonce=""), None
        try:
            round_ = rpc.decode_round(text)
            finish = _finish_of(round_)
            call: Handler = partial(self._handle, round_, finish)
        except Exception as exc:  # noqa: BLE001  # returned to the sender, which raises it
            call = partial(rpc.encode_refusal, exc)
        answers = self._gather(call) if finish is None else self._commit(round_, finish, call)
        if self._engine.paused and self.may_start() and not self._users_pause:
            if self._asleep:  # batches would run without a cache
                self._starts_awake = True
            else:
                self._engine.start()
        for answer in answers:
            answer["paused"] = self._users_pause
        return msgspec.json.encode(answers).decode()

    def may_start(self) -> bool:
        """Whether the scheduler may run batches: all ranks hold one whole version."""
        return not self._held

    def release(self, call: Callable[[], Any], tags: Collection[str] | None, *, keeps: bool) -> Any:
        """Have SGLang give memory back by `call`, and return its result; `tags` None: all of it.

        All ranks are told to, so nothing is refused here. Unless SGLang `keeps` the weights on the
        host they are discarded: the scheduler runs no batch until a full update.
        """
        released = frozenset(tags or MEMORY_TAGS)
        if WEIGHTS not in released:
            result = call()
        else:
            self._note(lambda: self.receiver.show_asleep(1))  # before their memory is gone
            try:
                result = call()
            except BaseException:
                self._note(lambda: self.receiver.show_asleep(2))  # it is not known what is gone
                raise
            if not keeps:
                self._note(lambda: self.receiver.show_asleep(2))
                self._hold()
        self._asleep |= released
        self._note_awake()
        return result

    def resume(self, call: Callable[[], Any], tags: Collection[str] | None) -> Any:
        """Have SGLang take memory again by `call`, and return its result; `tags` None: all of it.

        Where an update came meanwhile, the scheduler runs batches again when nothing is asleep.
        """
        result = call()
        self._asleep -= frozenset(tags or MEMORY_TAGS)
        self._note_awake()
        if self._starts_awake and not self._asleep:
            self._starts_awake = False
            if self._engine.paused and self.may_start() and not self._users_pause:
                self._engine.start()
        return result

    def note_asleep(self, tags: Collection[str], *, keeps: bool) -> None:
        """Note that memory was given back before this was made."""
        if tags:
            self.release(lambda: None, tags, keeps=keeps)

    def _hold(self) -> None:
        if not self._held and not self._starts_awake:
            self._users_pause = self._engine.paused
        self._held, self._starts_awake = True, False
        if not self._engine.paused:
            self._engine.stop()

    def _note_awake(self) -> None:
        # A cache that is asleep delays the scheduler's start, and nothing of an update.
        asleep = self._asleep & {WEIGHTS}
        awake = [tag for tag in get_args(SleepTag) if tag not in asleep]
        self._note(lambda: self.receiver.show_awake(awake))

    @staticmethod
    def _note(call: Callable[[], None]) -> None:
        """Call what may not keep this rank from doing as the others do."""
        try:
            call()
        except WeightSyncError as exc:
            logger.error("SGLang gives memory back or takes it, and its receiver refuses: %s", exc)

    def note_start(self) -> bool:
        """Note that a user continues generation; return whether the scheduler may."""
        self._users_pause = False
        return self.may_start()

    def _commit(self, round_: rpc.Round, finish: FinishRequest, call: Handler) -> Answers:
        """Commit on every rank, or on none where one of them is not ready.

        All ranks take each of these steps, or none: their schedulers have to stay alike.
        """
        found = self._gather(partial(self._check_update, round_, finish))
        if all(answer.get("over") for answer in found):
            return self._gather(call)  # a repeated call: its reply is kept
        if not any("problem" in answer for answer in found):
            found = self._gather(partial(self._stop, finish))
        problems = [answer for answer in found if "problem" in answer]
        if problems:
            return [dict(problems[0]) for _ in found]
        self._held = True
        answers = self._gather(call)
        self._held = not _one_version(answers)
        if self._held:
            logger.error(
                "the ranks of this server hold no single version of the weights: it generates "
                "nothing until a full update; call send_weights() again"
            )
        return answers

    def _check_update(self, round_: rpc.Round, finish: FinishRequest) -> dict[str, Any]:
        """Whether this rank has committed the update. Raises TransferError where it has none.

        A rank without a call may hold the version already, and repair of another one is under way.
        """
        self._check()
        status = self.receiver.status()
        is_open = status.update_id == finish.update_id
        is_over = status.last_finished == finish.update_id
        if self._engine.rank in round_.calls and not (is_open or is_over):
            raise TransferError(
                f"rank {self._engine.rank} of this server has no update {finish.update_id}, and "
                "other ranks may: nothing was committed; call send_weights() again"
            )
        return {"over": not is_open}

    def _stop(self, finish: FinishRequest) -> dict[str, Any]:
        self._engine.stop()
        if finish.clear_cache and not self._engine.flush_cache():
            raise TransferError(
                f"rank {self._engine.rank} of this server cannot flush its cache, which requests "
                "use: nothing was committed; call send_weights() again"
            )
        return {}

    def _handle(self, round_: rpc.Round, finish: FinishRequest | None) -> dict[str, Any]:
        self._check()
        if round_.below or round_.parts:
            raise ConfigError("SGLang takes no adapters from trainers; send the merged model")
        rank = self._engine.rank
        has_update = finish is not None and self.receiver.status().update_id == finish.update_id
        if finish is not None and has_update and rank not in round_.calls:
            # Its own call comes later, and is answered from what this one did.
            self.receiver.dispatch(msgspec.structs.replace(finish, fleet=None))
        return rpc.answer_round(
            round_,
            self.receiver,
            self.receiver.dispatch,
            rank=rank,
            world=self._engine.world,
        )

    def _check(self) -> None:
        if not self._checked:
            self._engine.check()
            self._checked = True

    def _gather(self, call: Handler) -> Answers:
        """Return what `call` returns in all ranks, by rank; a problem where it raises."""
        mine = self._handled(call)
        return [
            msgspec.json.decode(text) for text in self._engine.gather(msgspec.json.encode(mine))
        ]

    @staticmethod
    def _handled(call: Handler) -> dict[str, Any]:
        try:
            return call()
        except Exception as exc:  # noqa: BLE001  # as in answer()
            return dict(rpc.encode_refusal(exc))


def _finish_of(round_: rpc.Round) -> FinishRequest | None:
    """Return the finish in a round that commits. Raises ProtocolError where ranks have unlike ones.

    All ranks decide by the whole round, not by their own part of it.
    """
    finishes = {call.body for call in round_.calls.values() if call.call == CALL_OF[FinishRequest]}
    if not finishes:
        return None
    found = [codec.decode_request(CALL_OF[FinishRequest], body.encode()) for body in finishes]
    requests = [request for request in found if isinstance(request, FinishRequest)]
    if len({request.update_id for request in requests}) != 1:
        raise ProtocolError("the ranks of one server are told to finish different updates")
    return requests[0]


def _one_version(answers: Answers) -> bool:
    try:
        return rpc.one_version(msgspec.convert(answers, list[rpc.WorkerAnswer]))
    except msgspec.ValidationError:
        return False  # a rank refused the round


def gather_texts(text: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the texts of all ranks of a group on the CPU, by rank, without a pickle."""
    world = dist.get_world_size(group)
    if world == 1:
        return [text]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = int(max(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(texts, padded, group=group)
    pairs = zip(texts, sizes, strict=True)
    return [bytes(each[: int(size)].numpy()) for each, size in pairs]


class ModelSink(HookSink):
    """Takes the tensors of a checkpoint; the model's own loader puts them into its parameters.

    Staged, a rank keeps the whole model on `stage`. Before any byte moves, the loader is tried
    out on tensors without memory, and its writes are dropped: that shows names and shapes that it
    does not take, and parameters that would keep former weights. Each commit is checked so, too.
    """

    def __init__(self, engine: Engine, stage: torch.device | str) -> None:
        super().__init__(self._load, device=stage)
        self._engine = engine
        self._trials: dict[str, tuple[frozenset[str], Trial]] = {}

    def difference(self, offered: Manifest) -> ManifestDifference:
        """How `offered` differs from what the model's loader takes; cached."""
        if offered.descriptions:
            return refuse_inner(offered)
        if offered.digest not in self._trials:
            self._engine.check()
            trial = try_out(self._engine.model, offered)
            if len(self._trials) >= _KEPT:
                del self._trials[next(iter(self._trials))]
            self._trials[offered.digest] = frozenset(s.name for s in offered.specs), trial
        else:  # the last one, of which the bytes come next
            self._trials[offered.digest] = self._trials.pop(offered.digest)
        return self._trials[offered.digest][1].difference

    def _load(self, pairs: Iterable[NamedTensor]) -> list[str]:
        given = list(pairs)
        names = [name for name, _ in given]
        tensors = dict(given)
        # The last one with these names: an earlier one may have been refused, or know no aliases.
        offered = reversed(self._trials.values())
        trial = next((trial for names, trial in offered if names == tensors.keys()), None)
        if trial is None:  # of an update of more messages than are kept
            specs = [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in given]
            trial = try_out(self._engine.model, Manifest(tuple(specs)))
        given += [(alias, tensors[name]) for alias, name in trial.aliases.items()]
        watch = _Writes(places_of(self._engine.model))
        with watch:
            self._engine.load(given)
        lost = sorted(trial.complete - watch.complete())
        if lost:
            raise TransferError(
                f"the model's loader did not write all of {shorten(lost)}: this server holds "
                "former weights there; restart it from a checkpoint"
            )
        return names


@dataclass(slots=True)
class Trial:
    """The result of a dry run: a model's loader with tensors without memory.

    `complete` are the parameters that it would fill, `aliases` the further names that it was given.
    """

    complete: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    difference: ManifestDifference = field(default_factory=ManifestDifference)


def try_out(model: nn.Module, offered: Manifest) -> Trial:
    """Run a model's loader on the tensors of a manifest, and drop its writes."""
    watch = _Writes(places_of(model), drops=True)
    unused: list[str] = []

    def tensors() -> Iterator[NamedTensor]:
        for name in offered.index:
            spec = offered.specs[offered.index[name]]
            before = watch.count
            yield name, torch.zeros((), dtype=TORCH_DTYPES[spec.dtype]).expand(spec.shape)
            if watch.count == before:
                unused.append(name)

    mismatched: tuple[str, ...] = ()
    loader: Any = model
    try:
        with torch.no_grad(), watch:
            loader.load_weights(tensors())
    except Exception as exc:  # noqa: BLE001  # the model's own errors, about a name or a shape
        mismatched = (f"{type(model).__name__}.load_weights: {type(exc).__name__}: {exc}",)
    if len(unused) == len(offered.index):
        unused.clear()  # a loader that reads all tensors before it writes
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        unused = [name for name in unused if not name.endswith("lm_head.weight")]
    unused = [name for name in unused if ".experts." not in name]  # they may be other ranks'
    complete = watch.complete()
    missing = () if mismatched else tuple(sorted(watch.parameters() - complete))
    return Trial(complete, offered.aliases, ManifestDifference(missing, tuple(unused), mismatched))


class _Writes(WriteWatch):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts the elements that are written to each parameter; with `drops` nothing is written."""

    def __init__(self, places: dict[int, Place], *, drops: bool = False) -> None:
        super().__init__(places)
        self.count = 0
        self._drops = drops
        self._numel: defaultdict[TensorKey, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = self.written(func, args, kwargs or {})
        for place, tensor in found:
            self.count += 1
            self._numel[place.key] += tensor.numel()
        if found and self._drops:
            return found[0][1]
        return func(*args, **(kwargs or {}))

    def parameters(self) -> frozenset[str]:
        """Return the names of all parameters."""
        return frozenset(
            str(place)
            for place in self.places.values()
            if isinstance(place.tensor, nn.Parameter) and place.numel
        )

    def complete(self) -> frozenset[str]:
        """Return the names of the parameters of which every element was written."""
        return frozenset(
            str(place)
            for place in self.places.values()
            if isinstance(place.tensor, nn.Parameter) and self._numel[place.key] >= place.numel > 0
        )
