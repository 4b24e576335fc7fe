"""What was planted in inputs and rows is what `space` calls the cause."""

import functools
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import norm

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.core.router import Rule, Weights
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import Sample, draw_sample
from moegeom.geometry.reference_laws import LAWS, InputSizes, LogitLaw, attributed, reference_laws
from moegeom.kernels.table import load_kernels
from moegeom.router.expert_tensors import ExpertTensors
from moegeom.router.load import load_routers
from moegeom.studies.space.document import document
from moegeom.studies.space.experts import expert_ranks
from moegeom.studies.space.record import RouterSpace, RouterSpaces, SpaceRequest
from moegeom.studies.space.router import router_space, sampled
from moegeom.studies.space.study import space
from moegeom.tokens.open import open_tokens
from tests.by_day import by_day
from tests.unit.studies.orthonormal import TOP_K, inputs_of, router_of, source_of
from tests.unit.studies.samples import (
    BALANCED,
    COLLAPSED,
    GROUPED,
    sides,
    unwrapped,
    widest,
    worded,
)

KERNELS = load_kernels("cpu")


#: What a record says of cones takes most of the time: few directions do where nothing is asked of it.
FEW, DIRECTIONS = 2**12, "moegeom.studies.space.reach._DIRECTIONS"


def read_sample(router, source) -> Sample:
    return draw_sample(router, source, ComputeOptions(), sampled(router), SMALL_SAMPLE_TOKENS)


