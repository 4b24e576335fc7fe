"""Writes docs/comparison.md and its pictures from the committed results of trainings.

``PYTHONPATH=. python docs/refresh_comparison.py`` takes seconds; nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.trained.page import PICTURES, load_results, page
from benchmarks.trained.pictures import charts
from moegeom.document.paper import write_figure

DOCS = Path(__file__).resolve().parent


def main() -> None:
    """The page, and a picture for each name in PICTURES."""
    results = load_results()
    (DOCS / "comparison.md").write_text(page(results), encoding="utf-8")
    if "quick" in results:
        drawn = charts(results["quick"])
        for name in PICTURES:
            write_figure(drawn[name], DOCS / "pictures" / f"{name}.svg")


if __name__ == "__main__":
    main()
