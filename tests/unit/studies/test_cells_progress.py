"""What `cells` tells while it works: what is expected, and what takes long."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.geometry.capacity.cell_bounds import expected_diagram
from moegeom.router.requested_family import RequestedFamily
from moegeom.studies.cells.study.request import CellsRequest
from moegeom.studies.cells.study.study import cells


class Notes:
    """Everything that a run tells."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.said: list[str] = []

    def start(self, num_tokens: int) -> None: ...

    def begin(self, what: str) -> None:
        self.begun.append(what)

    def advance(self, num_tokens: int) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


def told(
    folder: Path,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    is_refused: bool = False,
    **asked,
) -> Notes:
    """What is told of the top 4 of these rows."""
    arrays = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    np.savez(folder / "w.npz", **arrays)
    notes = Notes()
    request = CellsRequest("", weights=folder / "w.npz", asked=RequestedFamily(top_k=4), **asked)
    with pytest.raises(UsageError, match="exact") if is_refused else nullcontext():
        cells(request, notes)
    return notes


WEIGHT = np.random.default_rng(0).integers(-99, 100, (12, 3)).astype(np.float64)


@pytest.mark.parametrize(
    ("bias", "is_central"),
    [
        (None, True),
        (np.full(12, 2.5), True),
        (-WEIGHT @ np.array([1.0, -2.0, 0.5]), True),
        (np.arange(12.0) ** 2, False),
    ],
)
def test_the_vertices_expected_are_those_of_cones_where_all_experts_tie(tmp_path, bias, is_central):
    expected = round(expected_diagram(12, 4, 3, is_central).vertices)
    assert expected != round(expected_diagram(12, 4, 3, not is_central).vertices)
    notes = told(tmp_path, WEIGHT, bias)
    assert notes.begun == [f"w, about {expected} vertices expected"]
    assert notes.said == []


@pytest.mark.parametrize("asked", [{"radius": 0.1}, {"expert_set": (0, 1, 2, 3)}])
def test_nothing_is_expected_where_nothing_is_walked(tmp_path, asked):
    assert told(tmp_path, WEIGHT, np.arange(12.0) ** 2, **asked).begun == ["w"]


#: The whole slice is walked; of a ball a search gives way to a walk, or is refused where that
#: would be too long, so that nothing but the search has told.
WALKED, SEARCHED = {"radius": None}, {"radius": 2.0, "vertices": 100, "is_refused": True}


@pytest.mark.parametrize("asked", [WALKED, {"radius": 2.0}, SEARCHED])
def test_exact_arithmetic_of_many_answers_is_said_once(tmp_path, asked):
    """Biases that are rounded: 26 experts nearly tie at one point."""
    weight = np.random.default_rng(0).standard_normal((26, 3))
    notes = told(tmp_path, weight, -weight @ np.array([0.3, -0.1, 0.2]), **asked)
    (said,) = notes.said
    assert said.startswith("w: many experts tie, or nearly so")


def test_a_few_answers_in_exact_arithmetic_are_not_worth_a_word(tmp_path):
    """Two experts are equal, which leaves what they tie on to exact arithmetic."""
    weight = WEIGHT.copy()
    weight[5] = weight[2]
    asked = {"weights": tmp_path / "w.npz", "asked": RequestedFamily(top_k=4)}
    assert told(tmp_path, weight).said == []
    (found,) = cells(CellsRequest("", **asked)).routers
    assert found.cells is not None
    assert found.cells.num_exact > 1
