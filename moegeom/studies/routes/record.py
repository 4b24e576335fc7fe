"""Traces before a checkpoint: request and record of what they hold and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moegeom.core.option import argument, option
from moegeom.core.tokens import Oddity
from moegeom.tokens.traces.trace import IdsAre

State = Literal["sound", "incomplete", "defective", "not judged"]


@dataclass(frozen=True, kw_only=True)
class RoutesRequest:
    """Which files, and whose traces they are where they do not show it.

    A folder, and a pattern such as ``dump/*.pt``, stand for one trace in several files.
    """

    files: tuple[str, ...] = argument(
        "Traces of engines or trainers: files, or folders and patterns in quotes, whose files are "
        "one trace."
    )
    dialect: str | None = option("Whose traces they are, where files do not show it.")


@dataclass(frozen=True)
class Defect:
    """Why a request cannot be read, or with an empty name the file as a whole.

    ``word`` names the kind where other requests may have the same; it is empty for any other.
    """

    request: str
    text: str
    hint: str
    word: str = ""


@dataclass(frozen=True)
class LayerOfTrace:
    """A layer with choices: ``largest`` is its largest id, ``num_seen`` counts different ones.

    ``name`` is what the file calls it, else its place in the file, from 0.
    """

    name: int
    largest: int
    num_seen: int


@dataclass(frozen=True)
class FileOfRoutes:
    """One trace, ``given`` as it was typed, taken by the reader ``dialect``, written by ``writer``.

    It holds ``num_requests`` and ``num_rows``, 0 where it could not be read or holds counts alone;
    ``num_tokens`` rows are tokens of the requests without defect. ``top_k`` are slots of a row
    without those that name no expert, None where no shape is stored; ``layers``, of ``num_layers``,
    are those with choices. ``oddities`` are tokens that are missing, and ids that are no choices,
    where the rest can be read; ``notes`` say what was left out, ``not_looked_at`` what only a
    checkpoint, or more in the file, could tell.
    """

    name: str
    given: str
    dialect: str
    writer: str
    state: State
    num_requests: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    top_k: int | None = None
    num_layers: int = 0
    layers: tuple[LayerOfTrace, ...] = ()
    dtypes: tuple[str, ...] = ()
    ids_are: IdsAre = "unknown"
    notes: tuple[str, ...] = ()
    oddities: tuple[Oddity, ...] = ()
    defects: tuple[Defect, ...] = ()
    not_looked_at: tuple[str, ...] = ()


@dataclass(frozen=True)
class Routes:
    """All files, in the order they were given."""

    files: tuple[FileOfRoutes, ...]

    def of_state(self, state: State) -> tuple[FileOfRoutes, ...]:
        """The files of a state."""
        return tuple(file for file in self.files if file.state == state)

    @property
    def exit_code(self) -> int:
        """0 when all are sound, 1 when one is not, else 4: one could not be judged."""
        if self.of_state("defective") or self.of_state("incomplete"):
            return 1
        return 4 if self.of_state("not judged") else 0
