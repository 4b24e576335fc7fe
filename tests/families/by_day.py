"""Which of many names a test takes by day: some of them, all at night."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def some_by_day(names: Sequence[str], every: int = 6) -> list:
    """All names; all but each ``every``-th run only with HYPOTHESIS_PROFILE=nightly.

    For crosses that grow with the families, where one of a kind shows what all would: each family
    is held against its library by day in ``test_families_against_transformers``.
    """
    marks = pytest.mark.nightly
    return [n if i % every == 0 else pytest.param(n, marks=marks) for i, n in enumerate(names)]
