"""A hook of `make docs`: what pages link to beside docs/ is named on the site, not linked, but for
folders of which the site has a page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

#: The page of a folder, which is written with the site.
PAGE_OF = {DOCS.parent / "tests/museum": DOCS / "museum.md"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to folders and to files outside of docs/ become their text; dead ones are kept."""
    folder = Path(page.file.abs_src_path).parent

    def kept(found: re.Match[str]) -> str:
        target = (folder / found[2].partition("#")[0]).resolve()
        if target in PAGE_OF:
            return f"[{found[1]}]({Path(os.path.relpath(PAGE_OF[target], folder)).as_posix()})"
        is_page = target.is_relative_to(DOCS) and not target.is_dir()
        return found[0] if is_page or not target.exists() else found[1]

    return re.sub(r"\[([^\]]*)\]\(([^)\s:#][^)\s:]*)\)", kept, markdown)