def looked_at(router, inputs, directions: int = FEW) -> RouterSpace:
    read = read_sample(router, source_of(inputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DIRECTIONS, directions)
        return router_space(router, read, KERNELS, 0.002, 0)


def sample(model: Path, **options) -> RouterSpaces:
    checkpoint, tokens = map(str, sides(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DIRECTIONS, FEW)
        return space(SpaceRequest(checkpoint, **({"tokens": tokens} | options)))


@functools.cache
def whole(name: str) -> RouterSpaces:
    return sample(BALANCED.parent / name)


OF_BALANCED, OF_COLLAPSED = BALANCED.name, COLLAPSED.name


def test_draws_have_the_moments_of_their_law():
    random = np.random.default_rng(0)
    rows = random.standard_normal((5, 8))
    inputs = random.standard_normal((400, 8)) + random.standard_normal(8)
    bias = random.standard_normal(5)
    logits = inputs @ rows.T + bias
    sizes = InputSizes(float(inputs.var(axis=0).mean()), float((inputs**2).mean()))
    laws = reference_laws(logits, bias, rows, sizes)
    assert tuple(laws) == LAWS
    spread, gram = np.cov(logits.T, ddof=0), rows @ rows.T
    expected = {
        "isotropic": (bias, sizes.about_zero * gram),
        "mean": (logits.mean(axis=0), sizes.about_mean * gram),
        "covariance": (bias, spread),
        "gaussian": (logits.mean(axis=0), spread),
    }
    for name, (mean, covariance) in expected.items():
        drawn = laws[name].draw(200_000, np.random.default_rng(1))
        size = np.sqrt(np.diag(covariance))
        np.testing.assert_allclose((drawn.mean(axis=0) - mean) / size, 0.0, atol=0.01)
        unit = np.outer(size, size)
        np.testing.assert_allclose(np.cov(drawn.T) / unit, covariance / unit, atol=0.02)
    assert set(reference_laws(np.eye(4), np.zeros(4), None, None)) == {"covariance", "gaussian"}
    root = np.array([[1.0, 0.3], [-0.2, 0.8]])
    law = LogitLaw(np.array([0.4, 0.1]), root)
    drawn = law.draw(200_000, np.random.default_rng(2))
    expected = norm.cdf(0.3 / np.linalg.norm(np.array([1.0, -1.0]) @ root))
    assert (drawn[:, 0] > drawn[:, 1]).mean() == pytest.approx(expected, abs=0.005)


def test_additive_laws_are_parted_as_they_were_made():
    part = attributed({"isotropic": 1.0, "mean": 3.0, "covariance": 1.5, "gaussian": 3.5}, 3.4)
    assert (part.rows, part.mean, part.covariance) == (1.0, 2.0, 0.5)


def test_even_inputs_are_even_and_long_rows_and_wide_directions_causes_by_themselves():
    even = looked_at(router_of(), inputs_of(48))
    assert (even.meaning, even.is_pulled) == ("even", False)
    assert looked_at(router_of(), inputs_of(1)).meaning == "few"
    one = looked_at(router_of(experts=TOP_K), inputs_of(8))
    assert (one.meaning, one.tokens.near_share) == ("even", None)
    rows, inputs = router_of().weight, inputs_of(48)
    long = rows * np.geomspace(0.3, 3.0, len(rows), dtype=np.float32)[:, None]
    assert looked_at(router_of(weight=long), inputs).meaning == "rows"
    wide = inputs + sum(4.0 * np.outer(inputs @ rows[n], rows[n]) for n in (5, 6))
    assert looked_at(router_of(), wide.astype(np.float32)).meaning == "covariance"


def test_a_mean_along_one_row_is_the_cause_and_is_taken_away_with_it():
    router = router_of()
    lean = np.tile(1.5 * router.weight[3] + 0.8 * router.weight[4], (48, 1))
    inputs = inputs_of(48, lean)
    one = looked_at(router, inputs)
    assert one.meaning == "mean input"
    part = one.parts["max_vio"]
    assert part.mean > 0.8 * (one.tokens.max_vio - part.rows)
    assert one.centring.max_vio < 0.3 * one.tokens.max_vio
    centred = looked_at(router, inputs - inputs.mean(axis=0))
    assert centred.pull < 1e-6
    assert centred.meaning == "even"
    assert abs(centred.parts["log_effective_sets"].mean) < 0.05


@pytest.mark.parametrize("name", [OF_BALANCED, OF_COLLAPSED, GROUPED.name])
def test_parts_add_up_on_every_sample(name):
    record = sample(GROUPED, layers="1") if name == GROUPED.name else whole(name)
    assert widest(worded(document, record, width=140)) <= 140
    for router in record.routers:
        assert router.laws[-1].law == "tokens"
        for figure, part in router.parts.items():
            assert part.tokens == pytest.approx(getattr(router.tokens, figure), abs=1e-9)
        assert (router.cones is None) == (name == GROUPED.name)  # it has a bias


def test_the_mean_input_collapsed_the_collapsed_sample_and_centring_evens_it():
    # figures of 4 other seeds, by other code
    expected = {
        OF_BALANCED: [(7.08, 0.03, -0.36, -0.62), (7.13, -0.01, -0.37, -0.61)],
        OF_COLLAPSED: [(6.74, -2.26, -0.18, -0.25), (6.98, -2.40, -0.14, 0.02)],
    }
    for name, layers in expected.items():
        for router, parts in zip(whole(name).routers[:2], layers, strict=True):
            part = router.parts["log_effective_sets"]
            own = (part.rows, part.mean, part.covariance, part.rest)
            np.testing.assert_allclose(own, parts, atol=0.06)
            is_collapsed = name == OF_COLLAPSED
            assert router.meaning == ("mean input" if is_collapsed else "even")
            assert router.is_pulled == is_collapsed
    expected = [(0.83, 58, 178, 0.02), (0.66, 87, 397, 0.19), (0.55, 112, 568, 0.21)]
    for router, figures in zip(whole(OF_COLLAPSED).routers, expected, strict=True):
        max_vio, before, sets, moved = figures
        assert router.centring.max_vio == pytest.approx(max_vio, abs=0.01)
        assert router.centring.other_documents < max_vio + 0.1
        assert np.exp(router.tokens.log_effective_sets) == pytest.approx(before, abs=1.0)
        assert router.centring.effective_sets == pytest.approx(sets, abs=1.0)
        assert router.centring.weight_moved == pytest.approx(moved, abs=0.01)


#: Within .05 of a boundary: tokens, ball and gaussian, by other code.
NEAR = {
    (OF_BALANCED, 0): (0.263, 0.306, 0.256),
    (OF_BALANCED, 2): (0.186, 0.248, 0.193),
    (OF_COLLAPSED, 0): (0.212, 0.339, 0.195),
    (OF_COLLAPSED, 2): (0.193, 0.302, 0.195),
}


@pytest.mark.parametrize(("name", "layer"), by_day(NEAR, [(OF_BALANCED, 2), (OF_COLLAPSED, 0)]))
def test_second_moments_say_how_many_tokens_are_near_a_boundary_and_rows_do_not(name, layer):
    checkpoint, recording = map(str, sides(BALANCED.parent / name))
    router = load_routers(open_checkpoint(checkpoint)).routers[layer]
    read = read_sample(router, open_tokens(recording, None, None, (router.name,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DIRECTIONS, FEW)
        laws = router_space(router, read, KERNELS, 0.002, 0, near=0.05).laws
    shares = {law.law: law.figures.near_share for law in laws}
    tokens, ball, gaussian = NEAR[name, layer]
    assert shares["tokens"] == pytest.approx(tokens, abs=0.001)
    assert shares["ball"] == pytest.approx(ball, abs=0.012)
    assert shares["gaussian"] == pytest.approx(gaussian, abs=0.012)


def test_counting_boundaries_says_nearly_what_the_ball_does_and_less_in_a_wider_one():
    for router in whole(OF_BALANCED).routers:
        (ball,) = (law.figures.near_share for law in router.laws if law.law == "ball")
        assert router.near is not None
        assert router.near.leading == pytest.approx(ball, rel=0.2)
        assert router.near.leading <= 10.0 ** router.near.bounds_log10[0]
    own, wider = whole(OF_BALANCED).routers[0], sample(BALANCED, layers="0", radius=65.0).routers[0]
    assert {router.laws[-2].law for router in (own, wider)} == {"ball"}
    first, second = (router.laws[-2].figures.near_share for router in (own, wider))
    assert second == pytest.approx(first * own.near.radius / 65.0, rel=0.15)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("space")
    files = folder / "measure.parquet", folder / "centred.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moegeom.studies.space.measure._SEARCHED", 20)
        record = sample(COLLAPSED, layers="1", measure=files[0], out=files[1])
    return record.routers[0], *files


def test_shares_near_ties_are_measured_at_every_width(measured):
    router, table, _ = measured
    rows = pq.read_table(table).to_pylist()
    assert len(rows) == len(router.measured)
    share = {(r["law"], r["centre"], r["order"], r["epsilon"]): r for r in rows}
    near = router.near.width
    assert share["tokens", None, 1, near]["share_upper"] == router.tokens.near_share
    for law in router.laws[:-1]:
        centre = "origin" if law.law == "ball" else None
        one = share[law.law, centre, 1, near]
        error = np.hypot(one["share_se"], law.errors.near_share)
        assert abs(one["share_upper"] - law.figures.near_share) < 4.5 * error
    for (law, centre, order, width), row in share.items():
        assert row["share_lower"] <= row["share_upper"]
        if order > 1:
            # a tie of more is never nearer: of the same points, the rest are but more of them
            before = share[law, centre, order - 1, width]
            assert row["share_lower"] <= before["share_upper"] + 5 * (row["share_se"] + 0.05)
        if law == "ball":
            assert row["share_lower"] <= 10.0 ** row["bound_log10"] + 5 * row["share_se"]
            assert row["flats"] == {1: 120, 2: 560, 3: 1820}[order]
        else:
            assert row["flats"] is None
    # in 64 dimensions a ball is nearly its sphere
    ball, sphere = (share[law, "mean", 1, near] for law in ("ball", "sphere"))
    assert abs(ball["share_upper"] - sphere["share_upper"]) < 0.03
    # the mean input makes fewer tokens near: a ball around it has as many as the gaussian law
    assert share["ball", "origin", 1, near]["share_upper"] > 1.4 * router.tokens.near_share


def test_cells_of_visited_sets_are_shares_of_directions_and_of_sizes_without_any():
    # two equal experts in a plane of many: a quarter of the directions each, and one of a half
    weight = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 0.0]], np.float32)
    router = router_of(weight=weight, rule=Rule(1, "softmax", Weights("scores", True)))
    random = np.random.default_rng(0)
    inputs = (np.array([1.0, 0.5]) + 0.01 * random.standard_normal((512, 2))).astype(np.float32)
    cones = looked_at(router, inputs, 2**16).cones
    # from the right angle between the two rows to where the third takes over
    share = np.arctan2(2.0, -1.0) / (2.0 * np.pi)
    assert cones.covered == pytest.approx(share, abs=4 * cones.covered_se)
    assert cones.modal == cones.covered
    assert cones.correlation is None
    everywhere = random.standard_normal((4096, 2)).astype(np.float32)
    assert looked_at(router, everywhere, 2**16).cones.covered == 1.0
    rows = router_of().weight * np.geomspace(0.6, 1.5, 16, dtype=np.float32)[:, None]
    router, random = router_of(weight=rows), np.random.default_rng(1)
    inputs = random.standard_normal((4096, router.hidden_size)).astype(np.float32)
    cones = looked_at(router, inputs, 2**16).cones
    assert cones.correlation == pytest.approx(cones.correlation_by_size, abs=0.05)
    assert cones.correlation > 0.8
    lean = (inputs + 3.0 * rows[0]).astype(np.float32)
    assert looked_at(router, lean, 2**16).cones.correlation < cones.correlation - 0.2


