"""Every number that docs/theory.md works out: written there, and given by the code it describes;
regions on segments and in polygons, against signs at many points and by counting faces.
"""

import itertools
import math
import re
from fractions import Fraction
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import linprog

from moegeom.core.router import Rule, Weights
from moegeom.geometry import capacity, gram
from moegeom.geometry import region_counts as regions
from moegeom.geometry.boundary import linear
from moegeom.geometry.capacity import zaslavsky
from moegeom.geometry.paths import face_quantile, log_crossing_probability
from moegeom.geometry.region_counts import regions_in_polygon
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_FLOAT32, gamma
from moegeom.geometry.selection import margin, selection_scores, top_k
from moegeom.geometry.space import blocked_moments, participation_ratio_corrected
from tests.oracle.test_against_theory_fixtures import FIXTURES, flat

SQUARE = [(Fraction(x), Fraction(y)) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]


def by_linear_programs(lines: np.ndarray) -> int:
    """Sign patterns that some open set of the square has: one linear program each."""
    number = 0
    for signs in itertools.product((-1.0, 1.0), repeat=len(lines)):
        s = np.array(signs)[:, None]
        rows = np.column_stack([-s * lines[:, :2], np.linalg.norm(lines[:, :2], axis=1)])
        done = linprog([0, 0, -1], A_ub=rows, b_ub=(s * lines[:, 2:]).ravel(),
                       bounds=[(-1, 1), (-1, 1), (0, 1)])  # fmt: skip
        number += done.status == 0 and -done.fun > 1e-9
    return number


@pytest.mark.parametrize("seed", range(3))
def test_regions_are_the_sign_patterns_of_linear_programs_and_of_a_fine_grid(seed: int) -> None:
    lines = np.random.default_rng(seed).normal(size=(6, 3)) * [1.0, 1.0, 0.4]
    assert regions.regions_in_polygon(SQUARE, lines) == by_linear_programs(lines)
    lines = np.random.default_rng(seed).normal(size=(9, 3)) * [1.0, 1.0, 0.5]
    axis = np.linspace(-1.0, 1.0, 801)[1:-1]
    x, y = np.meshgrid(axis, axis)
    signs = np.column_stack([x.ravel(), y.ravel(), np.ones(x.size)]) @ lines.T > 0.0
    seen = len(np.unique(signs @ 2 ** np.arange(9)))
    assert seen <= regions.regions_in_polygon(SQUARE, lines) <= seen + 3


def test_general_positions_have_the_most_regions_and_parts_add_up_by_euler():
    draw = np.random.default_rng(0)
    lines = np.column_stack([draw.normal(size=(30, 2)), 1e-3 * draw.normal(size=30)])
    large = [(1000 * x, 1000 * y) for x, y in SQUARE]
    assert regions.regions_in_polygon(large, lines) == zaslavsky(30, 2)
    grid = [[1, 0, c] for c in (-0.5, 0, 0.5)] + [[0, 1, c] for c in (-0.5, 0.5)]
    angles = [[1, 0, 0], [0, 1, 0], [1, 1, 0], [1, -1, 0], [1, 3, 0]]
    for lines, expected in (
        (grid, 12),
        ([*grid, [-2, 0, 1], [0, 0, 1]], 12),
        (angles, 10),
        # through (0.3, 0.1), which float64 does not hold: three bits decide
        ([[1, 0, -0.3], [0, 1, -0.1], [1, 1, -0.4]], 7),
        ([[1, 0, -0.25], [0, 1, -0.5], [1, 1, -0.75]], 6),
        ([[1.0, 1.0, 2.0], [1.0, 0.0, 3.0]], 1),
    ):
        assert regions.regions_in_polygon(SQUARE, np.array(lines, float)) == expected
    # cut along one line, the regions that it crosses count twice
    lines = np.random.default_rng(3).normal(size=(12, 3)) * [1.0, 1.0, 0.4]
    cut = np.array([[0.3, 1.0, 0.1]])
    a, b, c = map(Fraction, cut[0].tolist())
    sides = [regions.clipped(SQUARE, [(s * a, s * b, s * c)]) for s in (1, -1)]
    both = sum(regions.regions_in_polygon(side, lines) for side in sides)
    assert both == regions.regions_in_polygon(SQUARE, np.concatenate([lines, cut]))
    assert regions.clipped(SQUARE, [(Fraction(1), Fraction(0), Fraction(-1))]) == []


