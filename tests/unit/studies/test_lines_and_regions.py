"""``moegeom continuity`` and ``regions`` on the samples, and what flips cost where experts are read."""

import contextlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

import moegeom as mg
from moegeom.core.errors import RouterError, UsageError
from moegeom.core.tokens import TILE
from moegeom.geometry.capacity import most_regions
from tests.unit.studies.samples import BALANCED, GROUPED, sides

MODEL, REC = sides(BALANCED)


@pytest.fixture(scope="module")
def found():
    return mg.continuity(MODEL, REC, layers=1).value


def stored(name: str) -> torch.Tensor:
    found = load_file(MODEL / "model.safetensors")[f"model.layers.1.mlp.{name}.weight"]
    return torch.from_numpy(found.astype(np.float64))


def block(y: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
    x, out = torch.from_numpy(y), torch.zeros(y.shape, dtype=torch.float64)
    share = (x @ stored("gate").T).softmax(-1)
    experts = share.topk(4, dim=-1).indices if chosen is None else torch.from_numpy(chosen).long()
    for e in experts.unique().tolist():
        gate, up, down = (stored(f"experts.{e}.{part}_proj") for part in ("gate", "up", "down"))
        row = (experts == e).any(-1)
        inner = torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T)
        out[row] += share[row, e, None] * (inner @ down.T)
    return out.numpy()


def inputs_of(recording: Path) -> np.ndarray:
    found = load_file(recording / "router_input-text.1-00000.safetensors")
    return next(iter(found.values())).astype(np.float64)


def line_of(crossing) -> tuple[np.ndarray, np.ndarray]:
    rows, y = stored("gate").numpy(), inputs_of(REC)[crossing.token]
    apart = rows[crossing.pair[0]] - rows[crossing.pair[1]]
    return y - (apart @ y) / (apart @ apart) * apart, apart / np.linalg.norm(apart)


def test_the_line_has_the_outputs_of_the_block_in_torch_and_meets_no_other_boundary(found):
    crossing = found.routers[0].crossing
    point, normal = line_of(crossing)
    some = np.arange(0, len(crossing.offset), 29)
    outputs = block(point + crossing.offset[some, None] * normal)
    np.testing.assert_allclose(crossing.hard.line[some], outputs[:, crossing.coordinate], rtol=1e-6)
    step = 1e-7 * np.array([[1.0], [-1.0]]) * normal
    np.testing.assert_allclose(
        np.linalg.norm(np.subtract(*block(point + step))), crossing.jump, rtol=1e-4
    )
    # At 4,001 points on either side the block chooses one set.
    for sign in (1.0, -1.0):
        at = sign * crossing.radius[-1] * np.linspace(1e-6, 1.0, 4001)[:, None]
        logits = torch.from_numpy(point + at * normal) @ stored("gate").T
        chosen = np.sort(logits.topk(4, dim=-1).indices.numpy(), axis=1)
        assert (chosen == chosen[0]).all()


def test_hard_outputs_level_off_at_the_jump_and_of_the_tokens_tried_the_highest_wins(found):
    crossing = found.routers[0].crossing
    hard, smooth = crossing.hard, crossing.smooth
    np.testing.assert_allclose(hard.spread[0], crossing.jump, rtol=1e-3)
    assert abs(hard.slope_near) < 0.01
    assert abs(smooth.slope_near - 1.0) < 0.01
    ratio = smooth.spread / crossing.radius
    assert ratio.max() == smooth.steepest < 2.0 * ratio.min()
    assert smooth.spread[0] < 1e-3 * crossing.jump
    one = found.routers[0]
    assert (one.num_tokens, one.num_known) == (2000, 2000)
    jumps = {}
    for token in (one.crossing.token, 3, 500, 1001):
        with contextlib.suppress(UsageError):  # its line meets another boundary
            alone = mg.continuity(MODEL, REC, layers=1, at=token).value.routers[0]
            jumps[token] = alone.crossing.jump
    np.testing.assert_allclose(jumps.pop(one.crossing.token), one.crossing.jump)
    assert max(jumps.values()) < one.crossing.jump


def test_a_grouped_rule_is_smoothed_where_the_boundary_is_that_of_two_experts():
    found = mg.continuity(*sides(GROUPED), layers=2)
    one = found.value.routers[0]
    assert one.has_groups
    assert 0 < one.num_known < one.num_tokens
    assert abs(one.crossing.hard.slope_near) < 0.01
    assert abs(one.crossing.smooth.slope_near - 1.0) < 0.02
    assert "boundary points unknown" in " ".join(str(found).split())


