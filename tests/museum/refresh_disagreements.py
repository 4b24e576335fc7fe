"""Writes docs/disagreements.md anew; review it as a difference.

python -m tests.museum.refresh_disagreements
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.museum.disagreement import Hall
from tests.museum.disagreements_page import PAGE, render

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(render(Hall(Path(folder))), encoding="utf-8")