def by_euler(corners, lines) -> int:
    """1, and the lines that meet the interior, and the points they share: all in rational numbers."""
    rows = {tuple(v / (row[0] or row[1]) for v in row) for row in lines if row[0] or row[1]}

    def values(point):
        return [a * point[0] + b * point[1] + c for a, b, c in rows]

    at = list(zip(*map(values, corners), strict=True))
    cuts = [row for row, own in zip(rows, at, strict=True) if min(own) < 0 < max(own)]
    meeting = {}
    for (a, b, c), (d, e, f) in itertools.combinations(cuts, 2):
        if det := a * e - b * d:
            x, y = (b * f - c * e) / det, (c * d - a * f) / det
            if max(abs(x), abs(y)) < 1:
                meeting.setdefault((x, y), set()).update({(a, b, c), (d, e, f)})
    return 1 + len(cuts) + sum(len(own) - 1 for own in meeting.values())


@pytest.mark.parametrize("most", [2, 4, 30])
def test_lines_that_coincide_meet_in_threes_and_pass_through_corners_are_counted_exactly(most):
    draw = np.random.default_rng(most)
    for number in (4, 12, 40):
        # thirds and sevenths of small numbers, which float64 rounds, and the numbers themselves
        for unit in (1.0, 1.0 / 3.0, 1.0 / 7.0):
            lines = draw.integers(-most, most + 1, (number, 3)) * unit
            exact = [tuple(map(Fraction, row)) for row in lines.tolist()]
            assert regions.regions_in_polygon(SQUARE, lines) == by_euler(SQUARE, exact)


def test_roots_on_segments_are_where_signs_change_in_pieces_of_the_expert():
    draw = np.random.default_rng(1)
    start, stop = draw.normal(size=(2, 5, 7))
    first = np.array([0, 2, 2, 3, 5, 5])
    at = np.array([0.2, 0.6, 0.5, 0.1, 0.9])
    chosen = draw.random(len(at) + 5) < 0.5
    roots = regions.segment_roots(start, stop, first, at, chosen)
    t = np.linspace(0.0, 1.0, 200_001)
    for s in range(5):
        values = start[s] + t[:, None] * (stop - start)[s]
        changed, _ = np.nonzero(np.diff(values > 0.0, axis=0))
        own = roots.segment == s
        assert_allclose(np.sort(roots.at[own]), np.sort(t[changed]), atol=1e-5)
        pieces = chosen[first[s] + s : first[s + 1] + s + 1]
        inside = pieces[np.searchsorted(at[first[s] : first[s + 1]], roots.at[own])]
        assert_array_equal(roots.is_active[own], inside)
    start, stop = np.array([[1.0, 1.0, 0.0, 2.0]]), np.array([[-1.0, -1.0, -1.0, 1.0]])
    roots = regions.segment_roots(start, stop, np.array([0, 0]), np.empty(0), np.array([True]))
    assert roots.at.tolist() == [0.5, 0.5]
    assert regions.distinct_places(roots.segment, roots.at, 1).tolist() == [1]


