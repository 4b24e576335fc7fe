"""What the metadata of a distribution take from one address: its links, and those of its README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Links and pictures of the README that are paths of this repository.
_PATH = re.compile(r"(!?)\[([^]\n]*)\]\((?!https?:|#)([^)\s]+)\)")


class RepositoryMetadata(MetadataHookInterface):
    """URLs and README, by the ``repository`` that pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        home = self.config["repository"]
        pages = f"{home}/blob/main"

        def absolute(match: re.Match[str]) -> str:
            mark, text, path = match.groups()
            return (
                f"{mark}[{text}]({home}/raw/main/{path})" if mark else f"[{text}]({pages}/{path})"
            )

        readme = (Path(self.root) / "README.md").read_text("utf-8")
        text = _PATH.sub(absolute, readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Homepage": home,
            "Documentation": f"{pages}/docs/index.md",
            "Changelog": f"{pages}/CHANGELOG.md",
            "Issues": f"{home}/issues",
        }