def of_gates(gates: np.ndarray) -> Mock:
    experts, width, hidden = gates.shape
    tensors = Mock(spec=ExpertTensors, num_experts=experts, width=width, hidden=hidden)
    tensors.read_gate = lambda expert: (gates[expert], None)
    return tensors


def test_experts_that_see_few_directions_have_few_ranks():
    router, random = router_of(), np.random.default_rng(2)
    read = read_sample(router, source_of(inputs_of(48)))
    gates = random.standard_normal((3, 6, router.hidden_size)).astype(np.float32)
    gates[1, 2:] = 0.0
    ranks = expert_ranks(of_gates(gates), read, (3.0, 9.5), 0)
    assert (ranks.rank_min, ranks.rank_median) == (2, 6.0)
    assert ranks.effective_min < 2.0 + 1e-6 < ranks.effective_median < 6.0
    assert ranks.effective_median == pytest.approx(ranks.effective_random, rel=0.1)
    assert (ranks.local_dims, ranks.width_over_dimension) == (10, 6 / 9.5)
    assert ranks.is_narrow
    assert expert_ranks(of_gates(gates), read, None, 0).local_dims is None


def test_experts_are_read_when_they_are_asked_for(monkeypatch):
    (router,) = sample(BALANCED, layers="0", experts=True).routers
    ranks = router.experts
    assert (ranks.width, ranks.rank_min, ranks.is_narrow) == (32, 32, False)
    assert ranks.effective_min < ranks.effective_median < ranks.effective_random
    assert whole(OF_BALANCED).routers[0].experts is None
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    with pytest.raises(UsageError, match="of experts are to be read") as refusal:
        sample(BALANCED, layers="0", experts=True)
    assert "--yes" in refusal.value.hint


