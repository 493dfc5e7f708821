"""Sources of one update on one rank: the model, a delta of it, or tensors of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from weightsync.errors import ConfigError, shorten
from weightsync.ranks.comm import RankComm, compare_manifests
from weightsync.ranks.commands import LINES_DIGEST, DeltaTask
from weightsync.ranks.replicas import ReplicaCheck
from weightsync.ranks.sources import CollectiveSource, Pair, SourceOfUpdate, Subset, manifest_of
from weightsync.specs import Manifest
from weightsync.weights.copying.shards import gather
from weightsync.weights.deltas.change_log import ChangeLog, DeltaSource, pairs_of
from weightsync.weights.inner_tensors import Expansion
from weightsync.weights.sources.base import NamedTensors, WeightSource, checked_pairs
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.tensor_kinds import check_readable
from weightsync.wire.messages import DeltaTerms


class ModelComparison:
    """Comparison of the ranks' replicas of the model, in one pass over it.

    Tensors whose memory is known are noted while the receivers read it, others as they are yielded;
    where each rank `sends_streams` of its own, in a pass of their own.
    """

    def __init__(
        self,
        check: ReplicaCheck,
        model: SourceOfUpdate,
        collective: CollectiveSource | None,
        names: Sequence[str],
        holdings: Holdings | None = None,
    ) -> None:
        self.sends_streams = False
        self.has_replicas = True
        self._holdings = holdings
        self._check = check
        self._model = model
        self._collective = collective
        self._names = names
        self._is_due = False

    @property
    def is_next(self) -> bool:
        """Whether the next update compares the replicas."""
        # Each rank would read all of its boxes for it, and some sources make them anew.
        nothing_to_compare = self.sends_streams and not self.has_replicas
        return not nothing_to_compare and self._check.wants(self._names)

    def begin(self) -> None:
        """Prepare to compare the replicas, if that is to be done."""
        self._is_due = self.is_next
        self._check.begin()
        if self._collective is not None:
            as_yielded = self._is_due and not (self._model.has_own_tensors or self.sends_streams)
            self._collective.replicas = self._check if as_yielded else None

    def note(self) -> None:
        """Note this rank's tensors, where their memory is known."""
        if not self._is_due:
            return
        if self._model.has_own_tensors:
            self._check.note_all(self._model.own_tensors())
        elif self.sends_streams and self._holdings is not None:
            held = self._holdings
            places = {name: i for i, name in enumerate(self._names)}
            boxes = zip(held.boxes, held.pairs(), strict=True)
            self._check.note_boxes((places[name], box, tensor) for box, (name, tensor) in boxes)

    def end(self) -> None:
        """Compare, after a step that ended well on all ranks. Collective."""
        if self._collective is not None:
            self._collective.replicas = None
        if self._is_due:
            self._is_due = False
            self._check.compare(self._names)


class UpdateSource:
    """Source of one update on one rank, from its Begin to its End; this class sends the model.

    `is_read`: an engine of this rank reads it. `is_gathered`: the ranks gather it together, each
    tensor once for every engine. `in_place`: engines may read the memory of the tensors.
    `verifies`: the engines' fingerprints verify it. `manifest` is None for that of the model.
    `comparison` is None where the ranks' replicas were compared before.
    """

    in_place = True
    verifies = True

    def __init__(
        self, model: SourceOfUpdate, comparison: ModelComparison | None, *, is_read: bool
    ) -> None:
        self.is_read = is_read
        self._model = model
        self._comparison = comparison

    @property
    def is_gathered(self) -> bool:
        """Whether the ranks gather the tensors together."""
        return self._model.is_gathered

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of what is sent; None for that of the model."""
        return None

    @property
    def terms(self) -> DeltaTerms | None:
        """The terms of a delta, for the receivers."""
        return None

    @property
    def sent_lines(self) -> tuple[int, int]:
        """The changed lines that a delta sent, and the bytes of its packets."""
        return 0, 0

    @property
    def digests(self) -> dict[str, str | None]:
        """The fingerprint of the model's lines, where they were recorded."""
        return {}

    def open(self) -> WeightSource:
        """Return the source that the engines read. The model's tensors are watched before."""
        if self._comparison is not None:
            self._comparison.begin()
        if self.is_read:
            self._model.look_before()  # a receiver in place reads it
        return self._model

    def accompany(self) -> None:
        """Do this rank's work on the source while the receivers read."""
        if self.is_read:
            self._model.look_meanwhile()
        if self._comparison is not None:
            self._comparison.note()

    def transferred(self) -> None:
        """Do what all ranks do together after the transfer. Collective."""
        if self._comparison is not None:
            self._comparison.end()


