"""Batches, threads, cuts and interruptions change how fast the answer comes, not a bit of it."""

import functools

import numpy as np
import pytest

from moegeom.core.tokens import TILE, TokenColumns
from moegeom.engine.loop import Pace, read_snapshot
from moegeom.kernels.table import load_kernels
from moegeom.measure import passes as measure_module
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from tests.by_day import by_day
from tests.unit.scan import made

KINDS = ("softmax", "sigmoid")

#: The last tile is short.
TOKENS = 2 * TILE + 100


@functools.cache
def undisturbed(kind: str) -> dict[str, list[dict]]:
    """Tables from one thread and batches of one tile."""
    return made.measured(made.recording(TOKENS), made.router(kind))


@pytest.mark.parametrize(
    ("kind", "batch_tokens", "num_workers"),
    [("softmax", 10**9, 2), ("sigmoid", TILE + 7, 3), ("softmax", 1, 2)],
    ids=["more workers than batches", "no whole batches", "values in Fortran order"],
)
def test_any_batches_threads_and_order_of_values_give_equal_tables(kind, batch_tokens, num_workers):
    source = made.recording(TOKENS)
    if batch_tokens == 1:
        source.values = np.asfortranarray(source.values)
    pace = {"batch_tokens": batch_tokens, "num_workers": num_workers}
    np.testing.assert_equal(made.measured(source, made.router(kind), **pace), undisturbed(kind))


def test_kernels_only_meet_contiguous_arrays(monkeypatch, tmp_path):
    """They are compiled for those; measure sees to it, whatever a source returns."""
    tokens = TILE + 10
    values = np.asfortranarray(made.inputs(tokens))
    values[3, 2] = np.nan
    source = made.Recorded(values, chosen=np.asfortranarray(np.zeros((tokens, 3), np.int32)))
    run = made.run(source, non_finite="skip", per_token=True, folder=tmp_path)
    contiguous: dict[str, bool] = {}

    def spy(name, kernel):
        def call(*arguments):
            arrays = [a for a in arguments if isinstance(a, np.ndarray)]
            are = all(a.flags.c_contiguous for a in arrays)
            contiguous[name] = contiguous.get(name, True) and are
            return kernel(*arguments)

        return call

    kernels = {name: spy(name, kernel) for name, kernel in load_kernels("cpu").items()}
    monkeypatch.setattr(measure_module, "load_kernels", lambda backend: kernels)
    measure_router(run)
    assert [name for name, is_so in contiguous.items() if not is_so] == []
    names = {"input_norm", "top_k", "boundary_distance", "same_set", "count_bins"}
    assert names <= contiguous.keys()


@pytest.mark.parametrize(
    ("kind", "tiles_before", "num_workers"), [("sigmoid", 1, 1), ("softmax", 2, 2)]
)
def test_a_scan_interrupted_after_any_snapshot_goes_on_to_equal_tables(
    monkeypatch, tmp_path, kind, tiles_before, num_workers
):
    snapshot = tmp_path / "snapshot.npz"
    snapshot.write_bytes(b"PK\x03\x04 cut off")  # one that is damaged is begun anew
    pace = Pace(TILE, num_workers, snapshot_seconds=-1.0)
    monkeypatch.setattr(measure_module, "pace_of", lambda run: pace)
    before = []

    def interrupt(tokens: int) -> None:
        before.append(tokens)
        if len(before) > tiles_before:
            raise made.Interrupted

    again = functools.partial(
        made.measured, made.recording(TOKENS), made.router(kind), snapshot=snapshot
    )
    with pytest.raises(made.Interrupted):
        again(advanced=interrupt)
    assert read_snapshot(snapshot).num_tokens == TILE * tiles_before
    after = []
    np.testing.assert_equal(again(advanced=after.append), undisturbed(kind))
    assert after[0] == sum(before[:tiles_before])  # what need not be done again
    assert sum(after) == TOKENS


#: Metrics that count: parity tests hold distances.
COUNTS = [m for m in METRICS.all() if {"experts", "expert_sets"} & set(m.columns)]


@pytest.mark.parametrize("kind", by_day(KINDS, ["sigmoid"]))
def test_the_order_of_documents_does_not_matter_for_counts(kind):
    """Labels move with the tokens; products are of other tiles, so ties may round otherwise."""
    source = made.recording(TOKENS)
    order = np.random.default_rng(4).permutation(source.columns.document.max() + 1)
    token = np.argsort(order[source.columns.document], kind="stable")
    source.columns = TokenColumns(**{n: a[token] for n, a in vars(source.columns).items()})
    source.values = source.values[token]
    tables = made.measured(source, made.router(kind), metrics=[*COUNTS, METRICS["tokens"]])
    for table, columns in {
        "experts": ("num_slots", "load", "load_se"),
        "layers": ("num_tokens", "load_cv_ddof0", "load_cv_ddof0_se", "num_expert_sets"),
    }.items():
        for column in columns:
            expected = [row[column] for row in undisturbed(kind)[table]]
            assert [row[column] for row in tables[table]] == expected, column


@pytest.mark.parametrize("kind", by_day(KINDS, ["sigmoid"]))
def test_the_reference_backend_counts_the_same(kind):
    options = {"backend": "reference", "metrics": COUNTS}
    tables, expected = (
        made.measured(made.recording(TOKENS), made.router(kind), **options),
        undisturbed(kind),
    )
    np.testing.assert_equal(tables["expert_sets"], expected["expert_sets"])
    for ours, theirs in zip(tables["experts"], expected["experts"], strict=True):
        counted = [n for n in theirs if not n.startswith("score_share")]
        np.testing.assert_equal([ours[n] for n in counted], [theirs[n] for n in counted])
        # scores are float32 in one backend and float64 in the other
        np.testing.assert_allclose(ours["score_share"], theirs["score_share"], rtol=1e-6)
