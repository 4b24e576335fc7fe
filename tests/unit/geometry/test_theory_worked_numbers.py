"""Every number that docs/theory.md works out: written there, and given by the code it describes."""

from __future__ import annotations

import re
from math import comb, exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from moegeom.core.router import Rule, Weights
from moegeom.geometry import border_shares, gram, occupation
from moegeom.geometry.border_shares import CONVENTIONS, TieSums, log_order_ratio
from moegeom.geometry.boundary import linear, orders
from moegeom.geometry.boundary.curved import BENDS, curved_rows
from moegeom.geometry.boundary.order_distance import order_distance
from moegeom.geometry.capacity import granularity, region_bounds
from moegeom.geometry.capacity.cell_bounds import most_cells, zaslavsky
from moegeom.geometry.capacity.costs import published_macs, router_macs
from moegeom.geometry.capacity.hypersimplex import face_counts
from moegeom.geometry.capacity.tropical import elementary_symmetric
from moegeom.geometry.hmoe.losses import loss_1, loss_2
from moegeom.geometry.hmoe.mixture import Mixture, published_truth, split
from moegeom.geometry.hmoe.regression import regression
from moegeom.geometry.jump import jump
from moegeom.geometry.load import expert_capacity, gini, load_cv, load_entropy_nats, max_vio
from moegeom.geometry.paths import face_quantile, log_crossing_probability
from moegeom.geometry.region_counts import regions_in_polygon
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_FLOAT32, gamma
from moegeom.geometry.selection import margin, route, selection_scores, top_k
from moegeom.geometry.space import participation_ratio, participation_ratio_corrected
from moegeom.kernels.cpu.curved_distance import curved_distance
from tests.oracle import measures
from tests.unit.geometry.test_region_counts import SQUARE

