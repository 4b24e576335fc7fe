"""Expert sets beyond the capacity: a hash sample that estimates without bias and stays small."""

import numpy as np

from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions import sketches as sketch
from moegeom.kernels.table import load_kernels
from tests.unit.kernels.batches import batch_of

EXPERTS, TOP_K = 40, 4
KERNELS = load_kernels("cpu")
REDUCTION = REDUCTIONS["expert_sets"]


def drawn(tokens: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).random((tokens, EXPERTS))
    return np.argsort(scores, axis=1)[:, :TOP_K].astype(np.int32)


def fold(accumulator, chosen: np.ndarray) -> None:
    accumulator.fold(batch_of(len(chosen), chosen=chosen), KERNELS)


def folded(chosen: np.ndarray, batch: int = 700):
    accumulator = REDUCTION.start(Extent(1, EXPERTS, TOP_K))
    for start in range(0, len(chosen), batch):
        fold(accumulator, chosen[start : start + batch])
    return accumulator.state()


def distinct(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(np.sort(chosen, axis=1), axis=0, return_counts=True)


def test_under_the_capacity_every_set_is_counted_whatever_the_order_of_its_experts():
    chosen = drawn(3000, 0)[np.random.default_rng(1).integers(0, 3000, 9000)]
    state = folded(chosen)
    found = REDUCTION.select(state, None, None)
    members, counts = distinct(chosen)
    order = np.lexsort(found["members"][found["row"]].T[::-1])
    np.testing.assert_array_equal(found["members"][found["row"]][order], members)
    np.testing.assert_array_equal(found["count"][order], counts)
    np.testing.assert_array_equal(found["rate"], 1.0)
    chosen = drawn(200, 9)
    keys = KERNELS["expert_set_key"](chosen, EXPERTS)
    other = KERNELS["expert_set_key"](np.random.default_rng(0).permuted(chosen, axis=1), EXPERTS)
    np.testing.assert_array_equal(other, keys)
    np.testing.assert_array_equal(len(np.unique(keys)), len(distinct(chosen)[0]))


def test_the_state_never_exceeds_the_capacity(monkeypatch):
    monkeypatch.setattr(sketch, "CAPACITY", 500)
    monkeypatch.setattr(sketch, "_PENDING", 256)
    accumulator = REDUCTION.start(Extent(1, EXPERTS, TOP_K))
    chosen = drawn(20_000, 2)
    for start in range(0, len(chosen), 1000):
        fold(accumulator, chosen[start : start + 1000])
        # besides the state, at most a batch and as many tokens as it holds are waiting
        np.testing.assert_array_less(accumulator._waiting, 501)
        np.testing.assert_array_less(len(accumulator._state["key"]), 501)
    np.testing.assert_array_less(len(accumulator.state()["key"]), 501)


def test_over_the_capacity_the_number_of_expert_sets_is_estimated_without_bias(monkeypatch):
    """Each of N expert sets is kept with probability ``rate``: N' = kept / rate has variance
    N (1 - rate) / rate. Streams differ, so do the expert sets that the fixed hash keeps."""
    monkeypatch.setattr(sketch, "CAPACITY", 400)
    errors = []
    for seed in range(40):
        chosen = drawn(3000, 100 + seed)
        found = REDUCTION.select(folded(chosen), None, None)
        rate, true = float(found["rate"]), len(distinct(chosen)[0])
        np.testing.assert_array_less(rate, 1.0)
        errors.append((len(found["count"]) / rate - true) / np.sqrt(true * (1 - rate) / rate))
    # stopping at the first rate that fits favours samples that came out small: under half a sigma
    np.testing.assert_array_less(np.abs(np.mean(errors)), 0.5 + 3 / np.sqrt(40))
    np.testing.assert_array_less(np.std(errors), 1.5)


def test_over_the_capacity_no_more_is_dropped_than_it_asks_for_and_counts_stay_exact(monkeypatch):
    """Of all keys, those below the threshold are kept; twice the threshold would be too many."""
    chosen = drawn(3000, 11)
    every = folded(chosen)["key"]
    monkeypatch.setattr(sketch, "CAPACITY", 400)
    found = folded(chosen)
    rate = 2.0 ** -float(found["halvings"][0])
    np.testing.assert_array_equal(found["key"], every[every < rate * 2.0**64])
    np.testing.assert_array_less(400, (every < 2 * rate * 2.0**64).sum())
    monkeypatch.setattr(sketch, "CAPACITY", 300)
    base = drawn(2000, 5)
    chosen = base[np.random.default_rng(6).integers(0, 2000, 8000)]
    found = REDUCTION.select(folded(chosen), None, None)
    true = {tuple(m.tolist()): int(c) for m, c in zip(*distinct(chosen), strict=True)}
    expected = [true[tuple(m.tolist())] for m in found["members"][found["row"]]]
    np.testing.assert_array_equal(found["count"], expected)