PAGE = (Path(__file__).resolve().parents[3] / "docs/theory.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\w+) [^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def nearest(logits, rows, k):
    chosen = top_k(logits, k)
    return linear.boundary_distance(logits, chosen, linear.row_distances(rows, np.zeros(len(rows))))


def angle():
    logits, length = np.array([[3.0, 1.0]]), np.array([sqrt(10.0)])
    cones = linear.cones_of(np.eye(2), np.zeros(2))
    return linear.boundary_angle(logits, top_k(logits, 1), cones, length)


def curved_margin():
    rule, bias = Rule(1, "sigmoid", Weights("scores"), True), np.array([0.1, 0.0])
    return margin(selection_scores(np.array([[1.0, 0.0]]), rule, bias), 1)


def square_cut_by_lines():
    grid = [(1, 0, 0.5), (1, 0, 0), (1, 0, -0.5), (0, 1, 0.5), (0, 1, -0.5)]
    star = [(1, 0, 0), (0, 1, 0), (1, 1, 0), (1, -1, 0), (1, 3, 0)]
    return [regions_in_polygon(SQUARE, np.array(lines, float)) for lines in (grid, star)]


#: Section -> numbers as the page prints them, and the fixtures that hold them, to which
#: test_against_theory_fixtures.py holds the code.
OF_FIXTURES = {
    "A1": ("0.731059 0.268941", "gate_hard"),
    "A2": (
        "0.1 0.15 1 1 2",
        "window_spread_1 window_spread_2 window_spread_3 order_eps_0.12 order_eps_0.16",
    ),
    "A3": ("1.06066", "dist_gamma1_worked"),
    "A5": ("0.075", "logit_dist_inf_2"),
    "A12": ("2 one", "active_tie_order"),
    "A13": ("1.193888", "jump"),
    "B1": ("5.5", "tropical_e3"),
    "B2": ("20 90 120 60 12 1", "hypersimplex_f"),
    "B3": ("211 1351 11224.6187", "zaslavsky log_zaslavsky"),
    "B4": ("107 653", "cells_ub"),
    "B5": ("211 3376 384020", "example_4_21"),
    "B8": ("5.574788 -0.103503 76", "granularity_log10 granularity_doc_log10 G_max"),
    "C2": ("-0.35532 1.21729 1.21188", "hmoe_MHA hmoe_I hmoe_II"),
    "C3": ("0.131 0.31", "voronoi_worked"),
    "C4": ("0.009", "split_L2"),
    "D1": ("0.42265 0.6667", "gram_score gram_welch"),
    "D3": ("0.612372 1 0.3125 0.875 3.3636 80", "load_metrics capacity"),
    "E1": ("1.007672 0.936375", "sigmoid_pair_a sigmoid_lipschitz"),
}

#: The others, and what the code gives.
WORKED = {
    "A9": (
        "0.317311 2.19811 0.68135",
        lambda: [
            np.exp(log_crossing_probability(np.ones(1), 1.0)[0]),
            face_quantile(np.ones(1), 0.5)[0],
            np.exp(log_crossing_probability(np.ones(1) / 1.3, 1.1, np.array([-0.8 / 1.3]))[0]),
        ],
    ),
    "B3": ("13088.2744", lambda: [7168 * math.log(16384) - math.lgamma(7169)]),
    "B6": (
        "108 132 12373 384020 129704653 14563641820",
        lambda: [
            count
            for sizes in ((4, 2, 3, 2), (16, 4, 5, 2), (16, 4, 1000, 2))
            for count in (capacity.most_regions(*sizes), capacity.published_regions(*sizes).top_k)
        ],
    ),
    "B8": (
        "31.119228 25.775597",
        lambda: [capacity.split_sets_log10(64, 8, 4), capacity.published_split_log10(64, 8, 4, 10)],
    ),
    "B12": ("39.15", lambda: [participation_ratio_corrected(32.58, 200)]),
    "B13": ("12 10", square_cut_by_lines),
    "D1": (
        "0.9116 0.0117",
        lambda: [gram.random_gram_score(8, 128, False), gram.random_gram_score_sd(8, 128)],
    ),
    "E1": ("0.331059", curved_margin),
    "E3": ("0.463648", angle),
    "E4": ("0.0002442", lambda: [gamma(4096, UNIT_FLOAT32)]),
}


def worked(section: str) -> list[str]:
    """Every number behind the words "Worked:" of a section, as it is printed."""
    text = " ".join(re.findall(r"Worked: ([^\n]*)", SECTIONS[section]))
    return re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?|\bone\b", text)


def test_no_worked_number_is_left_unchecked():
    sections = {name for name, text in SECTIONS.items() if "Worked:" in text}
    assert sections == {*OF_FIXTURES, *WORKED}


def is_printed(text: str, value: float) -> bool:
    return round(float(value), len(text.partition(".")[2])) == float({"one": "1"}.get(text, text))


@pytest.mark.parametrize("table", [OF_FIXTURES, WORKED], ids=["fixtures", "code"])
def test_the_page_prints_what_the_fixtures_and_the_code_give(table):
    for section, (printed, source) in table.items():
        on_page, texts = iter(worked(section)), printed.split()
        assert all(text in on_page for text in texts), section  # in this order
        if table is WORKED:
            values = list(source())
        else:  # some of them are not on the page
            numbers = (x for name in source.split() for x in flat(FIXTURES[name]["expected"]))
            values = [next((x for x in numbers if is_printed(t, x)), np.nan) for t in texts]
        offenders = [(t, v) for t, v in zip(texts, values, strict=True) if not is_printed(t, v)]
        assert offenders == [], section


def test_the_participation_ratio_is_corrected_by_as_much_as_section_b12_says():
    ratios = []
    for seed in range(60):
        rows = np.random.default_rng(seed).standard_normal((200, 40))
        moments = blocked_moments(rows, np.zeros(200, np.int32), 1)
        ratios.append(moments.of_blocks(np.ones(1, bool)).participation_ratio)
    corrected = [participation_ratio_corrected(ratio, 200) for ratio in ratios]
    assert "33.1 on average and of 40.0 corrected" in SECTIONS["B12"]
    assert_allclose([np.mean(ratios), np.mean(corrected)], [33.1, 40.0], rtol=0.01)


def test_errors_of_sums_and_of_a_rounded_step_are_those_of_section_e4():
    """In float32, one after the other 0.3 u sqrt(D) |w * y|, in pairs a tenth of that."""
    draws, width = 400, 4096
    generator = np.random.default_rng(5)
    products = generator.standard_normal((draws, width)).astype(np.float32)
    products *= generator.standard_normal((draws, width)).astype(np.float32)
    exact = products.astype(np.float64).sum(axis=1)
    unit = UNIT_FLOAT32 * sqrt(width) * np.linalg.norm(products.astype(np.float64), axis=1)
    sequential = np.cumsum(products, axis=1, dtype=np.float32)[:, -1]
    pairs = products
    while pairs.shape[1] > 1:
        pairs = pairs[:, 0::2] + pairs[:, 1::2]
    size = [np.sqrt(np.mean(((s - exact) / unit) ** 2)) for s in (sequential, pairs[:, 0])]
    assert_allclose(size[0], 0.3, rtol=0.15)
    assert 0.02 < size[1] < 0.06
    assert f"{ROUNDING_RMS:.5f} u" in SECTIONS["E4"]


def test_the_nearest_boundary_is_often_not_that_of_ranks_k_and_the_next():
    """F-07, by counting."""
    generator = np.random.default_rng(0)
    for experts, hidden, k in ((16, 64, 4), (128, 128, 8)):
        rows = generator.standard_normal((experts, hidden))
        rows *= 1.0 + 0.3 * generator.standard_normal((experts, 1))
        logits = generator.standard_normal((4000, hidden)) @ rows.T
        last = top_k(logits, k + 1)[:, k - 1 :]
        share = (nearest(logits, rows, k).pair != last).any(axis=1).mean()
        assert 0.11 < share < 0.17


def test_random_rows_are_nearly_as_orthogonal_as_the_paper_calls_high():
    """F-27: 0.94 against what eight random rows of 128 numbers score, and by mean |cos|."""
    figures = []
    for seed in range(1000):
        rows = np.random.default_rng(seed).standard_normal((8, 128))
        cosine = gram.cosines(rows @ rows.T)
        figures.append((gram.gram_score(cosine), gram.mean_absolute_cosine(cosine)))
    score, mean = np.array(figures).T
    assert f"{score.mean():.2f} +- {score.std():.2f} by D1, and {1 - mean.mean():.2f}" in PAGE
