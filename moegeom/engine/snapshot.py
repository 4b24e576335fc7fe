"""A scan's progress as a file, so that an interrupted run goes on where it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moegeom.core.limits import SNAPSHOT_BYTES
from moegeom.engine.loop import Progress
from moegeom.tokens.foreign.sealed import read_sealed, write_sealed

#: What is said beside the states.
_FACTS = ("next_tile", "num_tokens", "non_finite", "num_non_finite")


def write_snapshot(path: Path, progress: Progress) -> None:
    """Writes ``path`` whole or not at all."""
    arrays = {
        f"{reduction}/{name}": array
        for reduction, state in progress.states.items()
        for name, array in state.items()
    }
    facts = {name: getattr(progress, name) for name in _FACTS}
    write_sealed(path, facts, arrays)


def read_snapshot(path: Path) -> Progress | None:
    """The progress in ``path``; None when there is none, or when it is not as it was written.

    The scan of the router then begins anew: nothing is believed of a file that was cut off or
    changed.
    """
    found = read_sealed(path, SNAPSHOT_BYTES)
    if found is None or {*found[0]} != {*_FACTS}:
        return None
    facts, arrays = found
    states: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        reduction, _, name = key.partition("/")
        states.setdefault(reduction, {})[name] = array
    facts["non_finite"] = tuple(facts["non_finite"])
    return Progress(**facts, states=states)