def test_laws_and_biases_are_written(tmp_path, measured):
    table = tmp_path / "laws.parquet"
    router, taken, biases = measured
    (other,) = sample(COLLAPSED, layers="1", out=table).routers
    rows = pq.read_table(table).to_pylist()
    assert [row["law"] for row in rows] == [*LAWS, "ball", "tokens"]
    assert rows[-1]["max_vio"] == other.tokens.max_vio
    with np.load(biases) as stored:
        np.testing.assert_array_equal(stored["text/1/change_float64"], router.centring.change)
    for options, message in (({"out": table}, ""), ({"measure": taken}, "--measure .*")):
        with pytest.raises(UsageError, match=f"{message}exists already"):
            sample(COLLAPSED, **options)


def test_logits_alone_say_no_cause_and_ids_and_bad_tokens_nothing(tmp_path):
    lean = 4.0 * (np.arange(16) < 2)
    random, logits = np.random.default_rng(0), tmp_path / "logits.npz"
    made = {f"text/{n}": random.standard_normal((1024, 16)) + lean for n in range(3)}
    np.savez(logits, **{name: z.astype(np.float32) for name, z in made.items()})
    record = sample(COLLAPSED, tokens=str(logits), stage="logits", layers="0,2")
    for router in record.routers:
        assert (router.meaning, router.parts, router.pull_random) == ("unknown", {}, None)
        assert router.pull > 0.5
    assert "needs recorded router inputs" in unwrapped(worded(document, record, width=80))
    ids = tmp_path / "ids.npz"
    np.savez(ids, **{f"text/{n}": np.tile([0, 1, 2, 3], (64, 1)) for n in range(3)})
    with pytest.raises(RecordingError, match="what makes the loads uneven"):
        sample(BALANCED, tokens=str(ids), stage="ids")
    inputs = inputs_of(2)
    inputs[5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="token 5"):
        looked_at(router_of(), inputs)
