"""``python -P -m moegeom.testing.compile_kernels``: compiles the kernels before they are needed.

For the image of a container, or a folder of ``NUMBA_CACHE_DIR`` that jobs share: scans, boundary
reports and cells of small synthetic checkpoints run once. What they compile is kept for this
version of moegeom, of Numba and of Python and this kind of processor; any other compiles its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import moegeom
from moegeom.kernels.table import load_kernels
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint, write_tokens

#: Straight boundaries, and curved ones between groups.
_FAMILIES = ("qwen3_moe", "deepseek_v3")


def compile_kernels() -> None:
    """Runs studies that need the kernels; those that are on disk already are only loaded."""
    with tempfile.TemporaryDirectory() as name:
        for family in _FAMILIES:
            folder = Path(name) / family
            model = SyntheticModel(family, hidden=32, experts=64, top_k=8, layers=1)
            checkpoint = write_checkpoint(folder / "model", model)
            moegeom.boundary_report(checkpoint, write_tokens(folder / "rec", model, 512))
        checkpoint = Path(name) / _FAMILIES[0] / "model"
        moegeom.cells(checkpoint, subspace="random:3", out=Path(name) / "cells")
    # these tokens do not say what was chosen: nothing is compared with it
    chosen = np.zeros((1, 1), np.int32)
    load_kernels("cpu")["same_set"](chosen, chosen)


if __name__ == "__main__":
    compile_kernels()
