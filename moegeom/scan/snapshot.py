"""A scan's progress as a file, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np

from moegeom.scan.engine import Progress


def write_snapshot(path: Path, progress: Progress) -> None:
    """Writes ``path`` whole or not at all."""
    arrays = {
        f"{reduction}/{name}": array
        for reduction, state in progress.states.items()
        for name, array in state.items()
    }
    header = json.dumps(
        {
            "next_tile": progress.next_tile,
            "num_tokens": progress.num_tokens,
            "non_finite": progress.non_finite,
            "num_non_finite": progress.num_non_finite,
        }
    )
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        np.savez(file, allow_pickle=False, header=np.array(header), **arrays)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_snapshot(path: Path) -> Progress | None:
    """The progress in ``path``; None when there is none or it is not whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(str(stored["header"]))
            states: dict[str, dict[str, np.ndarray]] = {}
            for key in stored.files:
                if key != "header":
                    reduction, name = key.split("/")
                    states.setdefault(reduction, {})[name] = stored[key]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return Progress(
        header["next_tile"],
        header["num_tokens"],
        tuple(header["non_finite"]),
        header["num_non_finite"],
        states,
    )
