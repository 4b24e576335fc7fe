"""The modules of both packages, read and parsed once for all tests of this folder."""

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Path from the root -> source, of moegeom and of its command line.
SOURCES = {
    file.relative_to(ROOT).as_posix(): file.read_text("utf-8")
    for package in ("moegeom", "cli")
    for file in sorted((ROOT / package).rglob("*.py"))
}


@cache
def parsed(source: str) -> ast.Module:
    gc.disable()  # trees are kept, and the collector would go over all of them again and again
    tree = ast.parse(source)
    gc.enable()
    return tree
