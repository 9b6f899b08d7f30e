"""What the site needs of the repository around docs/: files that pages link to, and three pages.

On the site nothing lies above docs/. A link to `../X` leads to a copy of X under `project/`; a link
to a folder or to the README is text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the project and every file above docs/ that a page links to."""
    for name in PROJECT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    linked: set[str] = set()
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PROJECT)]:
        for _, _, link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            name = outside(page, link)
            if name and not name.endswith(".md") and (ROOT / name).is_file():
                linked.add(name)
    for name in sorted(linked):
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def outside(page: Path, link: str) -> str | None:
    """A file of the repository that is no page of the site, by its path there; else None."""
    if "://" in link:
        return None
    folder = page.parent.relative_to(ROOT).as_posix()
    name = posixpath.normpath(posixpath.join(folder, link))
    if name.startswith("docs/") or name in PROJECT:
        return None
    return name


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links that leave docs/ into ones of the site."""
    path = Path(page.file.abs_src_path)

    def moved(found: re.Match[str]) -> str:
        image, text, link, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in link:
            return found[0]
        if (name := outside(path, link)) is None:
            target = posixpath.normpath(
                posixpath.join(path.parent.relative_to(ROOT).as_posix(), link)
            ).removeprefix("docs/")
            return f"{image}[{text}]({target}{anchor})"
        if (ROOT / name).is_file() and not name.endswith(".md"):
            return f"{image}[{text}](project/{name})"
        return text

    return LINK.sub(moved, markdown)
