"""Prints, as JSON, the result of each import when some packages are missing.

`python imports.py CASES`, where CASES is a JSON list of [missing packages, module or attribute]; a
result is null, or the type and text of the error. torch is imported once, for all of them.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from types import ModuleType


class Missing:
    """An import finder that hides some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise the error of an import of a missing package."""
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def attempt(missing: str, wanted: str, answer: Connection) -> None:
    """Import each `module` or `module:attribute` of `wanted`. Called in a process of its own."""
    packages = missing.split()
    sys.meta_path.insert(0, Missing(packages))
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
    try:
        for part in wanted.split():
            module, _, attribute = part.partition(":")
            loaded = importlib.import_module(module)
            if attribute:
                getattr(loaded, attribute)
    except Exception as exc:  # noqa: BLE001 - the error is the result
        answer.send([type(exc).__name__, str(exc)])
    else:
        answer.send(None)


def main() -> None:
    """Run every case in a fork of this process, which has only torch and the core."""
    for name in ("torch", "weightsync"):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    answers = []
    for missing, wanted in json.loads(sys.argv[1]):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=attempt, args=(missing, wanted, theirs))
        process.start()
        theirs.close()
        try:
            answers.append(ours.recv() if ours.poll(60) else ["Timeout", f"{wanted} took a minute"])
        except EOFError:
            answers.append(["Crash", f"importing {wanted} ended the process"])
        finally:
            process.kill()
            process.join()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
