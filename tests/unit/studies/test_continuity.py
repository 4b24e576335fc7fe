"""``moegeom continuity`` on the samples, and what flips cost where experts are read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

import moegeom as mg
from moegeom.core.errors import UsageError
from tests.unit.studies.samples import BALANCED, GROUPED, sides

MODEL, REC = sides(BALANCED)


@pytest.fixture(scope="module")
def found():
    return mg.continuity(MODEL, REC, layers=1).value


def stored(name: str) -> torch.Tensor:
    found = load_file(MODEL / "model.safetensors")[f"model.layers.1.mlp.{name}.weight"]
    return torch.from_numpy(found.astype(np.float64))


def block(y: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
    """Layer 1 in torch: softmax over all, 4 experts, no renormalising."""
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
    """The boundary point and the normal, from the stored rows and the recorded input."""
    rows, y = stored("gate").numpy(), inputs_of(REC)[crossing.token]
    apart = rows[crossing.pair[0]] - rows[crossing.pair[1]]
    return y - (apart @ y) / (apart @ apart) * apart, apart / np.linalg.norm(apart)


def test_the_line_has_the_outputs_of_the_block_in_torch(found):
    crossing = found.routers[0].crossing
    point, normal = line_of(crossing)
    some = np.arange(0, len(crossing.offset), 29)
    outputs = block(point + crossing.offset[some, None] * normal)
    np.testing.assert_allclose(crossing.hard.line[some], outputs[:, crossing.coordinate], rtol=1e-6)
    step = 1e-7 * np.array([[1.0], [-1.0]]) * normal
    np.testing.assert_allclose(
        np.linalg.norm(np.subtract(*block(point + step))), crossing.jump, rtol=1e-4
    )


def test_hard_outputs_level_off_at_the_jump_and_smoothed_ones_go_to_nothing(found):
    crossing = found.routers[0].crossing
    hard, smooth = crossing.hard, crossing.smooth
    np.testing.assert_allclose(hard.spread[0], crossing.jump, rtol=1e-3)
    assert abs(hard.slope_near) < 0.01
    assert abs(smooth.slope_near - 1.0) < 0.01
    ratio = smooth.spread / crossing.radius
    assert ratio.max() == smooth.steepest < 2.0 * ratio.min()
    assert smooth.spread[0] < 1e-3 * crossing.jump


def test_no_other_boundary_is_met_on_the_line(found):
    """At 4,001 points on either side the block chooses one set."""
    crossing = found.routers[0].crossing
    point, normal = line_of(crossing)
    for sign in (1.0, -1.0):
        at = sign * crossing.radius[-1] * np.linspace(1e-6, 1.0, 4001)[:, None]
        logits = torch.from_numpy(point + at * normal) @ stored("gate").T
        chosen = np.sort(logits.topk(4, dim=-1).indices.numpy(), axis=1)
        assert (chosen == chosen[0]).all()


def test_of_the_tokens_tried_the_highest_jump_wins(found):
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
    assert "boundary points unknown" in str(found)


def test_the_file_has_lines_and_spreads_of_both_gates(tmp_path):
    out = tmp_path / "lines.parquet"
    found = mg.continuity(MODEL, REC, layers=0, out=out, smooth="eps=0.2").value.routers[0]
    table = pq.read_table(out).to_pylist()
    spreads = [r for r in table if (r["what"], r["gate"]) == ("spread", "smooth")]
    np.testing.assert_allclose([r["spread"] for r in spreads], found.crossing.smooth.spread)
    assert len(spreads) == 40
    assert {r["gate"] for r in table if r["what"] == "line"} == {"hard", "smooth"}
    assert found.eps == 0.2


def test_a_flip_between_two_runs_costs_what_the_other_experts_make_of_the_input():
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


def test_same_choices_cost_nothing():
    found = mg.explain(MODEL, REC, run_b=REC, layers=1, experts=True)
    (cost,) = found.value.costs
    assert (cost.num_flipped, cost.over_output) == (0, None)
