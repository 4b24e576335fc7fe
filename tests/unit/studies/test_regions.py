"""``moegeom regions`` on the samples, and on tiny layers that are counted in other ways."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import moegeom as mg
from moegeom.core.errors import RouterError, UsageError
from moegeom.core.tokens import TILE
from moegeom.geometry.capacity.region_bounds import most_regions
from tests.unit.studies.samples import BALANCED, GROUPED, sides

MODEL, REC = sides(BALANCED)
WAYS = 4


@pytest.fixture(scope="module")
def found():
    return mg.regions(
        MODEL, REC, layers=1, segments=WAYS, random_experts=1,
        against=BALANCED / "step_100",
    ).value  # fmt: skip


def test_changes_on_ways_are_those_of_many_points_on_them(found):
    """Both kinds of changes, at 20,001 points of each way between the same pairs."""
    stored = {n: v.astype(np.float64) for n, v in load_file(MODEL / "model.safetensors").items()}
    inputs = load_file(REC / "router_input-text.1-00000.safetensors")
    y = next(iter(inputs.values())).astype(np.float64)
    assert len(y) <= 20 * TILE
    at = "model.layers.1.mlp."
    gates = np.stack([stored[f"{at}experts.{e}.gate_proj.weight"] for e in range(16)])
    chosen = np.random.default_rng(0).permutation(len(y))[: 2 * WAYS]
    t = np.linspace(0.0, 1.0, 20_001)[:, None]
    routed, neurons, every = [], [], []
    for a, b in zip(y[chosen[:WAYS]], y[chosen[WAYS:]], strict=True):
        points = (1.0 - t) * a + t * b
        logits = points @ stored[f"{at}gate.weight"].T
        is_chosen = logits >= np.sort(logits, axis=1)[:, [-4]]
        routed.append((np.diff(is_chosen, axis=0).any(axis=1)).sum())
        signs = np.einsum("td,end->ten", points, gates) > 0.0
        changed = np.diff(signs, axis=0)
        every.append(changed.sum())
        neurons.append((changed & is_chosen[:-1, :, None]).sum())
    way = found.routers[0].ways[0]
    assert way.num_segments == WAYS
    assert way.router_changes == np.mean(routed)
    assert way.all_neurons == np.mean(every)
    np.testing.assert_allclose(way.neuron_changes, np.mean(neurons), atol=2 / WAYS)
    np.testing.assert_allclose(way.regions, 1 + way.router_changes + way.neuron_changes)


def test_regions_of_a_plane_stay_below_the_bound(found):
    for one in (found.routers[0], found.routers[0].before):
        plane = one.plane
        assert plane.bound == most_regions(16, 4, 32, 2)
        assert all(0 < count <= plane.bound for count in (plane.regions, *plane.random))
        assert len(set(plane.expert_sets)) == len(plane.of_cell)


def test_another_seed_draws_other_ways_and_the_same_one_the_same(found):
    def ways(seed: int) -> tuple:
        asked = {"layers": 1, "segments": WAYS, "random_experts": 0}
        return mg.regions(MODEL, REC, seed=seed, **asked).value.routers[0].ways

    assert ways(0) == found.routers[0].ways
    assert ways(1) != ways(0)


def test_the_table_has_every_way_and_every_cell(tmp_path):
    out = tmp_path / "regions.parquet"
    asked = {"layers": 0, "segments": 5, "random_experts": 0, "out": out}
    router = mg.regions(MODEL, REC, **asked).value.routers[0]
    rows = pq.read_table(out).to_pylist()
    cells = [row for row in rows if row["way"] == "plane"]
    assert [tuple(row["cell"]) for row in cells] == list(router.plane.expert_sets)
    assert sum(row["regions"] for row in cells) == router.plane.regions
    assert len(rows) == len(cells) + 2


def test_more_than_two_gigabytes_are_not_read_unasked(monkeypatch):
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    asked = {"layers": 0, "segments": 4, "random_experts": 0}
    with pytest.raises(UsageError, match="of experts are to be read"):
        mg.regions(MODEL, REC, **asked)
    assert mg.regions(MODEL, REC, yes=True, **asked).value.routers


def test_rules_that_are_not_linear_are_refused_in_words():
    with pytest.raises(UsageError, match="boundaries are not linear"):
        mg.regions(*sides(GROUPED))


def test_a_checkpoint_without_that_router_is_nothing_to_compare_with():
    with pytest.raises(RouterError, match="no router text/1"):
        mg.regions(MODEL, REC, layers=1, against=GROUPED / "step_1500")
