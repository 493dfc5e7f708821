"""`weightsync pull`: write the weights that a server uses as a safetensors checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import save_torch_state_dict

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
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import Apply, HookSink, LoadTarget, NamedTensor


def pull(
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
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write the weights that a server uses as a safetensors checkpoint."""
    require("pull", "safetensors")
    with ending(as_json=json_):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is not empty; give a new directory")
        secret, verify_tls = choose_token(token, token_file), choose_tls(ca_file, [url])
        with _new_files(directory) as written:
            receiver = WeightReceiver(_CheckpointSink(written), apply="staged")
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