PAGE = (Path(__file__).resolve().parents[3] / "docs/theory.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\w+) [^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))

TRIPLE = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
PLACE = np.array([[2.0, 0.5]])
SCORES = np.array([[3.0, 2.0, 1.9, 1.85, 1.0, 0.2]])


def jump_at_a_tie():
    z, outputs = np.array([[1.0, 0.5, 0.5]]), np.array([[0.0, 0.0], [1.0, 2.0], [0.0, -1.0]])
    moved = measures.tied_weight(z, np.array([[0, 1]]), np.array([[1, 2]]))
    sides = [(np.array([[e]]), moved[:, None]) for e in (1, 2)]
    return jump(np.zeros((1, 2)), *sides, lambda y, e, g: (g * (e >= 0)) * outputs[e[:, 0]])[0]


NEAR = np.array([[1.02, 1.01, 1.0, 0.0]])
COUNTS = np.array([8, 4, 2, 2])


def nearest(logits, rows, k):
    chosen = top_k(logits, k)
    return linear.boundary_distance(logits, chosen, linear.row_distances(rows, np.zeros(len(rows))))


def curved():
    rule, bias = Rule(1, "sigmoid", Weights("scores"), True), np.array([0.1, 0.0])
    logits = np.array([[1.0, 0.0]])
    gap = margin(selection_scores(logits, rule, bias), 1)[0]
    _, upper, _ = curved_distance(logits, np.int32([[0]]), curved_rows(np.eye(2), rule, None, bias))
    return [gap, upper[0], gap / (BENDS["sigmoid"].steepest * sqrt(2.0))]


def angle():
    logits, length = np.array([[3.0, 1.0]]), np.array([sqrt(10.0)])
    cones = linear.cones_of(np.eye(2), np.zeros(2))
    return linear.boundary_angle(logits, top_k(logits, 1), cones, length)


def score_of(rows):
    return gram.gram_score(gram.cosines(rows @ rows.T))


def loads():
    entropy = float(load_entropy_nats(COUNTS))
    return [load_cv(COUNTS), max_vio(COUNTS), gini(COUNTS), entropy / log(4), exp(entropy)]


def published_regressions():
    x = np.array([[0.3, -0.7]])
    return [regression(published_truth(), x, p)[0] for p in ("none", "value", "sdpa")]


POINTS = np.random.default_rng(0).uniform(-1.0, 1.0, (200, 2))


def losses_of_two_channels():
    scores = np.array([[np.diag([1.0, 0.0]), np.zeros((2, 2))]])
    true = Mixture(np.array([[1.0]]), scores, np.eye(2)[None, :, None])
    experts = np.array([[[[1.1, 0.0], [0.9, 0.0]], [[0.0, 1.0], [0.0, 1.2]]]])
    fitted = Mixture(np.array([[0.6, 0.5]]), scores, experts)
    return [loss_2(fitted, true, POINTS, "value"), loss_1(fitted, true, POINTS, 1.0, "value")]


def split_loss():
    apart = split(published_truth(), np.array([0.05, 0.0]))
    return [loss_2(apart, published_truth(), POINTS, "value")]


def square_cut_by_lines():

    grid = [(1, 0, 0.5), (1, 0, 0), (1, 0, -0.5), (0, 1, 0.5), (0, 1, -0.5)]
    star = [(1, 0, 0), (0, 1, 0), (1, 1, 0), (1, -1, 0), (1, 3, 0)]
    return [regions_in_polygon(SQUARE, np.array(lines, float)) for lines in (grid, star)]


def orders_of_orthonormal_rows():
    sums = []
    for order in (1, 2):
        borders = comb(8, order + 1) * measures.orthonormal_border_share(8, 3, order)
        factor = border_shares.tie_factor(np.eye(8), np.arange(order + 1))
        sums += [TieSums(order, comb(8, order + 1), borders, 0.0, borders * factor, 0.0)]
    return [log_order_ratio(sums[1], sums[0], 64, 0.01, name) for name in CONVENTIONS]


#: Section -> the numbers as the page prints them, and what the code gives.
WORKED = {
    "A1": (
        "0.731059 0.268941",
        lambda: route(
            np.array([[2.0, 1.0, 0.0]]), Rule(2, "softmax", Weights("scores", renormalise=True))
        ).weights[0],
    ),
    "A2": (
        "0.1 0.15 1 1 2",
        lambda: [
            *(orders.tie_spread(SCORES, 2, n)[0] for n in (1, 2, 3)),
            *(orders.order_eps(SCORES, 2, eps)[0] for eps in (0.12, 0.16)),
        ],
    ),
    "A3": ("1.06066", lambda: nearest(PLACE @ TRIPLE.T, TRIPLE, 1).distance),
    "A4": ("2.06155", lambda: [order_distance(TRIPLE @ PLACE[0], TRIPLE, 1, 2).lower]),
    "A5": ("0.075", lambda: [orders.free_logit_distance(SCORES, 2, 2)[0]]),
    "A7": (
        "0.112 0.174717 0.064354 -1035.861 -1.448322 -1.409490 -1.004025 -1.697172",
        lambda: [
            exp(measures.log_slab_share(3, -0.5, 0.1, 1.0)),
            measures.tube_share(6, 2, 0.4, 0.3, 1.0),
            measures.tube_share(6, 3, 0.4, 0.3, 1.0),
            measures.log_slab_share(7168, 0.51, 0.01, 1.0),
            *orders_of_orthonormal_rows(),
        ],
    ),
    "A9": (
        "0.317311 2.19811 0.68135",
        lambda: [
            exp(log_crossing_probability(np.ones(1), 1.0)[0]),
            face_quantile(np.ones(1), 0.5)[0],
            exp(log_crossing_probability(np.ones(1) / 1.3, 1.1, np.array([-0.8 / 1.3]))[0]),
        ],
    ),
    "A10": (
        "1.0427155 0.9573083 0.9623447 0.0334875 0.0401725 0.0473859",
        lambda: [
            *(occupation.occupation_integral(n, np.array([0.7]), 2.5)[0] for n in (1, 2, 3)),
            occupation.slab_occupation(np.ones(1), np.array([0.1]), 1.0)[0],
            occupation.occupation_bound(1, np.array([0.9]), np.ones(1), 0.1, 1.0)[0],
            measures.tube_occupation(2, 1.0, 0.3, 2.0),
        ],
    ),
    "A12": (
        "2 one",
        lambda: [orders.order_eps(NEAR, 2, 0.05)[0], orders.extra_experts(NEAR, 2, 0.05)[0]],
    ),
    "A13": ("1.193888", lambda: [jump_at_a_tie()]),
    "B2": ("20 90 120 60 12 1", lambda: face_counts(3, 6)),
    "B1": ("5.5", lambda: [elementary_symmetric(np.array([[1.0, -2.0, 4.0, 0.5]]), 3)[0]]),
    "B3": (
        "211 1351 11224.6187 13088.2744",
        lambda: [
            zaslavsky(20, 2),
            zaslavsky(20, 3),
            log(zaslavsky(16384, 7168)),
            region_bounds.log_leading_zaslavsky(16384, 7168),
        ],
    ),
    "B4": ("107 653", lambda: [most_cells(16, 4, 1, False), most_cells(16, 4, 2, False)]),
    "B5": (
        "211 3376 384020",
        lambda: [
            region_bounds.published_regions(16, 4, 5, 2).dense,
            region_bounds.published_regions(16, 1, 20, 2).top_1,
            region_bounds.published_regions(16, 4, 5, 2).top_k,
        ],
    ),
    "B6": (
        "108 132 12373 384020 129704653 14563641820",
        lambda: [
            count
            for sizes in ((4, 2, 3, 2), (16, 4, 5, 2), (16, 4, 1000, 2))
            for count in (
                region_bounds.most_regions(*sizes),
                region_bounds.published_regions(*sizes).top_k,
            )
        ],
    ),
    "B8": (
        "5.574788 -0.103503 31.119228 25.775597 76",
        lambda: [
            granularity.split_sets_log10(8, 2, 4),
            granularity.published_split_log10(8, 2, 4, 10),
            granularity.split_sets_log10(64, 8, 4),
            granularity.published_split_log10(64, 8, 4, 10),
            granularity.largest_split(1536, 20),
        ],
    ),
    "B10": (
        "0.0128607 -2159.7463",
        lambda: [10 ** gram.cap_area_log10(0.5, 5), gram.cap_area_log10(0.5, 7168)],
    ),
    "B12": ("39.15", lambda: [participation_ratio_corrected(32.58, 200)]),
    "B13": ("12 10", square_cut_by_lines),
    "C2": ("-0.35532 1.21729 1.21188", published_regressions),
    "C3": ("0.131 0.31", losses_of_two_channels),
    "C4": ("0.009", split_loss),
    "D1": (
        "0.42265 0.6667 0.9116 0.0117",
        lambda: [
            score_of(np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])),
            gram.best_gram_score(4, 3, False),
            gram.random_gram_score(8, 128, False),
            gram.random_gram_score_sd(8, 128),
        ],
    ),
    "D3": (
        "0.612372 1 0.3125 0.875 3.3636 80",
        lambda: [*loads(), expert_capacity(2048, 64, 2, 1.25)],
    ),
    "D4": (
        "15728640 4194304 4194304 524288",
        lambda: [
            router_macs(8, 4096, 128).gru,
            published_macs(8, 2, 4096, 128).gru,
            router_macs(8, 4096, 128).projector,
            published_macs(8, 2, 4096, 128).projector,
        ],
    ),
    "E1": ("0.331059 1.007672 0.936375", curved),
    "E3": ("0.463648", angle),
    "E4": ("0.0002442", lambda: [gamma(4096, UNIT_FLOAT32)]),
}


def worked(section: str) -> list[str]:
    """Every number behind the words "Worked:" of a section, as it is printed."""
    text = " ".join(re.findall(r"Worked: ([^\n]*)", SECTIONS[section]))
    return re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?|\bone\b", text)


def test_no_worked_number_is_left_unchecked():
    sections = {name for name, text in SECTIONS.items() if "Worked:" in text}
    assert sections == WORKED.keys()


@pytest.mark.parametrize("section", WORKED)
def test_the_code_gives_what_the_page_works_out(section):
    printed, compute = WORKED[section]
    on_page = iter(worked(section))
    for text, value in zip(printed.split(), compute(), strict=True):
        assert text in on_page, f"{section}: the page does not print {text} here"
        digits = len(text.partition(".")[2])
        assert round(float(value), digits) == float({"one": "1"}.get(text, text)), (section, text)


def test_the_participation_ratio_is_corrected_by_as_much_as_section_b12_says():
    ratios = []
    for seed in range(60):
        rows = np.random.default_rng(seed).standard_normal((200, 40))
        rows -= rows.mean(axis=0)
        ratios.append(participation_ratio(rows @ rows.T))
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
