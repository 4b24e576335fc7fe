"""Pictures, slices and segments against the rule, other code, exact arithmetic and many digits; what is
proved of a pixel stays true for every rule, at every point, at every resolution.
"""

import dataclasses
import itertools
from fractions import Fraction
from itertools import product

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.decomposition import PCA

from moegeom.core.router import GroupMask, LogitMap, Projection, Provenance, Router, Rule, Weights
from moegeom.geometry.rows import composed_rows, cosine_scale
from moegeom.geometry.selection import route
from moegeom.routing_cells.plane import raster, subspace
from moegeom.routing_cells.plane import raster as pixels
from moegeom.routing_cells.plane import segments as on_segments
from moegeom.routing_cells.plane.polygons import cell_sides, polygons
from moegeom.routing_cells.plane.raster import (
    Frame,
    PixelState,
    PlaneRouter,
    plane_raster,
    plane_router,
    score_ranges,
)
from moegeom.routing_cells.walk.enumeration import enumerate_cells
from moegeom.routing_cells.walk.segment_crossings import (
    crossing_rate,
    exact_crossings,
    segment_crossings,
)
from tests.by_day import by_day
from tests.oracle.exact_cells import exact_cells, expert_sets
from tests.oracle.helpers import choices, exact_logits, in_fractions, router, rows_of

