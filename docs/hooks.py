"""Hooks of the site: pages outside docs/, and links that work on the site and in the repository.

README.md is the site's first page; SECURITY.md, CONTRIBUTING.md, CHANGELOG.md, CODE_OF_CONDUCT.md
and each program of examples/ are pages too. Nothing is copied into docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
KEPT_ELSEWHERE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
LANGUAGES = {".py": "python", ".sh": "bash"}
LINK = re.compile(
    r"""(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!https?://|mailto:|#)"""
    r"""([^)"#\s]+)((?:#[^)"\s]*)?)(?=[)"])"""
)
"""A link in Markdown, or the file of a picture; its path and its fragment."""
NAME = re.compile(r"(?<=<code>)[\w/.:(),=]{25,}(?=</code>)")
FETCHED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is not in docs/."""
    for name, page in KEPT_ELSEWHERE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_with_links(text, "README.md")))
    for program in _programs():
        page = f"examples/{program.stem}.md"
        files.append(File.generated(config, page, content=_as_page(program)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/ to the pages above."""
    own = page.file.generated_by is None
    return _with_links(markdown, f"docs/{page.file.src_uri}") if own else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Allow line breaks in long names, so that the columns beside them fit on the screen."""
    return NAME.sub(lambda name: re.sub(r"(/|::|_|\.)", r"\1<wbr>", name[0]), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that makes a browser load a file from another server."""
    found = FETCHED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {found[0]}")
    return output


def _with_links(markdown: str, source: str) -> str:
    """Rewrite links and pictures of `source`, a path in the repository, to their paths on the site.

    A link to a file that is no page stays as it is; the strict build then names it.
    """
    folder = (ROOT / source).parent
    here = "/".join([".."] * (len(Path(source).parts) - 2)) if source.startswith("docs/") else ""

    def rewrite(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        page = _page_of(target)
        return f"{here}/{page}{match[2]}".lstrip("/") if page else match[0]

    return LINK.sub(rewrite, markdown)


def _page_of(target: Path) -> str | None:
    if not target.is_relative_to(ROOT) or not target.exists():
        return None
    path = target.relative_to(ROOT)
    if str(path) in KEPT_ELSEWHERE:
        return KEPT_ELSEWHERE[str(path)]
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    if path == Path("examples"):
        return "examples/trainer.md"
    return f"examples/{path.stem}.md" if path.parts[0] == "examples" else None


def _programs() -> list[Path]:
    return sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in LANGUAGES)


def _as_page(program: Path) -> str:
    text = program.read_text(encoding="utf-8")
    return f"# examples/{program.name}\n\n```{LANGUAGES[program.suffix]}\n{text}```\n"
