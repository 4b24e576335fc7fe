"""A hook of `make docs`: what pages link to beside docs/ is named on the site, not linked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to folders and to files outside of docs/ become their text; dead ones are kept."""
    folder = Path(page.file.abs_src_path).parent

    def kept(found: re.Match[str]) -> str:
        target = (folder / found[2].partition("#")[0]).resolve()
        is_page = target.is_relative_to(DOCS) and not target.is_dir()
        return found[0] if is_page or not target.exists() else found[1]

    return re.sub(r"\[([^\]]*)\]\(([^)\s:#][^)\s:]*)\)", kept, markdown)
