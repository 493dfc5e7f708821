"""Sources of one rank: gathered by all ranks together, frozen for one update, or a subset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import msgspec
import torch
import torch.distributed as dist

from weightsync.cuda import devices
from weightsync.errors import ManifestMismatchError, VerificationError, shorten
from weightsync.look import Look
from weightsync.ranks.comm import (
    CancelFlag,
    Cancellation,
    CancelledError,
    RankComm,
    compare_manifests,
)
from weightsync.ranks.replicas import ReplicaCheck
from weightsync.ranks.streams import StreamSource
from weightsync.specs import Manifest, TensorSpec, changes
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes, from_bytes, spec_of
from weightsync.weights.copying.fingerprint import mix64
from weightsync.weights.copying.rank_streams import RankStream
from weightsync.weights.copying.reshard import copy_regions, place_whole, plan_reshard
from weightsync.weights.copying.shards import gather, gathered_device
from weightsync.weights.deltas.change_log import ChangeLog
from weightsync.weights.sources.base import (
    BaseTensors,
    DeclaredSource,
    IterableSource,
    ModuleSource,
    Snapshot,
    SourceExtras,
    SourceMemory,
    SourceWatch,
    SplitSource,
    WeightSource,
    Writers,
    WritingSource,
    checked,
    groups_of,
)
from weightsync.weights.sources.cast import CastSource
from weightsync.weights.sources.declared import Declared
from weightsync.weights.sources.exchange import decode_holdings, encode_holdings, placed_from
from weightsync.weights.sources.finite import CheckFinite, not_finite
from weightsync.weights.sources.packer import check_number, check_whole
from weightsync.weights.sources.wrapping import converted, forget_changes, innermost
from weightsync.weights.tensor_kinds import check_sendable

Pair = tuple[str, torch.Tensor]
NamedMemory = tuple[Sequence[str], Sequence[torch.Tensor]]


class CollectiveSource:
    """A WeightSource whose ranks agree on their status before each group is gathered.

    A rank that fails in the middle of a group still takes part in the group's remaining gathers, so
    that all ranks reach the next agreement and raise there together. All ranks inspect the shards
    that a callable yields before any of them is gathered. Iterating may itself be a collective.
    `replicas`, while it is set, notes each tensor as this rank has it.
    """

    def __init__(self, source: WeightSource, ranks: RankComm) -> None:
        self._source = source
        self._innermost = innermost(source)
        self._ranks = ranks
        self._groups = groups_of(self._innermost.manifest)
        self._cancel_flag = CancelFlag(ranks)
        self._making: Iterator[Pair] = iter(())
        self._rest: Iterator[Pair] = iter(())
        self._not_taken: Iterator[Pair] = iter(())
        self.replicas: ReplicaCheck | None = None
        self._begin(lambda: None)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the source."""
        return self._source.manifest

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the stable tensors of the source, None where it has none."""
        return self._source.stable_tensors()

    def tensors(self) -> Iterator[Pair]:
        """Yield the source's tensors. Called inside `step`, by every rank."""
        self._making = self._make()
        return converted(self._source, self._making)

    @contextmanager
    def step(self, check: Callable[[], None]) -> Iterator[None]:
        """Run the block as one rank's part of a step; if it fails on any rank, raise on all.

        An error of `check` means that this rank has to leave the step, and is raised unchanged. For
        any other error the ranks agree on one, which names its rank. `self.check` is for waits in
        the middle of a group: it calls `check`, and raises when another rank has left.
        """
        self._begin(check)
        self._cancel_flag.next_step()
        cancelled = False
        try:
            self._check_own()
            try:
                yield
            except Cancellation:
                cancelled = True
                for _ in self._making:
                    pass
            self._agree()
            self._over = True
            self._raise_deferred()
        except BaseException as exc:
            if not self._over:
                self._leave(exc)
            raise
        finally:
            self._making = self._rest = self._not_taken = iter(())
        if cancelled:
            raise CancelledError("another rank cancelled the step, and then reported no error")

    @contextmanager
    def apart(self, check: Callable[[], None]) -> Iterator[None]:
        """Run the block as one rank's part of a step in which no rank waits for another one.

        If it fails, the others leave the step when they `check`; the ranks agree on no error.
        """
        self._begin(check)
        self._cancel_flag.next_step()
        try:
            self._check_own()
            yield
        except Cancellation as exc:
            raise CancelledError("another rank cancelled the step") from exc
        except BaseException:
            self._cancel_flag.set()
            raise

    def is_own_error(self, error: BaseException) -> bool:
        """Whether an error of the last step is not that of its `check`."""
        return error is not self._check_error

    def cancel_next(self) -> None:
        """Cancel the next step, which this rank does not take part in, on the other ranks."""
        self._cancel_flag.next_step()
        self._cancel_flag.set()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in the middle of a step. Every rank calls it."""
        try:
            return self._ranks.exchange(payload)
        except Exception:  # the ranks agreed on an error, or a rank is lost
            self._over = True
            raise

    def meet(self) -> None:
        """Wait for all ranks, in the middle of a step. Raises on all where one has failed."""
        self._agree()
        self._raise_deferred()

    def check(self) -> None:
        """Raise when this rank has to leave the step, or Cancellation when another one has left."""
        self._check_own()
        self.check_others()

    def check_others(self) -> None:
        """Raise Cancellation when another rank has left the step."""
        self._cancel_flag.look()

    def _begin(self, check: Callable[[], None]) -> None:
        self._caller_check = check
        self._check_error: BaseException | None = None
        self._deferred: BaseException | None = None
        self._over = False

    def _make(self) -> Iterator[Pair]:
        """Yield the full tensors of the innermost source, with an agreement before each group."""
        source = self._innermost
        shards = source if isinstance(source, IterableSource) else None
        made = source.tensors() if shards is None else shards.shards()
        # Of a source that is split among ranks, this rank may hold some tensors alone.
        pairs = checked(made, source.manifest, or_meta=shards is not None)
        if self.replicas is not None:
            pairs = self.replicas.noting(pairs)
        for group in self._groups:
            self._agree()
            left = len(group)
            while left:
                if shards is None:
                    taken, self._rest = left, islice(pairs, left)
                else:
                    taken = self._take_shards(shards, pairs, left)
                left -= taken
                self._not_taken = islice(pairs, left)
                self._raise_deferred()
                yield from self._rest
        yield from pairs  # none is left; this runs the source's generator to its end

    def _take_shards(self, source: IterableSource, pairs: Iterator[Pair], most: int) -> int:
        """Take consecutive shards, and gather none before all ranks have taken theirs.

        A tensor that is no shard may be overwritten when the next one is requested.
        """
        taken: list[Pair] = []
        for pair in islice(pairs, most):
            taken.append(pair)
            if not source.is_shared(pair[1]):
                break
        if source.is_shared(taken[0][1]):
            self._agree()

        def gathered(pair: Pair) -> Pair:
            return pair[0], source.gather(*pair)

        self._rest = map(gathered, taken)  # an error does not end it: `_leave` continues
        return len(taken)

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        source = self._innermost
        return isinstance(source, IterableSource) and source.is_shared(tensor)

    def _check_own(self) -> None:
        try:
            self._caller_check()
        except BaseException as exc:
            self._check_error = exc
            raise

    def _agree(self) -> None:
        """Wait for the next agreement; an error of `check` meanwhile is deferred until after it.

        So is an interrupt: the others may gather next, with this rank. A second one breaks the
        group.
        """
        words = self._ranks.words
        try:
            self._ranks.agree(look=self._look)
        except Exception:
            self._over = True
            raise
        except BaseException as exc:  # noqa: BLE001  # raised after the agreement in progress
            self._defer(exc)
            try:
                self._ranks.agree(look=self._look, again=self._ranks.words > words)
            except BaseException as other:  # noqa: BLE001  # the first one counts
                self._over = True
                if not isinstance(other, Exception):
                    self._ranks.leave()
                raise exc from None

    def _look(self) -> None:
        if self._deferred is not None:
            return
        try:
            self._check_own()
        except BaseException as exc:  # noqa: BLE001  # raised after the agreement in progress
            self._defer(exc)

    def _defer(self, error: BaseException) -> None:
        self._deferred = error
        self._cancel_flag.set()

    def _raise_deferred(self) -> None:
        if self._deferred is not None:
            raise self._deferred

    def _leave(self, error: BaseException) -> None:
        """Leave the step after an error: cancel it on ranks that wait for a receiver, and agree."""
        self._ranks.note_failure(error)
        self._cancel_flag.set()
        with suppress(Exception):
            for _ in self._rest:
                pass
            for _, tensor in self._not_taken:
                if self._is_shared(tensor):  # before it is gathered, all ranks agree
                    break
        if isinstance(error, Exception) and error is not self._check_error:
            self._ranks.agree(error)
        with suppress(Exception):
            self._ranks.agree(error)


def join_parts(source: SplitSource, ranks: RankComm) -> None:
    """Have the ranks of a source exchange their tensors where they hold different ones. Collective.

    The first rank that holds a tensor broadcasts its bytes to the others of `process_group`. Of a
    DeclaredSource the owner of each part does. Raises ManifestMismatchError for tensors that no
    rank holds.
    """
    if isinstance(source, DeclaredSource):
        _join_declared(source, ranks)
        return
    compare_manifests(source.manifest, ranks, advice="each rank has to describe the whole model")
    held = [json.loads(payload) for payload in ranks.exchange(json.dumps(source.held).encode())]
    if all(places is None for places in held):
        return
    specs = source.manifest.specs
    owners: dict[str, int] = {}
    for rank, places in reversed(list(enumerate(held))):
        chosen = range(len(specs)) if places is None else places
        owners.update((specs[place].name, rank) for place in chosen)
    orphans = [spec.name for spec in specs if spec.name not in owners]
    if orphans:
        raise ManifestMismatchError(
            f"no rank's source holds {shorten(orphans)}; a rank has to hold each tensor",
            missing=orphans,
        )
    if ranks.size > 1:
        index = source.manifest.index
        device = source_device(source)

        def share(name: str, tensor: torch.Tensor) -> torch.Tensor:
            spec = specs[index[name]]
            full, failed = _broadcast(spec, tensor, owners[name], ranks, device)
            if failed is not None:
                raise failed
            return full

        source.join(share)


def _join_declared(source: DeclaredSource, ranks: RankComm) -> None:
    """Have the ranks make full tensors of the parts that each has declared. Collective.

    Raises ManifestMismatchError for elements that no rank holds, ConfigError for parts that overlap
    without being equal.
    """
    bodies = ranks.exchange(msgspec.json.encode(source.own))
    source.describe([msgspec.json.decode(body, type=Declared) for body in bodies])
    held, specs = source.holdings(), source.manifest.specs
    bodies = ranks.exchange(encode_holdings(held, source.manifest))
    placed = placed_from(source.manifest, list(map(decode_holdings, bodies)))
    plan = plan_reshard(placed, place_whole(specs))
    own = {key: i for i, key in enumerate(zip(held.names, held.boxes, strict=True))}
    index = source.manifest.index
    device = source_device(source)

    def assemble(name: str, absent: torch.Tensor) -> torch.Tensor:
        spec = specs[index[name]]
        full = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
        failed: Exception | None = None
        for read in plan.reads_of(name, 0):
            box = read.source.box
            tensor = absent if read.rank != ranks.rank else source.parts[own[name, box]]
            part = TensorSpec(name, spec.dtype, box.local_shape)
            made, why = _broadcast(part, tensor, read.rank, ranks, device)
            failed = failed or why
            copy_regions(read.regions, made, full)
        if failed is not None:
            raise failed
        return full

    source.join(assemble)


def join_snapshots(snapshot: Snapshot, streams: Sequence[RankStream], ranks: RankComm) -> Snapshot:
    """Return a copy of the whole model, made of the copies that the ranks have of their boxes.

    Collective: each rank broadcasts its boxes. The ranks agree first that all have them. A thread
    may do this while the trainer uses its own group, so the bytes go through that of `ranks`.
    """
    own = ranks.together(snapshot.stable_tensors)
    model = streams[0].model
    device = own[0].device if own else torch.device("cpu")
    with torch.inference_mode(False), ranks.unbroken():
        full = [
            torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            for spec in model.specs
        ]
        for stream in streams:
            boxes = zip(stream.indices, stream.boxes, stream.manifest.specs, strict=True)
            for i, (index, box, spec) in enumerate(boxes):
                if not spec.nbytes:
                    continue
                flat = torch.empty(spec.nbytes, dtype=torch.uint8)
                if stream.rank == ranks.rank:
                    flat = contiguous_bytes(own[i]).cpu()
                ranks.spread(flat, stream.rank)
                tensor = from_bytes(flat, spec)
                for inside, part in box.parts():
                    full[index][inside].copy_(tensor[part])
    return Snapshot.of(model, full)


def _broadcast(
    spec: TensorSpec, tensor: torch.Tensor, owner: int, ranks: RankComm, device: torch.device
) -> tuple[torch.Tensor, Exception | None]:
    """Return a tensor of which rank `owner` has the bytes, and an error of this rank. Collective.

    With an error, the tensor has any bytes. The other ranks have what they wait for.
    """
    failed: Exception | None = None
    flat = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
    try:
        if not tensor.is_meta:
            tensor = gather(tensor, TORCH_DTYPES[spec.dtype])
        if ranks.rank == owner:
            flat = contiguous_bytes(tensor.detach().to(device, TORCH_DTYPES[spec.dtype]))
    except Exception as exc:  # noqa: BLE001  # raised when the others have what they wait for
        failed = exc
    if spec.nbytes and ranks.size > 1:
        dist.broadcast(flat, src=ranks.names[owner], group=ranks.process_group)
    return from_bytes(flat, spec), failed


class SourceOfUpdate:
    """The source of one rank during one update; `refresh` begins another one.

    `given` is the user's source, `collective` the same with several ranks. `manifest` is that of
    `connect`, which the source still has to have in each update. `is_made` is True where
    the tensors are made for each update, False where their memory stays. The stable tensors are
    read from the source once, because that takes time for each tensor. Where several engines read
    tensors that are made, each engine reads them in a pass of its own, and the passes are compared.
    `not_finite` names the tensors of this update that hold NaN or infinity, unless `check_finite`
    is off.
    """

    def __init__(
        self,
        given: WeightSource,
        collective: CollectiveSource | None,
        check_finite: CheckFinite = "off",
    ) -> None:
        self.manifest = given.manifest
        self._names = [spec.name for spec in self.manifest.specs]
        stable = given.stable_tensors()
        self.is_made = stable is None
        # Whether the ranks make the tensors together.
        self.is_gathered = self.is_made and collective is not None
        # A ModuleSource has inspected its own, and the source of a stream those of another one.
        self._inspects = not isinstance(given, ModuleSource | StreamSource)
        if stable is not None and self._inspects:
            check_sendable(self._named(stable))
        self.not_finite: list[str] = []
        self._check_finite = check_finite
        self._given = given
        inner = innermost(given)  # a subclass may make others than it is made of
        self._has_own = type(inner) is ModuleSource or inner.stable_tensors() is not None
        self._source: WeightSource = collective or given
        self._watch = SourceWatch()
        if (watched := self._watched(stable)) is not None:
            self._watch.know(*watched)
        self._stable: list[torch.Tensor] | None = None
        self._is_whole = False
        self._compares = False
        self._fingerprints: list[int] = []
        self._passes = 0
        self._differ: list[str] = []
        self._recorded: tuple[ChangeLog, str] | None = None

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the stable tensors of the source, as they were at the first call.

        Raises ManifestMismatchError where the source has another manifest or number of tensors.
        """
        if self._stable is None:
            stable = self._source.stable_tensors()
            self._check_manifest()
            if stable is not None:
                check_number(self.manifest.specs, stable)
                if self._inspects:
                    check_sendable(self._named(stable))
            self._stable = stable
        return self._stable

    def bases(self) -> BaseTensors | None:
        """Return the tensors in whose memory stable ones are; None where these are whole."""
        return SourceMemory(self._given).bases()

    def buffers(self) -> Sequence[torch.Tensor]:
        """Return tensors that share the memory of stable ones, and follow where that is moved."""
        return SourceMemory(self._given).buffers()

    def views(self) -> Sequence[torch.Tensor]:
        """Return views of the bases that are in use: they follow where these are moved."""
        return SourceMemory(self._given).views()

    def counting(self) -> dict[str, list[torch.Tensor]]:
        """Return further tensors on which torch counts writes to stable ones, by these' names.

        Those of torchao, whose inner tensors are stable ones, by their own names.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for name, tensor in SourceMemory(self._given).counting():
            found.setdefault(name, []).append(tensor)
        return found

    @property
    def belong_together(self) -> Mapping[str, str]:
        """The tensors of which none is sent without the other one."""
        return SourceExtras(self._given).belong_together

    def take_merged(self) -> tuple[int, int] | None:
        """Return what the last pass counted of merged adapters; see WeightSource.take_merged."""
        return SourceExtras(self._given).take_merged()

    def _named(self, stable: Sequence[torch.Tensor]) -> Iterator[Pair]:
        """Yield stable tensors with their names; another number of them is refused elsewhere."""
        return zip((spec.name for spec in self.manifest.specs), stable, strict=False)

    def _check_manifest(self) -> None:
        """Raise ManifestMismatchError where the source has another manifest than at `connect`.

        Stable tensors come without names, so that only the manifest shows other ones.
        """
        now = self._given.manifest
        if now is not self.manifest and now.digest != self.manifest.digest:
            changed = changes(self.manifest, now)
            raise ManifestMismatchError(
                f"the source's manifest is no longer that of connect(): {shorten(changed)}; "
                "bring it back, or connect again",
                mismatched=changed,
            )

    def whole_tensors(self) -> list[torch.Tensor] | None:
        """Return the stable tensors, with all of their memory; looked at once for each update.

        Raises ManifestMismatchError for tensors that are offloaded or of another shape.
        """
        stable = self.stable_tensors()
        if stable is not None and not self._is_whole:
            look = self._watch.look_of(stable)
            check_whole(self.manifest.specs, stable, look)
            if look is not None and not look.known:
                self._watch.note_forms(stable)
            self._is_whole = True
        return stable

    @property
    def has_own_tensors(self) -> bool:
        """Whether `own_tensors` returns any: else they are known only as the source yields them."""
        return self._has_own

    def own_tensors(self) -> Sequence[torch.Tensor]:
        """Return this rank's tensors of the innermost source, not cast and not gathered."""
        inner = innermost(self._given)
        made_of = inner.made_of()[1] if type(inner) is ModuleSource else inner.stable_tensors()
        return made_of or ()

    def tensors_to_sample(self) -> list[torch.Tensor] | None:
        """Return the tensors before a cast; None where they are made in any other way."""
        if not self.is_made:
            return self.whole_tensors()
        given = self._given  # a subclass of a ModuleSource may make others
        if type(given) is ModuleSource:
            return given.cast_tensors()
        if isinstance(given, StreamSource):
            return given.cast_tensors()
        return list(given.cast_tensors() or ()) or None if isinstance(given, CastSource) else None

    def tensors(self) -> Iterator[Pair]:
        """Yield the tensors of the source.

        Raises VerificationError as `look` does, ManifestMismatchError where they are others.
        """
        self._check_manifest()
        pairs = self._compared() if self._compares else self._source.tensors()
        pairs = checked(pairs, self.manifest)
        if self._recorded is not None:
            (changes, weights_id), self._recorded = self._recorded, None
            pairs = changes.recorded(weights_id, pairs)
        return self._looked_at(pairs) if self.is_made and self._check_finite != "off" else pairs

    @property
    def writes_pieces(self) -> bool:
        """Whether the source writes its tensors in pieces; see WritingSource."""
        return isinstance(self._given, WritingSource) and self._given.writes_pieces

    def writers(self) -> Writers | None:
        """Return what writes the tensors of the source to memory that it is given.

        None where it does not, and where tensors are looked at, compared, recorded or gathered.
        """
        looks = self._compares or self._recorded is not None or self._check_finite != "off"
        if looks or self.is_gathered or not isinstance(self._given, WritingSource):
            return None
        self._check_manifest()
        return self._given.writers()

    def record(self, changes: ChangeLog, weights_id: str) -> None:
        """Record the lines of the tensors as the next pass yields them."""
        self._recorded = changes, weights_id

    def look(self, pairs: Iterable[Pair]) -> None:
        """Note which of `pairs` hold NaN or infinity; raise VerificationError where it is asked.

        Nothing is done if `check_finite` is off.
        """
        if self._check_finite == "off":
            return
        names, tensors = [], []
        for name, tensor in pairs:
            names.append(name)
            tensors.append(tensor)
        self.not_finite += not_finite(names, tensors)
        if self.not_finite and self._check_finite == "raise":
            raise VerificationError(
                f"{len(self.not_finite)} tensors hold NaN or infinity: {shorten(self.not_finite)}; "
                "the update is aborted",
                names=self.not_finite,
            )

    def look_before(self) -> None:
        """Look at tensors whose memory stays, before any is read, where that may raise."""
        if self._check_finite == "raise":
            self._look_at_stable()

    def look_meanwhile(self) -> None:
        """Look at tensors whose memory stays, while they are read, where that only warns."""
        if self._check_finite == "warn":
            self._look_at_stable()

    def _look_at_stable(self) -> None:
        if not self.is_made:
            stable = self.stable_tensors() or ()
            self.look((spec.name, t) for spec, t in zip(self.manifest.specs, stable, strict=True))

    def _looked_at(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            self.look([pair])
            yield pair

    def refresh(self, *, passes: int = 1) -> None:
        """Forget the last update; `passes` is how often the next one reads the tensors."""
        self._watch.end()  # of an update that did not begin on all ranks: its look is of that time
        self._stable, self._is_whole = None, False
        self._compares = passes > 1
        self._fingerprints, self._passes, self._differ = [], 0, []
        self._recorded = None
        self.not_finite = []

    def drain(self, check: Callable[[], None]) -> None:
        """Take part in making every tensor of a pass that other ranks read."""
        self._given.stable_tensors()  # raises, before any rank gathers, where a module has changed
        for _ in self.tensors():
            check()

    def watch(
        self, pairs: Sequence[Pair] | None, *, reads: bool, counting: Sequence[Pair] = ()
    ) -> None:
        """Begin to detect changes of the memory from which this rank's tensors are read.

        `pairs` are sent instead of the source's tensors, and torch may count writes to them on the
        `counting` ones. `reads` is False where no engine of this rank reads the source.
        """
        given = self._given
        forget_changes(given)
        if pairs is not None:
            names, tensors = [name for name, _ in pairs], [tensor for _, tensor in pairs]
            self._watch.begin(names, tensors, counting)
        elif reads or self.is_made:
            stable = None if self.is_made else self.stable_tensors()
            if (watched := self._watched(stable)) is not None:
                self._watch.begin(*watched, SourceMemory(given).counting())
            if stable is not None:
                self._check_watched()

    def _check_watched(self) -> None:
        """Look at the stable tensors, with what the watch has seen of them."""
        try:
            self.whole_tensors()
        except Exception:
            self._watch.end()
            raise

    def look_of(self, tensors: Sequence[torch.Tensor]) -> Look | None:
        """Return what this update has seen of these stable tensors; see `SourceWatch.look_of`."""
        return self._watch.look_of(tensors)

    def note_places(self) -> None:
        """Note where the watched tensors are now; see `SourceWatch.note_places`."""
        self._watch.note_places()

    def _watched(self, stable: Sequence[torch.Tensor] | None) -> NamedMemory | None:
        """Return names and tensors whose memory is read: the stable ones, or what they are made of.

        None where the source says neither.
        """
        if stable is not None:
            return self._names, stable
        return SourceExtras(self._given).made_of()

    def end_watch(self, is_adopted: Callable[[int, int], bool] = lambda _, __: False) -> list[str]:
        """Return the names of tensors that changed since `watch`; see `SourceWatch.end`."""
        changed = self._watch.end(is_adopted) + self._differ
        return [*changed, *SourceExtras(self._given).changed]

    def _compared(self) -> Iterator[Pair]:
        self._passes += 1
        for i, (name, tensor) in enumerate(self._source.tensors()):
            fingerprint = mix64(contiguous_bytes(tensor.detach()))
            if self._passes == 1:
                self._fingerprints.append(fingerprint)
            elif i >= len(self._fingerprints) or self._fingerprints[i] != fingerprint:
                self._differ.append(name)
            yield name, tensor


class Subset:
    """WeightSource of these pairs alone."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.manifest = manifest_of(pairs)
        self._pairs = pairs

    def stable_tensors(self) -> None:
        return None

    def tensors(self) -> Iterator[Pair]:
        return iter(self._pairs)


def manifest_of(pairs: Iterable[Pair]) -> Manifest:
    """Return the manifest of these pairs."""
    return Manifest(tuple(spec_of(name, tensor) for name, tensor in pairs))


def source_device(source: WeightSource) -> torch.device:
    """Return the device of the source's tensors, as far as it is known without making them.

    What a source does not say is the current GPU of a process that uses one.
    """
    stable = source.stable_tensors()
    if stable:
        return stable[0].device
    inner = innermost(source)
    extras = SourceExtras(inner)
    types = extras.device_types
    if not types and (made_of := extras.made_of()) is not None:
        types = {gathered_device(tensor) for tensor in made_of[1]}
    if types and "cuda" not in types:
        return torch.device("cpu")
    return devices.current() or torch.device("cpu")