EXPERTS, HIDDEN, TOP_K = 16, 7, 4
INF = np.inf
GROUPS = {
    "all": None,
    "max": GroupMask(4, 2, "max", -INF),
    "max_fill_0": GroupMask(4, 2, "max", 0.0),
    "top2": GroupMask(4, 2, "top2_sum", -INF),
    "top2_fill_0": GroupMask(8, 3, "top2_sum", 0.0),
    "few": GroupMask(8, 1, "max", -INF),  # fewer experts than slots
    "single": GroupMask(16, 9, "top2_sum", -INF),
}
MAPS = {"raw": None, "cap": LogitMap(0.8, 2.0), "times": LogitMap(1.7)}
FRAME = (-2.0, 3.0, -2.5, 2.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """A router in its full space, a plane, and its logits at points of the plane."""

    rule: Rule
    weight: np.ndarray
    logit_bias: np.ndarray | None
    selection_bias: np.ndarray | None
    centre: np.ndarray
    basis: np.ndarray
    projection: Projection | None

    def plane(self):
        router = Router(
            *("router", "", 0, self.weight, self.rule),
            Provenance("matrix", ("weight",), "", "float64"),
            logit_bias=self.logit_bias,
            selection_bias=self.selection_bias,
            projection=self.projection,
        )
        return plane_router(router, subspace.Slice(self.centre, self.basis))

    def raster(self, size=(14, 11), frame=FRAME, **options):
        router = self.plane()
        return plane_raster(router, Frame(*frame, *size), **options)

    def choice(self, points):
        """By the reference, from inputs of the full space."""
        inputs = self.centre + points @ self.basis.T
        logits = inputs @ self.weight.T
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        if self.projection is not None and self.projection.scale is not None:
            head = self.projection
            length = np.linalg.norm(inputs @ head.weight.T + head.bias, axis=1)
            logits = logits * cosine_scale(length, head.scale)[:, None]
        return np.sort(route(logits, self.rule, self.selection_bias).chosen, axis=1)


def case(score, groups="all", mapped="raw", bias=0.0, cosine=False, seed=0):
    """``bias`` is how far selection biases spread; 0: there are none."""
    generator = np.random.default_rng(seed)
    rule = Rule(
        TOP_K, score, Weights("scores"), has_selection_bias=bias > 0.0, has_logit_bias=True,
        groups=GROUPS[groups], logit_map=MAPS[mapped],
    )  # fmt: skip
    weight = generator.standard_normal((EXPERTS, HIDDEN))
    logit_bias = generator.standard_normal(EXPERTS)
    selection_bias = generator.uniform(-bias, bias / 2, EXPERTS) if bias else None
    projection = None
    if cosine:
        matrix, shift = generator.standard_normal((5, HIDDEN)), generator.standard_normal(5)
        projection = Projection(matrix, shift, 3.0)
        weight, logit_bias = composed_rows(generator.standard_normal((EXPERTS, 5)), matrix, shift)
    basis = np.linalg.qr(generator.standard_normal((HIDDEN, 2)))[0]
    centre = generator.standard_normal(HIDDEN)
    return Case(rule, weight, logit_bias, selection_bias, centre, basis, projection)


def points_in(frame, size, row, column, generator, count):
    """Random points of each pixel, many of them near its edges: (pixels, count, 2)."""
    shares = generator.beta(0.3, 0.3, (len(row), count, 2))
    x0, x1, y0, y1 = frame
    x = x0 + (x1 - x0) * (column[:, None] + shares[..., 0]) / size[0]
    y = y0 + (y1 - y0) * (row[:, None] + shares[..., 1]) / size[1]
    return np.stack([x, y], axis=2)


def wrong_pixels(made, some, size=(14, 11), frame=FRAME, count=30):
    """Constant pixels in which the reference chooses something else at some point."""
    row, column = np.nonzero(made.state == PixelState.CONSTANT)
    points = points_in(frame, size, row, column, np.random.default_rng(1), count)
    chosen = some.choice(points.reshape(-1, 2)).reshape(len(row), count, -1)
    claimed = np.array(made.expert_sets)[made.label[row, column]]
    return np.count_nonzero((chosen != claimed[:, None, :]).any(axis=(1, 2)))


RULES = [
    (score, groups, mapped, bias, cosine)
    for score, groups, cosine, mapped in product(
        ("identity", "softmax", "sigmoid", "sqrt_softplus"), GROUPS, (False, True), MAPS
    )
    for bias in (0.0, 0.05 if score == "softmax" else 0.6)
]


#: By day every other pair of a score and a mask, whose maps, biases and kinds of rows take turns.
SOME = [RULES[24 * n + 5 * n % 12] for n in range(len(RULES) // 24)]


@pytest.mark.parametrize("rule", by_day(RULES, SOME), ids=str)
def test_no_point_of_a_constant_pixel_has_another_choice(rule):
    some = case(*rule, seed=RULES.index(rule))
    made = some.raster(depth=5)  # pixels are large and bends sharp
    assert wrong_pixels(made, some) == 0
    assert made.count(PixelState.CONSTANT) > 0
    # one group of two, and slots left over: one set may fill the whole frame
    assert made.count(PixelState.CROSSED) > 0 or rule[1] == "few"
    assert made.share(PixelState.OPEN) < 0.02


# ------------------------------------------------------------------------- affine, exact arithmetic
def exact_top(plane, x, y):
    """The k largest logits in exact arithmetic; None where the k-th is a tie."""
    values, k = exact_logits(plane.slope, plane.offset, (x, y)), plane.rule.top_k
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return tuple(sorted(order[:k])) if values[order[k - 1]] > values[order[k]] else None


def exact_corners(router, frame, size):
    """Choices at all corners of pixels: a convex cell holds a pixel that it has the corners of."""
    x0, x1, y0, y1 = map(Fraction, frame)
    return {
        (row, column): exact_top(
            router, x0 + (x1 - x0) * column / size[0], y0 + (y1 - y0) * row / size[1]
        )
        for row in range(size[1] + 1) for column in range(size[0] + 1)
    }  # fmt: skip


def affine_plane(seed, experts=12, k=3):
    return PlaneRouter(Rule(k, "softmax", Weights("scores")), *router(experts, 2, seed))


@pytest.mark.parametrize(("seed", "size"), [(0, (30, 30)), (1, (27, 23)), (2, (1, 50))])
def test_pixels_of_affine_rules_are_what_their_exact_corners_say(seed, size):
    router, frame = affine_plane(seed), (-1.7, 2.1, -2.0, 1.3)
    made = plane_raster(router, Frame(*frame, *size))
    corners = exact_corners(router, frame, size)
    for row, column in product(range(size[1]), range(size[0])):
        around = {corners[row + dy, column + dx] for dy in (0, 1) for dx in (0, 1)}
        if made.state[row, column] == PixelState.CONSTANT:
            assert around == {made.expert_sets[made.label[row, column]]}
        elif made.state[row, column] == PixelState.CROSSED:
            assert len(around) > 1
    # open pixels are the rare ones that a facet only just touches
    assert made.share(PixelState.OPEN) < 0.005


# ------------------------------------------------------------------------------- enclosures, mpmath
def digits(array) -> list:
    """Floats of any nesting in many digits."""
    return [mpmath.mpf(a) if np.isscalar(a) else digits(np.asarray(a)) for a in array.tolist()]


def exact_scores(router, point):
    """Selection scores in 60 digits."""
    x, y = digits(point)

    def linear(part):
        rows = zip(digits(part.slope), digits(part.offset), strict=True)
        return [a * x + b * y + c for (a, b), c in rows]

    logits, rule, bias = linear(router), router.rule, router.selection_bias
    if router.length is not None and not (rule.is_affine and bias is None):
        length = mpmath.sqrt(sum(part**2 for part in linear(router.length)))
        logits = [z * mpmath.mpf(router.length.scale) / length for z in logits]
    if not rule.is_affine:
        if rule.logit_map is not None:
            logits = [z * mpmath.mpf(rule.logit_map.multiplier) for z in logits]
            if not np.isinf(rule.logit_map.soft_cap):
                cap = mpmath.mpf(rule.logit_map.soft_cap)
                logits = [cap * mpmath.tanh(z / cap) for z in logits]
        powers = [mpmath.exp(z) for z in logits]
        logits = {
            "identity": lambda: logits,
            "sigmoid": lambda: [1 / (1 + 1 / p) for p in powers],
            "sqrt_softplus": lambda: [mpmath.sqrt(mpmath.log(1 + p)) for p in powers],
            "softmax": lambda: [p / sum(powers) for p in powers],
        }[rule.score]()
    return logits if bias is None else [q + c for q, c in zip(logits, digits(bias), strict=True)]


#: Half a side of rectangles, and the size of logits.
SIZES = list(product([0.0, 1e-9, 1e-3, 0.1, 1.0, 30.0], [0.1, 1.0, 8.0, 200.0]))
SIZES_BY_DAY = {
    "a point": (0.0, 8.0),
    "a small rectangle": (1e-3, 1.0),
    "a bend": (0.1, 8.0),
    "a large rectangle": (1.0, 0.1),
    "saturation": (30.0, 200.0),
}


@pytest.mark.parametrize(("side", "factor"), by_day(SIZES, SIZES_BY_DAY))
def test_scores_of_many_digits_lie_in_their_enclosures(side, factor):
    generator = np.random.default_rng(5)
    with mpmath.workdps(60):
        rules = [rule for rule in RULES if rule[1] == "all"]
        for number, (score, _, mapped, bias, cosine) in enumerate(rules):
            some = case(score, "all", mapped, bias, cosine, seed=number)
            router = some.plane()
            slope, offset = factor * router.slope, factor * router.offset
            router = dataclasses.replace(router, slope=slope, offset=offset)
            centre = generator.uniform(-2.0, 2.0, (2, 2))
            half = side * generator.uniform(0.2, 1.0, (2, 2))
            scores = score_ranges(router, pixels.Rectangles(centre, half))
            for r, share in product(range(2), generator.choice([-1.0, 1.0, 0.3], (2, 2))):
                point = centre[r] + share * half[r]
                step = [p - c for p, c in zip(digits(point), digits(centre[r]), strict=True)]
                over = 1.0 + 2.0**-50  # the point is rounded, and may lie just outside
                parts = scores.value, scores.along_x, scores.along_y, scores.rest
                value, along_x, along_y, rest = (digits(part[r]) for part in parts)
                for i, exact in enumerate(exact_scores(router, point)):
                    linear = value[i] + along_x[i] * step[0] + along_y[i] * step[1]
                    assert abs(exact - linear) <= rest[i] * over
                    assert scores.low[r, i] <= exact <= scores.high[r, i]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "softmax"])
def test_what_remains_shrinks_with_the_square_of_the_rectangle(score):
    some = case(score, mapped="cap", bias=0.5, cosine=True)
    router = some.plane()
    centre = np.array([[0.3, -0.4]])
    rests = [
        score_ranges(router, pixels.Rectangles(centre, np.full((1, 2), side))).rest.max()
        for side in (1e-2, 1e-3, 1e-4)
    ]
    assert rests[1] < rests[0] / 80.0
    assert rests[2] < rests[1] / 80.0


@pytest.mark.parametrize("function", ["exp", "log1p", "tanh"])
def test_functions_are_as_accurate_as_assumed(function):
    generator = np.random.default_rng(0)
    values = -generator.exponential(10.0, 1000)
    values = np.exp(values) if function == "log1p" else values
    with mpmath.workdps(40):
        for x, found in zip(values, getattr(np, function)(values), strict=True):
            exact = getattr(mpmath, function)(mpmath.mpf(float(x)))
            assert abs(mpmath.mpf(float(found)) - exact) <= 4 * np.spacing(abs(found))


# -------------------------------------------------------------------------------- ties, fills, edges
def picture(rule, slope, offset, bias=None, half=1.0, pixels=8, **options):
    frame = Frame(-half, half, -half, half, pixels, pixels)
    return plane_raster(
        PlaneRouter(rule, np.array(slope), np.array(offset), bias), frame, **options
    )


def test_ties_and_saturated_scores_are_never_proved_and_what_changes_no_choice_is():
    rule = Rule(1, "softmax", Weights("scores"))
    slope = [[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]
    made = picture(rule, slope, np.zeros(3))
    # on the right two equal experts lead; the lower one is shown
    assert np.all(made.state[:, 4:] == PixelState.OPEN)
    assert {made.expert_sets[i] for i in np.unique(made.label[:, 4:])} == {(0,)}
    assert np.all(made.state[:, :3] == PixelState.CONSTANT)
    # the fourth column ends where the tie begins, and has its own points
    assert np.all(made.state[:, 3] == PixelState.OPEN)
    made = picture(dataclasses.replace(rule, top_k=2), slope, np.zeros(3))
    assert np.all(made.state[:, 5:] == PixelState.CONSTANT)
    rule = Rule(1, "sigmoid", Weights("scores"), has_selection_bias=True)
    made = picture(rule, np.eye(2), [50.0, 80.0], np.zeros(2), pixels=4)
    assert made.count(PixelState.OPEN) == 16
    # a fill lets masked experts in: every score of a group that stays is negative
    groups = GroupMask(4, 1, "max", 0.0)
    rule = Rule(3, "sigmoid", Weights("scores"), has_selection_bias=True, groups=groups)
    slope = np.random.default_rng(2).standard_normal((8, 2))
    made = picture(rule, slope, np.zeros(8), np.full(8, -2.0), half=4.0, pixels=64)
    assert set(made.expert_sets) == {(2, 3, 4), (0, 1, 4), (0, 1, 2)}
    assert made.share(PixelState.CONSTANT) > 0.9
    assert made.share(PixelState.OPEN) < 0.002
    # two of three groups stay, of which the first has the one expert that is chosen
    groups = GroupMask(3, 2, "max", -INF)
    rule = Rule(1, "identity", Weights("scores"), has_selection_bias=True, groups=groups)
    slope = [[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]
    made = picture(rule, slope, [9.0, 0.0, 0.0], np.zeros(3), pixels=9)
    assert (made.count(PixelState.CONSTANT), made.expert_sets) == (81, ((0,),))
    every = plane_raster(affine_plane(0, experts=3, k=3), Frame(-1, 1, -1, 1, 5, 4))
    assert (every.share(PixelState.CONSTANT), every.expert_sets) == (1.0, ((0, 1, 2),))


def test_a_tie_is_not_halved_without_end(monkeypatch):
    """Halving costs nothing where no point of a pixel is decided."""
    sizes = []

    def counted(router, rectangles):
        sizes.append(len(rectangles.centre))
        return score_ranges(router, rectangles)

    monkeypatch.setattr(pixels, "score_ranges", counted)
    rule = Rule(1, "softmax", Weights("scores"))
    made = picture(rule, np.ones((2, 2)), np.zeros(2), pixels=32, depth=8)
    assert made.count(PixelState.OPEN) == 1024
    assert sum(sizes) < 8 * 1024


def test_a_projection_that_passes_zero_is_enclosed():
    rule = Rule(2, "softmax", Weights("scores"), has_selection_bias=True)
    generator = np.random.default_rng(4)
    matrix = generator.standard_normal((3, 4))
    weight, _ = composed_rows(generator.standard_normal((6, 3)), matrix, None)
    some = Case(
        rule, weight, None, generator.uniform(0.0, 0.2, 6), np.zeros(4), np.eye(4)[:, :2],
        Projection(matrix, np.zeros(3), 2.0),
    )  # fmt: skip
    made = some.raster((25, 25), (-1.0, 1.0, -1.0, 1.0))
    assert wrong_pixels(made, some, (25, 25), (-1.0, 1.0, -1.0, 1.0)) == 0
    assert made.share(PixelState.CONSTANT) > 0.4


def test_frames_and_numbers_that_have_no_picture_are_refused():
    for frame, message in (
        (Frame(0.0, 0.0, 0.0, 1.0, 4, 4), "empty frame"),
        (Frame(0.0, INF, 0.0, 1.0, 4, 4), "empty frame"),
        (Frame(0.0, 1.0, 0.0, 1.0, 0, 4), "empty frame"),
        (Frame(0.0, 1.0, 0.0, 1.0, 1 << 14, 1 << 14), "at most"),
        (Frame(1e9, 1e9 + 1e-3, 0.0, 1.0, 4, 4), "too small for float64"),
    ):
        with pytest.raises(ValueError, match=message):
            plane_raster(affine_plane(0), frame)
    some, cosine = case("softmax"), case("softmax", cosine=True)
    odd = dataclasses.replace(some.rule, groups=GroupMask(5, 2, "max", 0.0))
    flat = dataclasses.replace(cosine.projection, scale=0.0)
    for wrong, message in (
        (dataclasses.replace(some, weight=some.weight * INF), "not finite"),
        (dataclasses.replace(some, rule=dataclasses.replace(some.rule, top_k=17)), "17 of 16"),
        (dataclasses.replace(some, rule=odd), "16 experts in 5"),
        (dataclasses.replace(cosine, projection=flat), "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.raster()


# ------------------------------------------------------------------------------------------- slices
@pytest.mark.parametrize(("tokens", "hidden"), [(20, 40), (200, 40), (300, 600)])
def test_principal_directions_are_those_of_scikit_learn(tokens, hidden):
    generator = np.random.default_rng(tokens)
    inputs = generator.standard_normal((tokens, hidden)) * np.linspace(3.0, 0.1, hidden) ** 2 + 1.0
    found, share = subspace.principal_slice(inputs, 3)
    oracle = PCA(n_components=3, svd_solver="full").fit(inputs)
    assert_allclose(np.abs(np.diag(found.basis.T @ oracle.components_.T)), 1.0, rtol=1e-6)
    assert_allclose(share, oracle.explained_variance_ratio_.sum())
    assert_allclose(found.centre, oracle.mean_)
    assert_allclose(found.basis.T @ found.basis, np.eye(3), atol=1e-12)
    assert_allclose(found.coordinates(inputs), (inputs - oracle.mean_) @ found.basis, atol=1e-12)
    rows = np.flatnonzero(generator.random(tokens) < 0.7)
    of_some, own = (
        subspace.principal_slice(inputs[rows], 3),
        subspace.principal_slice(inputs, 3, rows),
    )
    assert_array_equal(own[0].basis, of_some[0].basis)
    assert_array_equal(own[0].centre, of_some[0].centre)


@pytest.mark.parametrize("experts", [17, 21, 37])
def test_equal_rows_are_equal_on_a_slice(experts):
    generator = np.random.default_rng(experts)
    for dims in (1, 2, 3):
        weight = generator.standard_normal((experts, 64)).astype(np.float32)
        weight[-1], weight[experts // 2] = weight[0], weight[3]
        part = subspace.random_slice(generator.standard_normal(64), dims, 0)
        found = np.column_stack(part.instance(weight, None))
        assert_array_equal(found[[-1, experts // 2]], found[[0, 3]])
        assert len(np.unique(found, axis=0)) == experts - 2


def test_a_plane_goes_through_its_points_and_has_their_logits():
    points = np.random.default_rng(2).standard_normal((3, 20))
    part = subspace.slice_through(points)
    assert_allclose(part.inputs(part.coordinates(points)), points)
    with pytest.raises(ValueError, match="span fewer"):
        subspace.slice_through(np.outer([0.0, 1.0, 2.0], np.ones(5)))
    with pytest.raises(ValueError, match="3 directions of 3 inputs"):
        subspace.principal_slice(np.eye(3), 3)
    with pytest.raises(ValueError, match="4 directions"):
        subspace.random_slice(np.zeros(3), 4, 0)
    weight, bias = router(9, 30, 1)
    generator = np.random.default_rng(2)
    part = subspace.random_slice(generator.standard_normal(30), 3, seed=5)
    rows, offset = part.instance(weight, bias)
    points = generator.standard_normal((50, 3))
    assert_allclose(points @ rows.T + offset, part.inputs(points) @ weight.T + bias)
    assert_allclose(part.coordinates(part.inputs(points)), points)


@pytest.mark.parametrize("has_bias", [False, True])
def test_arcs_hold_the_choice_of_every_angle(has_bias):
    generator = np.random.default_rng(3)
    cosine, sine = generator.standard_normal((2, 16))
    bias = generator.standard_normal(16) if has_bias else np.zeros(16)
    arcs = subspace.circle_arcs(cosine, sine, bias, 4)
    assert arcs.is_proved.all()
    angles = np.linspace(0.0, 2.0 * np.pi, 20_001)[:-1]
    points = np.column_stack([np.cos(angles), np.sin(angles)])
    chosen = choices(points, np.column_stack([cosine, sine]), bias, 4)
    arc = np.searchsorted(arcs.start, angles, side="right") - 1
    assert_array_equal(arcs.expert_set[arc], chosen)
    assert np.all(np.diff(arcs.start) > 0.0)
    assert arcs.stop[-1] == arcs.start[0] + 2.0 * np.pi
    if not has_bias:
        exact = exact_cells(np.column_stack([cosine, sine]), None, 4)
        assert sorted(rows_of(arcs.expert_set)) == expert_sets(exact)
    for k, chosen, arrays in (
        (1, [[1]], ([0.1, 0.2, 0.1], [0.0] * 3, [0.0, 5.0, 0.1])),
        (3, [[0, 1, 2]], ([1.0] * 3, [1.0] * 3, [0.0] * 3)),
    ):  # nothing changes on the whole circle
        assert subspace.circle_arcs(*map(np.array, arrays), k).expert_set.tolist() == chosen


def test_polygons_fill_the_frame_and_facets_tie_two_experts():
    weight, bias = router(12, 2, 5)
    found = enumerate_cells(weight, bias, 3)
    drawn = polygons(cell_sides(weight, bias, found), found.facets, (-1.0, 1.5, -1.25, 1.0))
    assert np.isclose(sum(map(_area, drawn.corners)), 2.5 * 2.25)
    inside = ~np.isnan(drawn.facet_ends[:, 0, 0])
    assert 0 < inside.sum() < len(found.facets)
    facets = found.facets[inside].tolist()
    for ends, (one, other) in zip(drawn.facet_ends[inside], facets, strict=True):
        pair = [set(found.expert_set[cell].tolist()) for cell in (one, other)]
        (out,), (into,) = pair[0] - pair[1], pair[1] - pair[0]
        gap = ends @ (weight[out] - weight[into]) + bias[out] - bias[into]
        assert_allclose(gap, 0.0, atol=1e-12)
        assert (np.abs(ends - [0.25, -0.125]) <= [1.25 + 1e-12, 1.125 + 1e-12]).all()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_polygons_end_where_equal_experts_leave_no_cell(k):
    """Every point of the frame is inside the polygon of what it chooses, or of none at a tie."""
    weight, bias = router(9, 2, k)
    weight[[4, 6, 8]], bias[[4, 6, 8]] = weight[[1, 2, 2]], bias[[1, 2, 2]]
    equal = [np.array([1, 4]), np.array([2, 6, 8])]
    found = enumerate_cells(weight, bias, k)
    sides = [*cell_sides(weight, bias, found, equal)]
    drawn = polygons(sides, found.facets, (-2.0, 2.0, -2.0, 2.0))
    points = np.random.default_rng(k).uniform(-2.0, 2.0, (1000, 2))
    logits = np.sort(points @ weight.T + bias, axis=1)[:, ::-1]
    is_tied = logits[:, k - 1] - logits[:, k] < 1e-12
    assert 10 < is_tied.sum() < 1000
    cells = {row: n for n, row in enumerate(rows_of(found.expert_set))}
    chosen = rows_of(choices(points, weight, bias, k))
    corners = [(n, corners) for n, corners in enumerate(drawn.corners) if len(corners)]
    for point, tie, row in zip(points, is_tied, chosen, strict=True):
        around = {n for n, polygon in corners if _is_inside(polygon, point)}
        assert around == (set() if tie else {cells[row]})


def _area(corners):
    if not len(corners):
        return 0.0
    x, y = corners.T
    return 0.5 * float(x @ np.roll(y, -1) - y @ np.roll(x, -1))


def _is_inside(corners, point):
    edge, to_point = np.roll(corners, -1, axis=0) - corners, point - corners
    return (edge[:, 0] * to_point[:, 1] - edge[:, 1] * to_point[:, 0] >= -1e-12).all()


# ----------------------------------------------------------------------------------------- segments
NEAR_ONE = 1.0 + 2.0**-52 * np.arange(-2, 3)
KINDS = {
    "random": lambda r, n, e: r.standard_normal((2, n, e)),
    "ties": lambda r, n, e: r.integers(-2, 3, (2, n, e)).astype(float),
    "few_values": lambda r, n, e: r.integers(0, 2, (2, n, e)).astype(float),
    "identical_ends": lambda r, n, e: np.repeat(r.integers(-3, 3, (1, n, e)), 2, 0).astype(float),
    "identical_experts": lambda r, n, e: np.repeat(r.standard_normal((2, n, 1)), e, 2),
    "duplicates": lambda r, n, e: np.repeat(r.standard_normal((2, n, -(-e // 2))), 2, 2)[..., :e],
    "float32": lambda r, n, e: r.standard_normal((2, n, e)).astype(np.float32),
    "near_ties": lambda r, n, e: r.integers(-2, 3, (2, n, e)) * r.choice(NEAR_ONE, (2, n, e)),
    "through_one_point": lambda r, n, e: np.outer([-1, 1], r.standard_normal(n * e)).reshape(
        2, n, e
    ),
    "copies": lambda r, n, e: r.standard_normal((2, n, e))[:, :, r.integers(0, e // 2 + 1, e)],
    "copies_with_ties": lambda r, n, e: r.integers(-2, 3, (2, n, e))[:, :, r.integers(0, e, e)],
    "tiny": lambda r, n, e: r.standard_normal((2, n, e)) * 1e-310,
    "products_underflow": lambda r, n, e: r.standard_normal((2, n, e)) * 1e-161,
    "huge": lambda r, n, e: r.standard_normal((2, n, e)) * 1e307,
}
SHAPES = [(2, 1), (5, 2), (5, 4), (6, 6), (9, 3)]


def top(values, k):
    return set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def by_all_pairs(start, stop, k):
    """(t, out, into) for each change, from the sets at the ends and between all places of ties."""
    a, b = in_fractions(start), in_fractions(stop)
    meet = set()
    for i, j in itertools.combinations(range(len(a)), 2):
        rate = (b[i] - a[i]) - (b[j] - a[j])
        if rate and 0 < (a[j] - a[i]) / rate < 1:
            meet.add((a[j] - a[i]) / rate)
    places = [Fraction(0), *sorted(meet), Fraction(1)]
    sets = [top(a, k)]
    for left, right in itertools.pairwise(places):
        t = (left + right) / 2
        sets.append(top([(1 - t) * x + t * y for x, y in zip(a, b, strict=True)], k))
    sets.append(top(b, k))
    found = []
    for at, before, after in zip(places, sets[:-1], sets[1:], strict=True):
        if before != after:
            found.append((at, tuple(sorted(before - after)), tuple(sorted(after - before))))
    return found


CASES = list(itertools.product(KINDS, SHAPES))
#: Each kind and each shape.
BY_DAY = [(kind, SHAPES[n % len(SHAPES)]) for n, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "shape"), by_day(CASES, BY_DAY))
def test_crossings_are_the_changes_between_all_ties(kind, shape):
    experts, k = shape
    random = np.random.default_rng([sum(map(ord, kind)), experts, k])
    a, b = KINDS[kind](random, 12, experts)
    compiled = segment_crossings(a, b, k, with_places=True)
    for segment, (start, stop) in enumerate(zip(a, b, strict=True)):
        changes = by_all_pairs(start, stop, k)
        exact = exact_crossings(np.float64(start), np.float64(stop), k)
        assert [(c.at, c.out, c.into) for c in exact] == changes
        assert compiled.count[segment] == len(changes)
        own = compiled.at[compiled.first[segment] : compiled.first[segment + 1]]
        assert_allclose(own, [float(at) for at, _, _ in changes], 1e-14, 0)
    assert compiled.first[-1] == compiled.count.sum() == len(compiled.at)


def test_ties_are_settled_exactly_and_nothing_else_is():
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 200, 64))
    assert segment_crossings(a, b, 8).num_exact == 0
    a[3, :2], a[5], b[7] = 9.0, 0.0, b[7].round()
    a[10:90, 1], b[10:90, 1] = a[10:90, 0], b[10:90, 0]  # copies stand for each other
    a[9, 1::2], b[9, 1::2] = a[9, ::2], b[9, ::2]  # of all lines: two change places at a time
    found = segment_crossings(a, b, 8)
    assert np.flatnonzero(found.is_exact).tolist() == [5, 7, 9]
    for segment in (3, 5, 7, 9):
        assert found.count[segment] == len(exact_crossings(a[segment], b[segment], 8))
    # Line 2 passes the common point of 0 and 1 by less than float64 tells at t = 1/3.
    a = np.array([[3.0, 0.0, 1.0], [3.0, 0.0, 1.0]])
    b = np.array([[0.0, 6.0, 4.0 + 2.0**-50], [0.0, 6.0, 4.0 - 2.0**-50]])
    found = segment_crossings(a, b, 1)
    assert found.is_exact.all()
    assert found.count.tolist() == [2, 1]


def test_what_is_no_segment_is_refused_and_the_error_of_the_rate_is_the_bootstraps():
    empty = segment_crossings(np.zeros((0, 4)), np.zeros((0, 4)), 2, with_places=True)
    assert empty.count.shape == empty.at.shape == (0,)
    a = np.zeros((2, 3))
    with pytest.raises(ValueError, match="top_k 4 of 3"):
        segment_crossings(a, a, 4)
    with pytest.raises(ValueError, match="shapes"):
        segment_crossings(a, a[:1], 1)
    a[1, 1] = np.nan
    with pytest.raises(ValueError, match="finite"):
        segment_crossings(a, np.zeros((2, 3)), 1)
    with pytest.raises(ValueError, match="finite"):
        exact_crossings(a[1], a[0], 1)
    with pytest.raises(ValueError, match="top_k 0"):
        exact_crossings(a[0], a[0], 0)
    random = np.random.default_rng(1)
    length = random.uniform(1.0, 3.0, 400)
    count = random.poisson(4.0 * length)
    rate, error = crossing_rate(count, length)
    drawn = random.integers(0, 400, (4000, 400))
    again = count[drawn].sum(axis=1) / length[drawn].sum(axis=1)
    assert rate == count.sum() / length.sum()
    assert_allclose(error, again.std(), 0.06)
    assert np.isnan(crossing_rate(np.zeros(3, np.int64), np.zeros(3))).all()
    rate, error = crossing_rate(np.array([4]), np.array([2.0]))
    assert rate == 2.0
    assert np.isnan(error)


# ------------------------------------------------------------------------------------ proved pixels
SIDES = (-1.5, 2.0, -1.0, 1.75)


@st.composite
def routers(draw):
    """Any rule of the house, with logits from flat to saturated, and equal experts among them."""
    score = draw(st.sampled_from(["identity", "softmax", "sigmoid", "sqrt_softplus"]))
    num_groups = draw(st.sampled_from([0, 2, 4]))
    experts = draw(st.sampled_from([4, 8, 12]))
    groups = None
    if num_groups:
        num_kept, fill = draw(st.integers(1, num_groups)), draw(st.sampled_from([-np.inf, 0.0]))
        groups = GroupMask(num_groups, num_kept, draw(st.sampled_from(["max", "top2_sum"])), fill)
    cap = draw(st.sampled_from([None, np.inf, 1.0, 30.0]))
    logit_map = None if cap is None else LogitMap(draw(st.sampled_from([0.5, 1.0, 3.0])), cap)
    has_bias = draw(st.booleans())
    rule = Rule(
        draw(st.integers(1, experts)), score, Weights("scores"), has_selection_bias=has_bias,
        groups=groups, logit_map=logit_map,
    )  # fmt: skip
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.01, 0.3, 1.0, 4.0, 30.0]))
    slope = size * generator.standard_normal((experts, 2))
    offset = size * generator.standard_normal(experts)
    bias = draw(st.sampled_from([0.01, 0.3])) * generator.standard_normal(experts)
    if draw(st.booleans()):  # two equal experts
        slope[1], offset[1], bias[1] = slope[0], offset[0], bias[0]
    length = None
    if draw(st.booleans()):
        ends = generator.standard_normal((3, 2)), generator.standard_normal(3)
        length = raster.PlaneLength(*ends, float(size))
    return raster.PlaneRouter(rule, slope, offset, bias if has_bias else None, length)


def chosen(router, points):
    """By the reference, ascending."""
    logits = points @ router.slope.T + router.offset
    if router.length is not None:
        length = np.linalg.norm(points @ router.length.slope.T + router.length.offset, axis=1)
        logits = logits * (router.length.scale / np.maximum(length, 1e-12))[:, None]
    return np.sort(route(logits, router.rule, router.selection_bias).chosen, axis=1)


def frame(width, height):
    return raster.Frame(*SIDES, width, height)


@given(routers(), st.integers(1, 14), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_points_of_constant_pixels_choose_what_is_proved(router, width, height, seed):
    made = raster.plane_raster(router, frame(width, height), depth=1)
    x0, x1, y0, y1 = SIDES
    shares = np.random.default_rng(seed).beta(0.3, 0.3, (1000, 2))
    points = np.array([x0, y0]) + shares * np.array([x1 - x0, y1 - y0])
    row = np.minimum((shares[:, 1] * height).astype(int), height - 1)
    column = np.minimum((shares[:, 0] * width).astype(int), width - 1)
    is_constant = made.state[row, column] == raster.PixelState.CONSTANT
    claimed = np.array(made.expert_sets)[made.label[row, column]]
    assert_array_equal(claimed[is_constant], chosen(router, points)[is_constant])


@given(routers(), st.integers(1, 6), st.integers(1, 6), st.sampled_from([2, 3]))
@settings(max_examples=15)
def test_a_finer_picture_never_contradicts_a_coarser_one(router, width, height, factor):
    coarse = raster.plane_raster(router, frame(width, height), depth=1)
    fine = raster.plane_raster(router, frame(factor * width, factor * height), depth=1)
    parts = (height, factor, width, factor)
    state = fine.state.reshape(parts).transpose(0, 2, 1, 3)
    label = np.array(fine.expert_sets)[fine.label].reshape(*parts, -1).transpose(0, 2, 1, 3, 4)
    is_constant = coarse.state == raster.PixelState.CONSTANT
    claimed = np.array(coarse.expert_sets)[coarse.label]
    assert not (state[is_constant] == raster.PixelState.CROSSED).any()
    same = (label[is_constant] == claimed[is_constant][:, None, None, :]).all(axis=3)
    # an open pixel shows what float64 chooses at its centre, which lies in the proved pixel
    assert same.all()
    crossed = state[coarse.state == raster.PixelState.CROSSED]
    labels = label[coarse.state == raster.PixelState.CROSSED]
    is_same = (labels == labels[:, :1, :1, :]).all(axis=(1, 2, 3))
    assert not ((crossed == raster.PixelState.CONSTANT).all(axis=(1, 2)) & is_same).any()


# ------------------------------------------------------------------------- segments of curved rules
CURVED = [
    rule for rule in RULES
    if not rule[4] and (rule[0] != "identity" or rule[1] != "all" or rule[2] != "raw")
]  # fmt: skip


@pytest.mark.parametrize("rule", by_day(CURVED, CURVED[::5]), ids=str)
def test_changes_on_segments_are_those_of_the_rule_at_many_points(rule, monkeypatch):
    some = case(*rule, seed=RULES.index(rule))
    random = np.random.default_rng(2)
    a, b = 2.0 * random.standard_normal((2, 5, EXPERTS))
    bias = some.selection_bias
    changes = on_segments.bracketed_changes(a, b, some.rule, bias)
    t = np.linspace(0.0, 1.0, 4001)[:, None]
    for number in np.flatnonzero(~changes.is_unknown):
        chosen = np.sort(route((1.0 - t) * a[number] + t * b[number], some.rule, bias).chosen)
        seen = t[1:][(chosen[1:] != chosen[:-1]).any(axis=1), 0] - 1.25e-4
        places = changes.at[changes.first[number] : changes.first[number + 1]]
        # two changes in one step of the points are none or one there
        assert (np.abs(seen[:, None] - places).min(axis=1, initial=INF) <= 1.26e-4).all()
        apart = np.diff(places, prepend=-1.0, append=2.0)
        alone = places[(apart[:-1] > 1e-3) & (apart[1:] > 1e-3)]
        assert (np.abs(alone[:, None] - seen).min(axis=1, initial=INF) <= 1.26e-4).all()
    assert changes.is_unknown.mean() < 1.0
    # what the loop proves is what enclosures prove
    monkeypatch.setattr(on_segments, "segment_loop", lambda *_: None)
    plain = on_segments.bracketed_changes(a, b, some.rule, bias)
    both = ~(changes.is_unknown | plain.is_unknown)
    counts = (np.diff(one.first)[both] for one in (changes, plain))
    assert_array_equal(*counts)
