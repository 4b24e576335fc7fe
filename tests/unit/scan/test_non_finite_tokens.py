"""Tokens that are not finite end the run by name, or are left out and counted."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.errors import NonFiniteError
from moegeom.core.tokens import TILE
from moegeom.measure.passes import measure_router

TOKENS = 3 * TILE + 50
BAD = [7, TILE - 1, TILE, 3 * TILE + 49]


@pytest.fixture(params=[np.nan, np.inf, -np.inf, 3e38])
def damaged(request, made):
    """A recording with four bad tokens; inputs of 3e38 are finite and overflow in the product."""
    source = made.recording(TOKENS)
    source.values[BAD] = request.param if not np.isfinite(request.param) else 0.0
    if np.isfinite(request.param):
        source.values[BAD] = np.sign(made.router().weight[0]) * np.float32(request.param)
    else:
        source.values[BAD, 1:] = 1.0
    return source


@pytest.mark.parametrize(("num_workers", "batch_tokens"), [(1, 10 * TILE), (2, TILE)])
def test_the_first_bad_token_is_named(made, damaged, num_workers, batch_tokens):
    with pytest.raises(NonFiniteError, match=r"array: .* router text/0 .*first: token 7\)"):
        made.measured(damaged, num_workers=num_workers, batch_tokens=batch_tokens)


def test_left_out_they_are_counted_and_change_nothing_else(made, damaged):
    kept = np.setdiff1d(np.arange(TOKENS), BAD)
    measured = measure_router(made.run(damaged, skip_non_finite=True))
    facts = measured.facts
    np.testing.assert_array_equal(facts["num_non_finite"], 4)
    np.testing.assert_array_equal(facts["first_non_finite"], BAD)
    np.testing.assert_array_equal(facts["num_tokens"], len(kept))

    clean = made.recording(TOKENS)
    logits = clean.values[kept] @ made.router().weight.T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    expected = np.bincount(chosen.reshape(-1), minlength=12)
    rows = made.tables(measured)["experts"]
    slots = [
        r["num_slots"] for r in rows if (r["variant"], r["population"]) == ("as_stored", "all")
    ]
    np.testing.assert_array_equal(slots, expected)


def test_more_bad_tokens_than_are_listed_are_all_counted(made):
    source = made.recording(TOKENS)
    source.values[:20, 3] = np.nan
    facts = measure_router(made.run(source, skip_non_finite=True)).facts
    np.testing.assert_array_equal(facts["num_non_finite"], 20)
    np.testing.assert_array_equal(facts["first_non_finite"], np.arange(8))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_without_any_good_token_everything_measured_is_null(made, kind):
    source = made.recording(300)
    source.values[:] = np.nan
    row = made.layer(source, made.router(kind), skip_non_finite=True)
    np.testing.assert_equal(row["num_tokens"], 0)
    for column in ("load_cv_ddof0", "max_vio_global", "margin_p50", "expert_set_coverage", "gini"):
        np.testing.assert_equal(row[column], None)
        np.testing.assert_equal(row[f"{column}_se"], None)
    np.testing.assert_equal(row["num_zero_rows"], 0)  # what needs no tokens is still there
