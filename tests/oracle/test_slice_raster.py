"""Pictures of choices against the rule itself, exact arithmetic, and many digits."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from itertools import product

import mpmath
import numpy as np
import pytest

from moegeom.core.router import GroupMask, LogitMap, Projection, Rule, Weights
from moegeom.geometry.rows import composed_rows, cosine_scale
from moegeom.geometry.selection import route
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.plane import raster as pixels
from moegeom.studies.cells.plane.raster import plane_raster, raster
from moegeom.studies.cells.plane.raster_enclosure import Rectangles
from moegeom.studies.cells.plane.raster_frame import Frame, PixelState, PlaneRouter, plane_router
from moegeom.studies.cells.plane.score_ranges import score_ranges

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

    def raster(self, size=(14, 11), frame=FRAME, **options):
        return raster(
            self.rule, self.weight, self.logit_bias, self.selection_bias, self.centre, self.basis,
            frame, size, self.projection, **options,
        )  # fmt: skip

    def plane(self):
        return plane_router(
            self.rule, self.weight, self.logit_bias, self.selection_bias, self.centre, self.basis,
            self.projection,
        )  # fmt: skip

    def choice(self, points):
        """By the reference, from inputs of the full space."""
        inputs = self.centre + points @ self.basis.T
        logits = inputs @ self.weight.T
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        if self.projection is not None and self.projection.scale is not None:
            length = np.linalg.norm(
                inputs @ self.projection.weight.T + self.projection.bias, axis=1
            )
            logits = logits * cosine_scale(length, self.projection.scale)[:, None]
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


#: Two of the six maps and biases of each score, mask and kind of rows.
SOME = [RULES[6 * n + (n + step) % 6] for n in range(len(RULES) // 6) for step in (0, 3)]


def check_constant_pixels(rule):
    some = case(*rule, seed=RULES.index(rule))
    made = some.raster(depth=5)  # pixels are large and bends sharp
    assert wrong_pixels(made, some) == 0, rule
    assert made.count(PixelState.CONSTANT) > 0, rule
    # one group of two, and slots left over: one set may fill the whole frame
    assert made.count(PixelState.CROSSED) > 0 or rule[1] == "few", rule
    assert made.share(PixelState.OPEN) < 0.02, rule


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", SOME, ids=str)
def test_no_point_of_a_constant_pixel_has_another_choice(rule):
    check_constant_pixels(rule)


@pytest.mark.nightly
def test_no_point_of_a_constant_pixel_of_any_rule_has_another_choice():
    for rule in RULES:
        check_constant_pixels(rule)


def test_some_rules_have_every_map_bias_mask_and_score():
    assert len(SOME) == len(set(SOME)) == len(RULES) // 3
    for place in range(5):
        assert {rule[place] for rule in SOME} == {rule[place] for rule in RULES}


@pytest.mark.parametrize(("score", "bias"), [("identity", 0.0), ("sigmoid", 0.6)])
def test_narrower_rectangles_are_found_out(score, bias, monkeypatch):
    """The test above sees an interval that is 10 % too narrow."""
    some = case(score, "top2", bias=bias)
    assert wrong_pixels(some.raster((40, 40)), some, (40, 40)) == 0

    def narrower(router, rectangles):
        return score_ranges(router, Rectangles(rectangles.centre, 0.9 * rectangles.half))

    monkeypatch.setattr(pixels, "score_ranges", narrower)
    assert wrong_pixels(some.raster((40, 40)), some, (40, 40)) > 0


def test_a_bend_that_is_left_out_is_found_out(monkeypatch):
    some = case("sigmoid", bias=0.6, seed=3)
    some = dataclasses.replace(some, weight=3.0 * some.weight)
    assert wrong_pixels(some.raster(), some) == 0

    def linear(router, rectangles):
        scores = score_ranges(router, rectangles)
        return dataclasses.replace(scores, rest=np.zeros_like(scores.rest))

    monkeypatch.setattr(pixels, "score_ranges", linear)
    assert wrong_pixels(some.raster(), some) > 0


# ------------------------------------------------------------------------- affine, exact arithmetic


def exact_top(slope, offset, x, y, k):
    """The k largest logits in exact arithmetic; None where the k-th is a tie."""
    values = [
        Fraction(float(a)) * x + Fraction(float(b)) * y + Fraction(float(c))
        for (a, b), c in zip(slope, offset, strict=True)
    ]
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return tuple(sorted(order[:k])) if values[order[k - 1]] > values[order[k]] else None


def exact_corners(router, frame, size):
    """Choices at all corners of pixels: a convex cell holds a pixel that it has the corners of."""
    x0, x1, y0, y1 = map(Fraction, frame)
    return {
        (row, column): exact_top(
            router.slope, router.offset,
            x0 + (x1 - x0) * column / size[0], y0 + (y1 - y0) * row / size[1], router.rule.top_k,
        )
        for row in range(size[1] + 1) for column in range(size[0] + 1)
    }  # fmt: skip


def affine_plane(seed, experts=12, k=3, scale=1.0):
    generator = np.random.default_rng(seed)
    rule = Rule(k, "softmax", Weights("scores"), has_logit_bias=True)
    slope = scale * generator.standard_normal((experts, 2))
    return PlaneRouter(rule, slope, scale * generator.standard_normal(experts))


@pytest.mark.parametrize(("seed", "size"), [(0, (40, 40)), (1, (37, 23)), (2, (1, 50))])
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


def test_exact_corners_find_narrower_rectangles_out(monkeypatch):
    def narrower(router, rectangles):
        return score_ranges(router, Rectangles(rectangles.centre, 0.9 * rectangles.half))

    monkeypatch.setattr(pixels, "score_ranges", narrower)
    router, frame, size = affine_plane(0), (-1.7, 2.1, -2.0, 1.3), (40, 40)
    made = plane_raster(router, Frame(*frame, *size))
    corners = exact_corners(router, frame, size)
    wrong = [
        pixel
        for pixel in zip(*np.nonzero(made.state == PixelState.CONSTANT), strict=True)
        if len({corners[pixel[0] + dy, pixel[1] + dx] for dy in (0, 1) for dx in (0, 1)}) > 1
    ]
    assert wrong


@pytest.mark.parametrize(("experts", "k", "seed"), [(8, 2, 0), (10, 3, 1), (9, 6, 5)])
def test_sets_of_affine_rules_are_the_exact_cells(experts, k, seed):
    router = affine_plane(seed, experts, k)
    cells = exact_cells(router.slope, router.offset, k)
    frame = Frame(-3.0, 3.0, -3.0, 3.0, 300, 300)
    made = plane_raster(router, frame)
    assert set(made.expert_sets) <= set(expert_sets(cells))
    inside = [
        tuple(sorted(cell))
        for cell, point in cells.cells.items()
        if all(abs(x) < Fraction(299, 100) for x in point)
    ]
    assert len(inside) > 2
    seen = set(made.expert_sets)
    # cells thinner than a pixel may be missed, and only those
    assert len([cell for cell in inside if cell not in seen]) <= 1
    for cell, point in cells.cells.items():
        column, row = (int((float(x) + 3.0) * 50.0) for x in point)
        is_shown = 0 <= column < 300 and 0 <= row < 300
        if is_shown and made.state[row, column] == PixelState.CONSTANT:
            assert made.expert_sets[made.label[row, column]] == tuple(sorted(cell))


# ------------------------------------------------------------------------------- enclosures, mpmath


def exact_scores(router, point):
    """Selection scores in 60 digits."""
    x, y = (mpmath.mpf(float(v)) for v in point)
    logits = [
        mpmath.mpf(float(a)) * x + mpmath.mpf(float(b)) * y + mpmath.mpf(float(c))
        for (a, b), c in zip(router.slope, router.offset, strict=True)
    ]
    rule, bias = router.rule, router.selection_bias
    if router.length is not None and not (rule.is_affine and bias is None):
        length = mpmath.sqrt(
            sum(
                (mpmath.mpf(float(a)) * x + mpmath.mpf(float(b)) * y + mpmath.mpf(float(c))) ** 2
                for (a, b), c in zip(router.length.slope, router.length.offset, strict=True)
            )
        )
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
    if bias is not None:
        logits = [q + mpmath.mpf(float(c)) for q, c in zip(logits, bias, strict=True)]
    return logits


@pytest.mark.one_in(2)
@pytest.mark.parametrize("side", [0.0, 1e-9, 1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("factor", [0.1, 1.0, 8.0, 200.0])
def test_scores_of_many_digits_lie_in_their_enclosures(side, factor):
    generator = np.random.default_rng(5)
    with mpmath.workdps(60):
        for number, (score, _, mapped, bias, cosine) in enumerate(
            rule for rule in RULES if rule[1] == "all"
        ):
            some = case(score, "all", mapped, bias, cosine, seed=number)
            router = some.plane()
            router = dataclasses.replace(
                router, slope=factor * router.slope, offset=factor * router.offset
            )
            centre = generator.uniform(-2.0, 2.0, (2, 2))
            half = side * generator.uniform(0.2, 1.0, (2, 2))
            scores = score_ranges(router, Rectangles(centre, half))
            for r, share in product(range(2), generator.choice([-1.0, 1.0, 0.3], (3, 2))):
                point = centre[r] + share * half[r]
                step = [mpmath.mpf(float(p)) - mpmath.mpf(float(c)) for p, c in zip(point, centre[r], strict=True)]  # fmt: skip
                over = 1.0 + 2.0**-50  # the point is rounded, and may lie just outside
                for i, exact in enumerate(exact_scores(router, point)):
                    linear = (
                        mpmath.mpf(float(scores.value[r, i]))
                        + mpmath.mpf(float(scores.along_x[r, i])) * step[0]
                        + mpmath.mpf(float(scores.along_y[r, i])) * step[1]
                    )
                    assert abs(exact - linear) <= mpmath.mpf(float(scores.rest[r, i])) * over
                    assert scores.low[r, i] <= exact <= scores.high[r, i]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "softmax"])
def test_what_remains_shrinks_with_the_square_of_the_rectangle(score):
    router = case(score, mapped="cap", bias=0.5, cosine=True).plane()
    centre = np.array([[0.3, -0.4]])
    rests = [
        score_ranges(router, Rectangles(centre, np.full((1, 2), side))).rest.max()
        for side in (1e-2, 1e-3, 1e-4)
    ]
    assert rests[1] < rests[0] / 80.0
    assert rests[2] < rests[1] / 80.0


@pytest.mark.parametrize("function", ["exp", "log1p", "tanh"])
def test_functions_are_as_accurate_as_assumed(function):
    generator = np.random.default_rng(0)
    values = -generator.exponential(10.0, 3000)
    values = np.exp(values) if function == "log1p" else values
    with mpmath.workdps(40):
        for x, found in zip(values, getattr(np, function)(values), strict=True):
            exact = getattr(mpmath, function)(mpmath.mpf(float(x)))
            assert abs(mpmath.mpf(float(found)) - exact) <= 4 * np.spacing(abs(found))


# -------------------------------------------------------------------------------- ties, fills, edges


def test_a_tie_that_stays_is_never_proved():
    rule = Rule(1, "softmax", Weights("scores"))
    slope = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    made = plane_raster(PlaneRouter(rule, slope, np.zeros(3)), Frame(-1, 1, -1, 1, 8, 8))
    # on the right two equal experts lead; the lower one is shown
    assert np.all(made.state[:, 4:] == PixelState.OPEN)
    assert {made.expert_sets[i] for i in np.unique(made.label[:, 4:])} == {(0,)}
    assert np.all(made.state[:, :3] == PixelState.CONSTANT)
    # the fourth column ends where the tie begins, and has its own points
    assert np.all(made.state[:, 3] == PixelState.OPEN)
    both = dataclasses.replace(rule, top_k=2)
    made = plane_raster(PlaneRouter(both, slope, np.zeros(3)), Frame(-1, 1, -1, 1, 8, 8))
    assert np.all(made.state[:, 5:] == PixelState.CONSTANT)


def test_a_tie_is_not_halved_without_end(monkeypatch):
    """Halving costs nothing where no point of a pixel is decided."""
    seen = []

    def counted(router, rectangles):
        seen.append(len(rectangles.centre))
        return score_ranges(router, rectangles)

    monkeypatch.setattr(pixels, "score_ranges", counted)
    rule = Rule(1, "softmax", Weights("scores"))
    made = plane_raster(
        PlaneRouter(rule, np.ones((2, 2)), np.zeros(2)), Frame(-1, 1, -1, 1, 32, 32), depth=8
    )
    assert made.count(PixelState.OPEN) == 1024
    assert sum(seen) < 8 * 1024


def test_saturated_scores_that_float64_cannot_tell_apart_are_not_proved():
    rule = Rule(1, "sigmoid", Weights("scores"), has_selection_bias=True)
    slope, offset = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([50.0, 80.0])
    router = PlaneRouter(rule, slope, offset, np.zeros(2))
    made = plane_raster(router, Frame(-1, 1, -1, 1, 4, 4))
    assert made.count(PixelState.OPEN) == 16


def test_a_fill_that_lets_masked_experts_in_is_proved():
    groups = GroupMask(4, 1, "max", 0.0)
    rule = Rule(3, "sigmoid", Weights("scores"), has_selection_bias=True, groups=groups)
    generator = np.random.default_rng(2)
    slope, offset = generator.standard_normal((8, 2)), np.zeros(8)
    router = PlaneRouter(rule, slope, offset, np.full(8, -2.0))
    made = plane_raster(router, Frame(-4, 4, -4, 4, 64, 64))
    # every kept score is negative: the first three masked ones are chosen
    assert set(made.expert_sets) == {(2, 3, 4), (0, 1, 4), (0, 1, 2)}
    assert made.share(PixelState.CONSTANT) > 0.9
    assert made.share(PixelState.OPEN) < 0.002


def test_group_facets_that_change_no_choice_are_no_facets():
    """Kept are two of three groups, of which the first has the one expert that is chosen."""
    groups = GroupMask(3, 2, "max", -INF)
    rule = Rule(1, "identity", Weights("scores"), has_selection_bias=True, groups=groups)
    slope = np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    router = PlaneRouter(rule, slope, np.array([9.0, 0.0, 0.0]), np.zeros(3))
    made = plane_raster(router, Frame(-1, 1, -1, 1, 9, 9))
    assert made.count(PixelState.CONSTANT) == 81
    assert made.expert_sets == ((0,),)


def test_all_experts_are_a_constant():
    router = affine_plane(0, experts=3, k=3)
    made = plane_raster(router, Frame(-1, 1, -1, 1, 5, 4))
    assert made.share(PixelState.CONSTANT) == 1.0
    assert made.expert_sets == ((0, 1, 2),)


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


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (Frame(0.0, 0.0, 0.0, 1.0, 4, 4), "empty frame"),
        (Frame(0.0, INF, 0.0, 1.0, 4, 4), "empty frame"),
        (Frame(0.0, 1.0, 0.0, 1.0, 0, 4), "empty frame"),
        (Frame(0.0, 1.0, 0.0, 1.0, 1 << 14, 1 << 14), "at most"),
        (Frame(1e9, 1e9 + 1e-3, 0.0, 1.0, 4, 4), "too small for float64"),
    ],
)
def test_frames_that_have_no_picture_are_refused(frame, match):
    with pytest.raises(ValueError, match=match):
        plane_raster(affine_plane(0), frame)


def test_numbers_that_have_no_picture_are_refused():
    some = case("softmax")
    with pytest.raises(ValueError, match="not finite"):
        dataclasses.replace(some, weight=some.weight * INF).raster()
    with pytest.raises(ValueError, match="17 of 16"):
        dataclasses.replace(some, rule=dataclasses.replace(some.rule, top_k=17)).raster()
    odd = dataclasses.replace(some.rule, groups=GroupMask(5, 2, "max", 0.0))
    with pytest.raises(ValueError, match="16 experts in 5"):
        dataclasses.replace(some, rule=odd).raster()
    cosine = case("softmax", cosine=True)
    flat = dataclasses.replace(cosine.projection, scale=0.0)
    with pytest.raises(ValueError, match="positive"):
        dataclasses.replace(cosine, projection=flat).raster()
