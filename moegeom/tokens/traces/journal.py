"""What a first pass found in each file, kept so that an interrupted one goes on where it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.errors import RecordingError
from moegeom.core.identity import identity_of
from moegeom.tokens.foreign.sealed import read_sealed, write_sealed
from moegeom.tokens.traces.axes import Reading, Survey
from moegeom.tokens.traces.file_facts import FileFacts, Manner

_ARRAYS = (
    *("digest", "name", "content", "is_positioned"),
    *("part_request", "part_rows", "part_span", "piece_parts", "place"),
)

#: Bytes of the facts of one file: some hundred for each request.
_MOST_BYTES = 1 << 31


@dataclass(frozen=True)
class FileJournal:
    """Facts by file in ``folder``, one file for each; ``terms`` is what else they depend on."""

    folder: Path
    terms: str

    def find(self, path: Path) -> FileFacts | None:
        """What was found in a file before; None where there is nothing to believe.

        Raises
        ------
        RecordingError
            When the file is not what it was then.
        """
        facts = self._read(self._path(path))
        if facts is not None and facts.identity != identity_of(path):
            raise RecordingError(
                f"{path.name}: changed since the first pass over it, which was interrupted.",
                "--restart reads all files again.",
            )
        return facts

    def keep(self, path: Path, facts: FileFacts) -> None:
        """Keeps the facts of a file, whole or not at all."""
        arrays = {name: getattr(facts, name) for name in _ARRAYS}
        write_sealed(self._path(path), _header(facts) | {"terms": self.terms}, arrays)

    @property
    def num_kept(self) -> int:
        """Files of which facts are kept."""
        return sum(1 for _ in self.folder.glob("*.npz"))

    def _path(self, path: Path) -> Path:
        return self.folder / f"{digest_of(path.resolve())}.npz"

    def _read(self, path: Path) -> FileFacts | None:
        found = read_sealed(path, _MOST_BYTES)
        if found is None or found[0].pop("terms") != self.terms:
            return None
        return _facts(*found)


def _header(facts: FileFacts) -> dict[str, Any]:
    """All that is no array, as JSON has it."""
    survey = facts.survey
    readings = [
        [*shape, list(reading.holds), sorted(reading.behind), reading.num_requests]
        for shape, reading in survey.readings.items()
    ]
    return {
        "identity": facts.identity,
        "manner": None if facts.manner is None else vars(facts.manner),
        "axes": facts.axes,
        "told": facts.told,
        "ids_are": facts.ids_are,
        "cut": dict(facts.cut),
        "notes": facts.notes,
        "survey": {
            "num_requests": survey.num_requests,
            "dtypes": sorted(survey.dtypes),
            "largest": survey.largest,
            "num_ids": survey.num_ids,
            "shapes": sorted(survey.shapes),
            "told": survey.told,
            "uneven": [[length, *found] for length, found in survey.uneven.items()],
            "readings": readings,
        },
    }


def _facts(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> FileFacts:
    """The facts of what has the hash that was written with it."""
    survey, axes, manner = header["survey"], header["axes"], header["manner"]
    held: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
    return FileFacts(
        **held,
        identity=tuple(header["identity"]),
        survey=Survey(
            survey["num_requests"],
            frozenset(survey["dtypes"]),
            survey["largest"],
            survey["num_ids"],
            frozenset(tuple(shape) for shape in survey["shapes"]),
            survey["told"],
            {length: (name, size) for length, name, size in survey["uneven"]},
            {
                (layers, slots): Reading(tuple(holds), frozenset(behind), num_requests)
                for layers, slots, holds, behind, num_requests in survey["readings"]
            },
        ),
        manner=None
        if manner is None
        else Manner(
            manner["dialect"],
            None if manner["layers"] is None else tuple(manner["layers"]),
            manner["has_documents"],
        ),
        axes=None if axes is None else (tuple(axes[0]), tuple(axes[1])),
        told=header["told"],
        ids_are=header["ids_are"],
        cut=Counter(header["cut"]),
        notes=tuple(header["notes"]),
    )