class RecordedUpdate(UpdateSource):
    """The model, whose lines are recorded: later deltas can build on it.

    `lines` is the key of their fingerprint: that of one stream says nothing of another.
    """

    def __init__(
        self,
        model: SourceOfUpdate,
        comparison: ModelComparison | None,
        *,
        is_read: bool,
        task: DeltaTask,
        log: Callable[[], ChangeLog],
        lines: str = LINES_DIGEST,
    ) -> None:
        super().__init__(model, comparison, is_read=is_read)
        self._lines = lines
        self._task = task
        self._log = log
        self._changes: ChangeLog | None = None

    @property
    def digests(self) -> dict[str, str | None]:
        """The fingerprint of the lines; nothing on a rank that no receiver reads."""
        return {} if self._changes is None else {self._lines: self._changes.fingerprint}

    def open(self) -> WeightSource:
        """Have the lines of tensors that are made recorded as an engine reads them."""
        source = super().open()
        if self.is_read:
            self._changes = self._log()
            if self._model.is_made:
                self._model.record(self._changes, self._task.weights_id)
        return source

    def accompany(self) -> None:
        """Record the lines of stable tensors while the receivers read them."""
        super().accompany()
        if self._changes is not None and not self._model.is_made:
            self._changes.record(self._task.weights_id, pairs_of(self._model))


class DeltaUpdate(RecordedUpdate):
    """Delta of the model against the weights that the receivers hold.

    The receivers verify it as a whole, by the fingerprint of the model. `one_pass`: one engine
    reads it, so that it can be coded while it is found.
    """

    in_place = False
    verifies = False

    def __init__(
        self,
        model: SourceOfUpdate,
        comparison: ModelComparison | None,
        *,
        is_read: bool,
        task: DeltaTask,
        log: Callable[[], ChangeLog],
        lines: str = LINES_DIGEST,
        one_pass: bool,
    ) -> None:
        super().__init__(model, comparison, is_read=is_read, task=task, log=log, lines=lines)
        self._one_pass = one_pass
        self._delta: DeltaSource | None = None

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the packets."""
        return None if self._delta is None else self._delta.manifest

    @property
    def terms(self) -> DeltaTerms | None:
        """The terms of the delta; None on a rank that no receiver reads."""
        return None if self._delta is None else self._delta.terms

    @property
    def sent_lines(self) -> tuple[int, int]:
        """The changed lines that were sent, and the bytes of the packets."""
        return (0, 0) if self._delta is None else (self._delta.written_lines, self._delta.nbytes)

    def open(self) -> WeightSource:
        """Return the packets, which are made as the engines read them."""
        model = UpdateSource.open(self)
        if not self.is_read:
            return model
        self._changes, task = self._log(), self._task
        self._delta = DeltaSource(
            self._changes,
            self._model,
            task.weights_id,
            task.bases,
            task.expected,
            scrub=task.scrub,
            by_value=task.by_value and self._one_pass,
            to_shards=task.to_shards,
            gives_up=task.gives_up,
        )
        return self._delta

    def accompany(self) -> None:
        """Note replicas; the delta itself finds and records what has changed."""
        UpdateSource.accompany(self)


class PairsUpdate(UpdateSource):
    """Tensors that the caller gave, which every rank gives alike."""

    is_gathered = False

    def __init__(
        self,
        model: SourceOfUpdate,
        given: NamedTensors,
        ranks: RankComm,
        replicas: ReplicaCheck,
        *,
        is_read: bool,
    ) -> None:
        super().__init__(model, None, is_read=is_read)
        self._given = given
        self._ranks = ranks
        self._replicas = replicas
        self._pairs: list[Pair] = []
        self._counting: list[Pair] = []

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of these tensors."""
        return manifest_of(self._pairs)

    def prepare(self, step: Callable[[], AbstractContextManager[None]]) -> None:
        """Take this rank's tensors, not gathered. Raises where the ranks differ."""
        self._replicas.begin()
        with step():
            expansion = Expansion()
            self._pairs = list(checked_pairs(self._given, expansion=expansion))
            self._counting = [(n, t) for n, found in expansion.wrappers.items() for t in found]
            for name, tensor in self._pairs:
                check_readable(name, tensor)
            _check_together([name for name, _ in self._pairs], self._model.belong_together)
        if self._ranks.size > 1:
            advice = "every rank has to send() the same"
            compare_manifests(manifest_of(self._pairs), self._ranks, advice=advice)
            names = [name for name, _ in self._pairs]
            if self._replicas.wants(names):
                with step():
                    self._replicas.note_all(tensor for _, tensor in self._pairs)
                self._replicas.compare(names)

    def open(self) -> WeightSource:
        """Watch these tensors, and return them gathered."""
        self._model.watch(self._pairs, reads=self.is_read, counting=self._counting)
        # All ranks gather before one looks: that may raise, and a rank has a shard alone.
        gathered = [(name, gather(tensor)) for name, tensor in self._pairs]
        if self.is_read:
            self._model.look(gathered)
        return Subset(gathered)

    def accompany(self) -> None:
        """Do nothing: they were looked at before."""


def _check_together(names: Sequence[str], pairs: Mapping[str, str]) -> None:
    """Raise ConfigError where one tensor of a pair is sent alone."""
    given = set(names)
    alone = [
        f"{one} without {other}"
        for first, second in pairs.items()
        for one, other in ((first, second), (second, first))
        if one in given and other not in given
    ]
    if alone:
        raise ConfigError(
            f"a quantized weight and its scale are sent in one call: {shorten(alone)}"
        )
