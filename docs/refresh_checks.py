"""Writes docs/checks.md from the docstrings of the checks: `python docs/refresh_checks.py`."""

from __future__ import annotations

from pathlib import Path

from moegeom.checks.pages import all_pages
from moegeom_cli.check_pages import page_as_markdown

HEAD = (
    "# Checks\n\n"
    "Written by `docs/refresh_checks.py` from the files in `moegeom/checks/catalogue`; "
    "`moegeom check --explain CODE` prints the same. How the gate decides: [gate.md](gate.md). "
    "What the checks find and miss: [museum.md](museum.md)."
)


def checks_page() -> str:
    """The whole page."""
    return "\n\n".join([HEAD, *map(page_as_markdown, all_pages())]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("checks.md").write_text(checks_page(), encoding="utf-8")
