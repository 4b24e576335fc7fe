"""Writes docs/museum.md anew; review it as a difference.

python -m tests.museum.refresh_museum
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.museum.gallery import Museum
from tests.museum.page import PAGE, render

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(render(Museum(Path(folder))), encoding="utf-8")
