"""What commands show that folded one part of a scan."""

from __future__ import annotations

from pathlib import Path

from moegeom_cli.groups import ScreenOptions


def show_part(screen: ScreenOptions, written: Path) -> None:
    """The part, and how parts become results."""
    from moegeom.engine.parts import read_part
    from moegeom.studies.parts import part_document

    screen.show(part_document, read_part(written))
