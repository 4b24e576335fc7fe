"""There is one 95 %: Student's quantile for the blocks that there are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from scipy import stats

import moegeom
from moegeom.core.text import half_width, range_text

SOURCES = Path(moegeom.__file__).parent

#: ``2 * error``, ``1.96 * load_se`` and the like: a range with a factor of its own.
OF_ITS_OWN = re.compile(
    r"\b(2(\.0)?|1\.96)\s*\*\s*\w*(error|_se)\b|\b\w*(error|_se)\s*\*\s*(2(\.0)?|1\.96)\b"
)


def test_the_half_width_is_that_of_student_or_of_the_normal_distribution():
    for blocks in (2, 3, 16, 100):
        low, high = stats.t.interval(0.95, blocks - 1, loc=1.0, scale=0.3)
        np.testing.assert_allclose(half_width(0.3, blocks), (high - low) / 2.0)
    for blocks in (None, 0, 1):
        np.testing.assert_allclose(half_width(1.0, blocks), stats.norm.ppf(0.975), rtol=1e-6)


def test_a_range_is_printed_from_end_to_end():
    assert range_text(3.5, 0.1, 16, 1) == "3.3-3.7"
    assert range_text(0.1, 0.1, 16, 2) == "0.00-0.31"


def test_no_range_has_a_factor_of_its_own():
    for copy in ("load - 2 * error", "1.96 * row_se", "2.0*standard_error"):
        assert OF_ITS_OWN.search(copy)
    folders = ["checks", "document", "measure", "metrics", "results", "studies", "core"]
    files = [path for folder in folders for path in sorted((SOURCES / folder).rglob("*.py"))]
    assert {path.relative_to(SOURCES).parts[0] for path in files} == set(folders)
    offenders = [
        f"{path.name}: {line.strip()}"
        for path in files
        if "cells" not in path.parts  # error bounds there, not standard errors
        for line in path.read_text("utf-8").splitlines()
        if OF_ITS_OWN.search(line)
    ]
    assert offenders == []
