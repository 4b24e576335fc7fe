"""CUDA sources with their constants filled in, ready for whatever compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

#: No fused multiply-add but where the source asks for one: quantities are rounded as in the
#: reference.
OPTIONS = ("-std=c++17", "--fmad=false")


@dataclass(frozen=True)
class Program:
    """The kernel ``entry``: the files ``parts`` of ``source/``, behind ``defines``.

    Equal programs are compiled once.
    """

    entry: str
    parts: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """One self-contained source: nothing is included, so no header need be found."""
        folder = files("moegeom.kernels.cuda") / "source"
        lines = [f"#define {name} {value}" for name, value in self.defines]
        return "\n".join([*lines, *((folder / part).read_text("utf-8") for part in self.parts)])
