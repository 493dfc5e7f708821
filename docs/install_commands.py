"""The commands in pages and examples that install weightsync: `python docs/install_commands.py`.

It makes them those of `weightsync/errors.py`. A release changes INSTALL and INSTALL_PLACE there,
and then runs this. examples/deploy and the workflows are left out: they have a clone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from weightsync.errors import INSTALL, INSTALL_PLACE

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(
    r"pip install (?:'(?:weightsync|\.)\[(?P<extras>[\w,-]+)\]'|(?:weightsync|\.)(?=[`\s]))"
    r"(?P<quote>`?)(?:(?P<gap>\s+(?:# )?)(?P<place>in\s+a\s+clone\s+of\s+weightsync))?"
)
"""As in prose; in a block of commands `# ` comes before the place."""


def texts() -> Iterator[Path]:
    """Yield the pages, templates and examples that users read."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / ".github").glob("*.md"))
    yield from sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*"))
    yield from sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())


def rewritten(text: str, install: str = INSTALL, place: str = INSTALL_PLACE) -> str:
    """Return `text` with every command as `install` and `place` say it; wrapped lines stay so."""
    without_extras = re.sub(r"'(\S+)\[.*", r"\1", install)

    def command(found: re.Match[str]) -> str:
        line = install.format(extras=found["extras"]) if found["extras"] else without_extras
        line += found["quote"]
        if not place:
            return line
        is_command = not found["quote"] and text.endswith("\n", 0, found.start())
        gap = found["gap"] or ("  # " if is_command else " ")
        same = found["place"] and found["place"].split() == place.split()
        return line + gap + (found["place"] if same else place)

    return COMMAND.sub(command, text)


def main() -> None:
    """Rewrite all texts."""
    for path in texts():
        text = path.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
