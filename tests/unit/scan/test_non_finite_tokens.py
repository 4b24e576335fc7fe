"""Tokens that are not finite end the run by name, or are left out and counted."""

import numpy as np
import pytest

from moegeom.core.errors import NonFiniteError
from moegeom.core.tokens import TILE
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from tests.unit.scan import made

TOKENS = 3 * TILE + 50
BAD = [7, TILE - 1, TILE, 3 * TILE + 49]


@pytest.fixture(params=[np.nan, np.inf, -np.inf, 3e38])
def damaged(request):
    """A recording with four bad tokens; inputs of 3e38 are finite and overflow in the product."""
    source, value = made.recording(TOKENS), np.float32(request.param)
    is_huge = np.isfinite(value)
    source.values[BAD] = np.sign(made.router().weight[0]) * value if is_huge else 1.0
    if not is_huge:
        source.values[BAD, 0] = value
    return source


@pytest.mark.parametrize(("num_workers", "batch_tokens"), [(1, 10 * TILE), (2, TILE)])
def test_the_first_bad_token_is_named(damaged, num_workers, batch_tokens):
    with pytest.raises(NonFiniteError, match=r"recorded: .* router text/0 .*first: token 7\)"):
        made.measured(damaged, num_workers=num_workers, batch_tokens=batch_tokens)


def test_left_out_they_are_counted_and_change_nothing_else(damaged):
    good = np.setdiff1d(np.arange(TOKENS), BAD)
    metrics = [METRICS["tokens"], METRICS["load"]]
    measured = measure_router(made.run(damaged, non_finite="skip", metrics=metrics))
    facts = measured.facts
    assert (facts["num_non_finite"], facts["num_tokens"]) == (4, len(good))
    np.testing.assert_array_equal(facts["first_non_finite"], BAD)
    logits = made.inputs(TOKENS)[good] @ made.router().weight.T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    slots = [row["num_slots"] for row in made.rows_of(made.tables(measured)["experts"])]
    np.testing.assert_array_equal(slots, np.bincount(chosen.reshape(-1), minlength=12))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_without_any_good_token_everything_measured_is_null(kind):
    source = made.recording(300)
    source.values[:] = np.nan
    measured = measure_router(made.run(source, made.router(kind), non_finite="skip"))
    # more bad tokens than are listed are all counted
    assert measured.facts["num_non_finite"] == 300
    np.testing.assert_array_equal(measured.facts["first_non_finite"], np.arange(8))
    row = made.row_of(made.tables(measured)["layers"])
    columns = ("load_cv_ddof0", "max_vio_global", "margin_p50", "expert_set_coverage", "gini")
    assert {row[name] for column in columns for name in (column, f"{column}_se")} == {None}
    # what needs no tokens is still there
    assert row["num_tokens"] == row["num_zero_rows"] == 0