def test_the_file_has_lines_and_spreads_of_both_gates(tmp_path):
    out = tmp_path / "lines.parquet"
    found = mg.continuity(MODEL, REC, layers=0, out=out, smooth="eps=0.2").value.routers[0]
    table = pq.read_table(out).to_pylist()
    spreads = [r for r in table if (r["what"], r["gate"]) == ("spread", "smooth")]
    np.testing.assert_allclose([r["spread"] for r in spreads], found.crossing.smooth.spread)
    assert len(spreads) == 40
    assert {r["gate"] for r in table if r["what"] == "line"} == {"hard", "smooth"}
    assert found.eps == 0.2


def test_a_flip_costs_what_the_other_experts_make_of_the_input_and_none_nothing():
    """B is an earlier checkpoint's recording: its choices, by A's experts, in torch."""
    other = sides(BALANCED, 1000)[1]
    found = mg.explain(MODEL, REC, run_b=other, layers=1, experts=True)
    (cost,) = found.value.costs
    assert "changes by" in str(found)
    mine, theirs = (
        next(iter(load_file(folder / "chosen-text.1-00000.safetensors").values())).astype(np.int64)
        for folder in (REC, other)
    )
    flipped = np.flatnonzero((np.sort(mine, axis=1) != np.sort(theirs, axis=1)).any(axis=1))
    assert (cost.num_flipped, cost.num_looked) == (len(flipped), 512)
    some = flipped[np.linspace(0, len(flipped) - 1, 512).astype(int)]
    y = inputs_of(REC)[some]
    one, another = block(y, mine[some]), block(y, theirs[some])
    over = np.linalg.norm(one - another, axis=1) / np.linalg.norm(one, axis=1)
    np.testing.assert_allclose(cost.over_output, over.mean(), rtol=1e-6)
    found = mg.explain(MODEL, REC, run_b=REC, layers=1, experts=True)
    (cost,) = found.value.costs
    assert (cost.num_flipped, cost.over_output) == (0, None)


WAYS = 2


@pytest.fixture(scope="module")
def crossed():
    return mg.regions(
        MODEL, REC, layers=1, segments=WAYS, random_experts=1,
        against=BALANCED / "step_100",
    ).value  # fmt: skip


def test_changes_on_ways_are_those_of_many_points_on_them(crossed):
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
    way = crossed.routers[0].ways[0]
    assert way.num_segments == WAYS
    assert way.router_changes == np.mean(routed)
    assert way.all_neurons == np.mean(every)
    np.testing.assert_allclose(way.neuron_changes, np.mean(neurons), atol=2 / WAYS)
    np.testing.assert_allclose(way.regions, 1 + way.router_changes + way.neuron_changes)


def test_regions_of_a_plane_stay_below_the_bound_and_ways_are_drawn_by_the_seed(crossed):
    for one in (crossed.routers[0], crossed.routers[0].before):
        plane = one.plane
        assert plane.bound == most_regions(16, 4, 32, 2)
        assert all(0 < count <= plane.bound for count in (plane.regions, *plane.random))
        assert len(set(plane.expert_sets)) == len(plane.of_cell)

    def ways(seed: int) -> tuple:
        asked = {"layers": 1, "segments": WAYS, "random_experts": 0}
        return mg.regions(MODEL, REC, seed=seed, **asked).value.routers[0].ways

    assert ways(0) == crossed.routers[0].ways
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


def test_what_is_too_much_curved_or_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    asked = {"layers": 0, "segments": 4, "random_experts": 0}
    with pytest.raises(UsageError, match="of experts are to be read"):
        mg.regions(MODEL, REC, **asked)
    with pytest.raises(UsageError, match="197 kB of experts are, at most, to be read"):
        mg.continuity(MODEL, REC, layers=1)
    assert mg.regions(MODEL, REC, yes=True, **asked).value.routers
    with pytest.raises(UsageError, match="boundaries are not linear"):
        mg.regions(*sides(GROUPED))
    with pytest.raises(RouterError, match="no router text/1"):
        mg.regions(MODEL, REC, layers=1, against=GROUPED / "step_1500")
