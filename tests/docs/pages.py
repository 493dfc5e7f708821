"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One block: its page (a path in the repository), its language, its text, its first line."""

    page: str
    language: str
    text: str
    line: int

    @property
    def first(self) -> str:
        return self.text.strip().partition("\n")[0].strip()


def pages() -> list[str]:
    """README, the other pages that the site takes from the root, and everything in docs/."""
    root = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md"]
    return root + sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        language = match[2].strip().partition(" ")[0]
        found.append(Block(page, language, match[3], line))
    assert text.count("\n```") + text.startswith("```") == 2 * len(found), f"{page}: an open block"
    return found
