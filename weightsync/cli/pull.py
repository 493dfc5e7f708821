"""`weightsync pull`: write the weights that a server uses as a safetensors checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from weightsync.cli.app import require
from weightsync.cli.options import (
    CaFileOption,
    TokenFileOption,
    TokenOption,
    choose_tls,
    choose_token,
    seconds,
)
from weightsync.cli.output import ending, print_json
from weightsync.cli.terminal import text_console
from weightsync.errors import ConfigError
from weightsync.receiver import WeightReceiver, fetch
from weightsync.specs import Manifest
from weightsync.tensors import from_bytes
from weightsync.weights.copying import arena
from weightsync.weights.copying.boxes import Boxes
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sinks.base import (
    Apply,
    ArenaTarget,
    HookSink,
    LoadTarget,
    NamedTensor,
    WeightSink,
)


def pull(  # noqa: PLR0913, PLR0917  # one parameter per option
    url: Annotated[str, typer.Argument(help="of the server", show_default=False)],
    directory: Annotated[
        Path, typer.Argument(help="to write; it must be new, or empty", show_default=False)
    ],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    backend: Annotated[
        str, typer.Option(help="backend: auto, ipc, tcp or one of your own")
    ] = "auto",
    timeout: Annotated[float, seconds("seconds without progress")] = 60.0,
    rank: Annotated[
        str | None,
        typer.Option(metavar="R/N", help="write the rows of rank R of N alone; R begins at 0"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write the weights that a server uses as a safetensors checkpoint."""
    require("pull", "safetensors")
    with ending(as_json=json_):
        part = None if rank is None else _part(rank)
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is not empty; give a new directory")
        secret, verify_tls = choose_token(token, token_file), choose_tls(ca_file, [url])
        with _new_files(directory) as written:
            sink = _CheckpointSink(written) if part is None else _RowsSink(written, *part)
            receiver = WeightReceiver(sink, apply="staged")
            try:
                report = fetch(
                    receiver,
                    url,
                    backend=backend,
                    token=secret,
                    verify_tls=verify_tls,
                    timeout_s=timeout,
                )
            finally:
                receiver.close()
        if json_:
            print_json({**report.to_dict(), "directory": str(directory)})
            return
        labelled = f" ({report.label})" if report.label else ""
        text_console().print(
            f"pulled version {report.version}{labelled} by {report.path}: "
            f"{report.nbytes / 1e6:.1f} MB in {report.tensors} tensors to {directory}"
        )


def _part(rank: str) -> tuple[int, int]:
    """Return the rank and the number of ranks. Raises ConfigError for other text than `R/N`."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", rank)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--rank is R/N, from 0/N to N-1/N, and this is {rank!r:.60}")
    return int(found[1]), int(found[2])


@contextmanager
def _new_files(directory: Path) -> Iterator[Path]:
    """Yield a directory whose files are moved to `directory`, the index last, if all goes well."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
    moved: list[Path] = []
    try:
        yield partial
        for file in sorted(partial.iterdir(), key=lambda path: path.suffix == ".json"):
            moved.append(directory / file.name)
            file.rename(moved[-1])
    except BaseException:
        for file in moved:
            file.unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # somebody else has put something there
            for path in made:
                path.rmdir()
        raise
    partial.rmdir()


class _CheckpointSink(HookSink):
    """Writes a checkpoint: one file, or several and an index, with every name of tied tensors."""

    def __init__(self, directory: Path) -> None:
        super().__init__(self._write)
        self._directory = directory
        self._aliases: Mapping[str, str] = {}

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """See WeightSink."""
        self._aliases = layout.manifest.aliases
        return super().open_target(layout, apply)

    def _write(self, pairs: Iterable[NamedTensor]) -> None:
        tensors = {name: tensor if tensor.numel() else tensor.clone() for name, tensor in pairs}
        # Tensors that share memory would be written under one name.
        tensors |= {alias: tensors[name].clone() for alias, name in self._aliases.items()}
        save_torch_state_dict(tensors, self._directory)
        for file in self._directory.iterdir():
            file.chmod(0o644)


class _RowsSink(WeightSink):
    """Writes one rank's rows of every tensor, as FSDP2's `Shard(0)` cuts them, to one file.

    A rank has at most `ceil(rows / ranks)` of them, and none where there are too few. Tensors
    without a dimension are whole on every rank.
    """

    takes_parts = False

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank, self._ranks = rank, ranks

    @property
    def device(self) -> torch.device:
        """See WeightSink."""
        return torch.device("cpu")

    def boxes(self, offered: Manifest) -> list[tuple[int, Slice]]:
        """Return the rows of this rank."""
        return self._rows(offered).boxes

    def staged_nbytes(self, layout: StreamLayout) -> int:
        """Return the bytes of this rank's rows."""
        return self._rows(layout.manifest).nbytes(layout.manifest)

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """See WeightSink."""
        return _RowsTarget(self, self._rows(layout.manifest), layout.manifest)

    def write(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the rows, and which of how many they are: `[begin, end, rows of the tensor]`."""
        whole = {spec.name: spec.shape for spec in manifest.specs}
        rows = {name: [*self._span(shape), shape[0]] for name, shape in whole.items() if shape}
        own = dict(tensors)
        for alias, name in manifest.aliases.items():
            own[alias] = tensors[name].clone()
            if name in rows:
                rows[alias] = rows[name]
        file = self._directory / f"rank-{self._rank:05}-of-{self._ranks:05}.safetensors"
        told = {"rank": str(self._rank), "ranks": str(self._ranks), "rows": json.dumps(rows)}
        save_file(own, file, metadata={"format": "pt", **told})
        file.chmod(0o644)

    def _rows(self, manifest: Manifest) -> Boxes:
        return Boxes([(i, self._box(spec.shape)) for i, spec in enumerate(manifest.specs)])

    def _box(self, shape: tuple[int, ...]) -> Slice:
        whole = Slice.whole_of(shape)
        return Slice(shape, ((self._span(shape),), *whole.spans[1:])) if shape else whole

    def _span(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the first row of this rank, and the one after its last."""
        each = -(-shape[0] // self._ranks)
        return min(shape[0], self._rank * each), min(shape[0], (self._rank + 1) * each)


class _RowsTarget(ArenaTarget):
    """Stages the rows; `commit` writes them."""

    def __init__(self, sink: _RowsSink, rows: Boxes, manifest: Manifest) -> None:
        self._sink, self._rows, self._manifest = sink, rows, manifest
        nbytes = rows.nbytes(manifest)
        self.memory = rows.in_arena(manifest, arena.allocate(nbytes, sink.device))
        self.peak_extra_nbytes = nbytes

    def commit(self) -> None:
        assert self.memory is not None
        specs = self._rows.specs(self._manifest)
        flats = zip(specs, self.memory.tensors, strict=True)
        self._sink.write(self._manifest, {spec.name: from_bytes(f, spec) for spec, f in flats})
