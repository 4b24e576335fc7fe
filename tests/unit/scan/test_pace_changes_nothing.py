"""Batches, threads, cuts and interruptions change how fast the answer comes, not a bit of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.tokens import TILE, TokenColumns
from moegeom.engine.loop import Pace
from moegeom.engine.snapshot import read_snapshot
from moegeom.kernels.table import load_kernels
from moegeom.measure import passes as measure_module
from moegeom.measure.passes import measure_router


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("batch_tokens", "num_workers"), [(1, 2), (2 * TILE, 1), (3 * TILE + 7, 3), (10**9, 2)]
)
def test_any_batch_size_and_any_number_of_threads_give_equal_tables(
    made, undisturbed, batch_tokens, num_workers
):
    kind, expected = undisturbed
    pace = {"batch_tokens": batch_tokens, "num_workers": num_workers}
    found = made.measured(made.recording(), made.router(kind), **pace)
    np.testing.assert_equal(found, expected)


def test_values_in_fortran_order_give_equal_tables(made, undisturbed):
    kind, expected = undisturbed
    source = made.recording()
    source.values = np.asfortranarray(source.values)
    np.testing.assert_equal(made.measured(source, made.router(kind)), expected)


def test_kernels_only_meet_contiguous_arrays(made, monkeypatch, tmp_path):
    """They are compiled for those; measure sees to it, whatever a source returns."""
    source = made.recording(TILE + 10)
    source.values = np.asfortranarray(source.values)
    source.values[3, 2] = np.nan
    source.chosen = np.asfortranarray(np.zeros((TILE + 10, 3), np.int32))
    source.facts = dataclasses.replace(source.facts, has_chosen=True)
    run = made.run(source, skip_non_finite=True, per_token=True, folder=tmp_path)
    seen: dict[str, bool] = {}

    def spy(name, kernel):
        def call(*arguments):
            arrays = [a for a in arguments if isinstance(a, np.ndarray)]
            seen[name] = seen.get(name, True) and all(a.flags.c_contiguous for a in arrays)
            return kernel(*arguments)

        return call

    kernels = {name: spy(name, kernel) for name, kernel in load_kernels("cpu").items()}
    monkeypatch.setattr(measure_module, "load_kernels", lambda backend: kernels)
    measure_router(run)
    np.testing.assert_equal(seen, dict.fromkeys(seen, True))
    assert {"input_norm", "top_k", "boundary_distance", "same_set", "count_bins"} <= set(seen)


class Interrupted(Exception):
    """What a test raises in the middle of a scan."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tiles_before", "num_workers"), [(1, 1), (2, 2), (4, 2)])
def test_a_scan_interrupted_after_any_snapshot_goes_on_to_equal_tables(
    made, undisturbed, monkeypatch, tmp_path, tiles_before, num_workers
):
    kind, expected = undisturbed
    snapshot = tmp_path / "snapshot.npz"
    monkeypatch.setattr(
        measure_module,
        "pace_of",
        lambda run: Pace(TILE, run.options.num_workers, snapshot_seconds=-1.0),
    )
    seen = []

    def interrupt(tokens: int) -> None:
        seen.append(tokens)
        if len(seen) > tiles_before:
            raise Interrupted

    changes = {"snapshot": snapshot, "num_workers": num_workers}
    with pytest.raises(Interrupted):
        made.measured(made.recording(), made.router(kind), advanced=interrupt, **changes)
    begun = read_snapshot(snapshot)
    np.testing.assert_array_equal(begun.num_tokens, TILE * tiles_before)
    advanced = []
    found = made.measured(made.recording(), made.router(kind), advanced=advanced.append, **changes)
    np.testing.assert_equal(found, expected)
    # what need not be done again
    np.testing.assert_array_equal(advanced[0], sum(seen[:tiles_before]))
    np.testing.assert_array_equal(sum(advanced), 4 * TILE + 100)


def test_a_damaged_snapshot_is_begun_anew(made, undisturbed, tmp_path):
    kind, expected = undisturbed
    snapshot = tmp_path / "snapshot.npz"
    snapshot.write_bytes(b"PK\x03\x04 cut off")
    found = made.measured(made.recording(), made.router(kind), snapshot=snapshot)
    np.testing.assert_equal(found, expected)


def test_the_order_of_documents_does_not_matter_for_counts(made, undisturbed):
    """Labels move with the tokens; products are of other tiles, so ties may round otherwise."""
    kind, expected = undisturbed
    source = made.recording()
    order = np.random.default_rng(4).permutation(source.columns.document.max() + 1)
    token = np.argsort(order[source.columns.document], kind="stable")
    source.columns = TokenColumns(**{n: a[token] for n, a in vars(source.columns).items()})
    source.values = source.values[token]
    found = made.measured(source, made.router(kind))
    for table, columns in {
        "experts": ("num_slots", "load", "load_se"),
        "layers": ("num_tokens", "load_cv_ddof0", "load_cv_ddof0_se", "num_expert_sets"),
    }.items():
        for column in columns:
            np.testing.assert_equal(
                [row[column] for row in found[table]], [row[column] for row in expected[table]]
            )


def test_the_reference_backend_counts_the_same(made, undisturbed):
    from moegeom.metrics import METRICS

    kind, expected = undisturbed
    # parity tests hold distances
    metrics = [m for m in METRICS.all() if {"experts", "expert_sets"} & set(m.columns)]
    found = made.measured(made.recording(), made.router(kind), backend="reference", metrics=metrics)
    np.testing.assert_equal(found["expert_sets"], expected["expert_sets"])
    for ours, theirs in zip(found["experts"], expected["experts"], strict=True):
        counted = [n for n in theirs if not n.startswith("score_share")]
        np.testing.assert_equal([ours[n] for n in counted], [theirs[n] for n in counted])
        # scores are float32 in one backend and float64 in the other
        np.testing.assert_allclose(ours["score_share"], theirs["score_share"], rtol=1e-6)
