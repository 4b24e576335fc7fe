"""What is known of drifting inputs in closed form is what `perturb` says."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import levy

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import GroupMask
from moegeom.core.tokens import InputNoise
from moegeom.engine.search_pace import SearchPace
from moegeom.research.perturb.document import document
from moegeom.research.perturb.record import PerturbRequest
from moegeom.research.perturb.study import TIMES, Moved, perturb, router_paths
from tests.by_day import by_day
from tests.unit.studies.orthonormal import inputs_of, router_of
from tests.unit.studies.samples import BALANCED, GROUPED, SAMPLES, sides, unwrapped, widest, worded

MODEL, REC = map(str, sides(BALANCED))


def looked_at(router, inputs, moved, **options):
    request = PerturbRequest("made", **options)
    return router_paths(router, inputs, np.arange(len(inputs)), moved, request)


def sample(**options):
    return perturb(PerturbRequest(MODEL, **{"tokens": REC, **options}))


def one_of_two():
    """A router of two experts, of which one is chosen: one boundary."""
    router = router_of(experts=2)
    return dataclasses.replace(router, rule=dataclasses.replace(router.rule, top_k=1))


def test_of_two_experts_everything_is_known():
    router, inputs = one_of_two(), inputs_of(1)[:6]
    found = looked_at(router, inputs, Moved.by(InputNoise(0.3, False)), time=2.0)
    weight = router.weight.astype(np.float64)
    gaps = np.abs((inputs @ (weight[0] - weight[1])) / np.linalg.norm(weight[0] - weight[1]))
    for token, gap in zip(found.tokens, gaps, strict=True):
        scale = (gap / 0.3) ** 2
        for at, share in zip(token.curve, TIMES, strict=True):
            assert at.time == 2.0 * share
            chance = levy.cdf(at.time, scale=scale)
            np.testing.assert_allclose([at.lower, at.upper], chance, rtol=1e-4)
            assert at.simulated_lower == at.simulated_upper
            assert abs(at.simulated_lower - chance) < 5.0 * at.simulated_se + 1e-4
        half = levy.median(scale=scale)
        halves = (token.half.earliest, token.half.simulated, token.half.latest)
        np.testing.assert_allclose(halves, half, rtol=0.03)
    assert {(pair.expert_out, pair.expert_in) for pair in found.exits} <= {(0, 1), (1, 0)}
    assert (found.elsewhere, found.unfinished) == (0.0, 0.0)


def test_noise_in_shares_of_the_rms_is_the_same_at_any_length():
    inputs, moved = inputs_of(1)[:4], Moved.by(InputNoise(0.1))
    found = looked_at(router_of(), inputs, moved)
    longer = looked_at(router_of(), 8.0 * inputs, moved)
    assert longer == found
    zeros = looked_at(router_of(), np.zeros_like(inputs[:1]), moved)
    assert zeros.half.simulated == 0.0  # all logits are 0: it is on every boundary


def test_a_drift_towards_a_boundary_arrives_when_it_must():
    router, inputs = one_of_two(), inputs_of(1)[:1]
    weight = router.weight.astype(np.float64)
    normal = weight[0] - weight[1]
    gap = float(inputs[0] @ normal)
    towards = -gap * normal / (normal @ normal)
    moved = Moved(0.02 * np.linalg.norm(towards), False, None, towards)
    there = looked_at(router, inputs, moved, time=2.0)
    away = looked_at(router, inputs, dataclasses.replace(moved, drift=-towards), time=2.0)
    chances = [at.simulated_lower for at in there.curve]
    np.testing.assert_allclose(chances, [0.0, 0.0, 0.0, 0.5, 1.0], atol=0.06)
    assert there.half.simulated == pytest.approx(1.0, abs=0.1)
    assert away.half.simulated == np.inf
    assert away.curve[-1].upper < 1e-9
    assert there.exits == ()
    assert there.elsewhere is None


def test_bounds_hold_the_simulation_and_exits_add_up():
    found = looked_at(router_of(), inputs_of(1), Moved.by(InputNoise(0.3)), time=4.0)
    for token in found.tokens:
        for at in token.curve:
            assert at.lower <= at.simulated_upper + 4.5 * at.simulated_se + 1e-9
            assert at.upper >= at.simulated_lower - 4.5 * at.simulated_se - 1e-9
        assert token.half.earliest <= token.half.simulated <= token.half.latest
    assert sum(pair.share for pair in found.exits) == pytest.approx(1.0)
    assert 0.1 < found.elsewhere < 0.6
    seen = {token.nearest for token in found.tokens}
    of_nearest = {(p.expert_out, p.expert_in) for p in found.exits if p.share_nearest > 0.0}
    assert of_nearest == seen


@pytest.mark.parametrize("layer", by_day(range(3), [1]))
def test_the_page_has_the_figures_of_the_balanced_sample(layer):
    page = (SAMPLES.parent / "docs/perturb.md").read_text("utf-8")
    (router,) = sample(layers=str(layer)).routers
    half = router.half
    row = (
        f"| balanced, layer {layer} | {half.earliest:.1f} to {half.latest:.1f} | "
        f"{half.simulated:.1f} | {10.0 * np.sqrt(half.simulated):.0f} %"
    )
    (line,) = (line for line in page.splitlines() if line.startswith(row))
    assert line.endswith(f"| {router.elsewhere:.0%} |".replace("%", " %"))


def test_files_hold_curves_and_exits(tmp_path):
    out = tmp_path / "paths.parquet"
    found = sample(layers="0", at=(900, 5), out=out)
    (router,) = found.routers
    assert widest(worded(document, found, width=140)) <= 140
    assert [token.token for token in router.tokens] == [5, 900]
    rows = pq.read_table(out).to_pylist()
    curves = [row for row in rows if row["what"] == "curve"]
    assert [row["token"] for row in curves] == [5] * 5 + [900] * 5 + [None] * 5
    assert [row["p_upper"] for row in curves[-5:]] == [at.upper for at in router.curve]
    exits = [row for row in rows if row["what"] == "exit"]
    assert sum(row["share"] for row in exits) == pytest.approx(1.0)
    assert {row["token"] for row in exits} == {None}
    with pytest.raises(UsageError, match="exists already"):
        sample(out=out)


def test_two_recordings_give_noise_and_drift(tmp_path):
    random = np.random.default_rng(0)
    inputs = random.standard_normal((2048, 64)).astype(np.float32)
    shift = random.standard_normal(64)
    shift *= 0.3 / np.sqrt((shift**2).mean())
    second = inputs + shift + 0.05 * random.standard_normal(inputs.shape)
    names = [f"text/{layer}" for layer in range(3)]
    for name, values in (("a", inputs), ("b", second)):
        arrays = dict.fromkeys(names, values.astype(np.float32))
        np.savez(tmp_path / f"{name}.npz", **arrays)
    options = {"tokens": str(tmp_path / "a.npz"), "stage": "router_input", "layers": "1"}
    options |= {"noise": str(tmp_path / "b.npz"), "at": (3, 4), "unverified": True}
    still, moving = sample(**options), sample(**options, drift=True)
    expected = np.sqrt((0.3**2 + 0.05**2) / 2.0)
    assert still.routers[0].size == pytest.approx(expected, rel=0.02)
    assert moving.routers[0].size is None
    assert moving.has_drift
    # what is left is a tenth of the noise, and the drift is larger than both
    assert still.routers[0].half != moving.routers[0].half


def test_rules_with_a_bias_or_groups_have_figures_and_no_proofs():
    model, tokens = map(str, sides(GROUPED))
    report = perturb(PerturbRequest(model, tokens=tokens, layers="1", at=(5, 900)))
    (router,) = report.routers
    assert not router.is_linear
    assert {(at.lower, at.upper) for at in router.curve} == {(None, None)}
    chances = [at.simulated_lower for at in router.curve]
    assert chances == sorted(chances)
    assert 0.0 < router.half.simulated < np.inf
    assert 0.0 < router.half.simulated_se < router.half.simulated
    assert sum(pair.share for pair in router.exits) == pytest.approx(1.0)
    text = unwrapped(worded(document, report, width=80))
    assert "curved or grouped" in text
    assert "simulated)" in text


def test_the_half_time_of_one_token_has_the_error_that_seeds_show():
    router, inputs = router_of(np.linspace(0.0, 0.02, 16)), inputs_of(1)[:1]
    halves = [
        looked_at(router, inputs, Moved.by(InputNoise(0.3)), seed=seed).half for seed in range(12)
    ]
    spread = np.std([half.simulated for half in halves], ddof=1)
    stated = np.median([half.simulated_se for half in halves])
    assert spread / 3.0 < stated < 4.0 * spread
    one = looked_at(router, inputs, Moved.by(InputNoise(0.3)))
    assert one.elsewhere_se > 0.0
    assert min(pair.share_se for pair in one.exits) > 0.0
    assert min(at.simulated_se for at in one.curve if at.simulated_upper < 1.0) >= 0.0


@pytest.mark.parametrize("bias", [None, np.zeros(16) + 0.1])
def test_routers_of_equal_or_zero_rows_are_on_every_boundary_at_once(bias):
    """Distance 0 is known before any search."""
    for rows in (np.ones((16, 24), np.float32), np.zeros((16, 24), np.float32)):
        router = router_of(bias, weight=rows)
        found = looked_at(router, inputs_of(1)[:3], Moved.by(InputNoise(0.1)))
        assert found.half.simulated == 0.0
        assert found.curve[0].simulated_lower == 1.0
        assert found.unfinished == 0.0


def test_rows_that_differ_in_biases_alone_have_no_boundary():
    rows, bias = np.ones((16, 24), np.float32), np.linspace(0.0, 1.0, 16).astype(np.float32)
    router = router_of(weight=rows, logit_bias=bias)
    rule = dataclasses.replace(router.rule, has_logit_bias=True)
    found = looked_at(
        dataclasses.replace(router, rule=rule), inputs_of(1)[:2], Moved.by(InputNoise(0.1))
    )
    assert found.half.simulated == np.inf
    assert found.exits == ()


def test_hidden_size_1_and_two_pairs_of_equal_rows_end_too():
    rows = np.linspace(-1.0, 1.0, 16)[:, None].astype(np.float32)
    found = looked_at(router_of(weight=rows), inputs_of(1)[:3, :1], Moved.by(InputNoise(0.1)))
    assert 0.0 <= found.half.simulated <= np.inf
    rows = router_of().weight.copy()
    rows[1], rows[3:6] = rows[0], rows[2]
    found = looked_at(router_of(weight=rows), inputs_of(1)[:4], Moved.by(InputNoise(0.1)))
    assert len(found.tokens) == 4
    groups = router_of(np.zeros(16), GroupMask(4, 2, "top2_sum", 0.0))
    found = looked_at(groups, inputs_of(1)[:1], Moved.by(InputNoise(0.1)))
    assert found.unfinished < 0.01


@pytest.mark.parametrize("hidden", [1, 4])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_biased_router_of_two_experts_has_figures_of_one_token_and_of_one_dimension(
    tokens, hidden
):
    """Without a warning, which is an error here: barriers may be nowhere, and without a normal."""
    bias, rows = np.array([0.05, -0.1]), np.array([[0.1] * hidden, [-1.0] * hidden], np.float32)
    router = router_of(bias, weight=rows)
    router = dataclasses.replace(router, rule=dataclasses.replace(router.rule, top_k=1))
    found = looked_at(router, inputs_of(3)[:tokens, :hidden], Moved.by(InputNoise(0.1)))
    assert len(found.tokens) == tokens
    assert 0.0 <= found.half.simulated <= np.inf


def test_a_budget_ends_a_search_with_what_it_has():
    router, inputs = router_of(), inputs_of(2)
    pace = SearchPace(None, 1e-9)
    request = PerturbRequest("made")
    moved = Moved.by(InputNoise(0.3))
    found = router_paths(router, inputs, np.arange(len(inputs)), moved, request, pace)
    assert 0 < len(found.tokens) < len(inputs)
    assert found.num_left == len(inputs) - len(found.tokens)
    with pytest.raises(UsageError, match="--budget 0"):
        PerturbRequest("made", budget=0.0)


def test_equal_recordings_move_nothing_and_logits_are_refused(tmp_path):
    assert {reason for _, reason in sample(noise=REC).left_out} == {
        "both recordings hold the same inputs: nothing moves them"
    }
    logits = tmp_path / "logits.npz"
    made = np.random.default_rng(0).standard_normal((256, 16)).astype(np.float32)
    np.savez(logits, **{f"text/{layer}": made for layer in range(3)})
    with pytest.raises(RecordingError, match="takes router inputs"):
        sample(tokens=str(logits), stage="logits")
