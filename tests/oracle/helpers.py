"""What several oracles share: drawn routers, choices and exact logits of points, programs of SciPy."""

import hashlib
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
from scipy.integrate import quad
from scipy.optimize import linprog, minimize, nnls
from scipy.special import betainc, expit
from scipy.stats import binom, ncx2, norm

from moegeom.geometry.border_shares import log_half_binomial

#: More cells, facets or vertices than any router of these tests has.
PLENTY = 10**6

#: Scores of logits one by one, and their slopes.
FUNCTIONS = {
    "identity": lambda z: z,
    "sigmoid": expit,
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(0.0, z)),
}
SLOPES = {
    "identity": np.ones_like,
    "sigmoid": lambda z: expit(z) * expit(-z),
    "sqrt_softplus": lambda z: expit(z) / (2.0 * FUNCTIONS["sqrt_softplus"](z)),
}


def router(experts: int, dims: int, seed: int | list[int] = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows and biases, all standard normal."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((experts, dims)), generator.standard_normal(experts)


def choices(points: np.ndarray, weight: np.ndarray, bias, k: int) -> np.ndarray:
    """The chosen experts of each point by number; of equal logits the lower number is first."""
    logits = points @ weight.T + (0.0 if bias is None else bias)
    return np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)


def rows_of(array: np.ndarray) -> list[tuple[int, ...]]:
    """Expert sets as tuples."""
    return [tuple(row) for row in array.tolist()]


def named(cells) -> tuple[set[tuple[int, ...]], set[tuple[tuple[int, ...], ...]]]:
    """Cells by their experts, and facets by the experts of both cells."""
    rows = rows_of(cells.expert_set)
    return set(rows), {(rows[one], rows[other]) for one, other in cells.facets.tolist()}


def in_fractions(array: np.ndarray) -> list:
    """Floats of any nesting as fractions."""
    return [Fraction(a) if np.isscalar(a) else in_fractions(np.asarray(a)) for a in array.tolist()]


def exact_logits(weight: np.ndarray, bias: np.ndarray, point) -> list[Fraction]:
    """Logits at a point of fractions."""
    return [
        sum((w * x for w, x in zip(row, point, strict=True)), offset)
        for row, offset in zip(in_fractions(weight), in_fractions(bias), strict=True)
    ]


def ahead(weight: np.ndarray, bias: np.ndarray, inside, outside) -> tuple[np.ndarray, np.ndarray]:
    """Normals and levels of ``normals @ x + levels``, by which each of one set leads each of another."""
    pairs = [(i, j) for i in inside for j in outside]
    normals = np.array([weight[i] - weight[j] for i, j in pairs]).reshape(-1, weight.shape[1])
    return normals, np.array([bias[i] - bias[j] for i, j in pairs])


def largest_margin(normals, levels, tie=None, bounds=None) -> float:
    """By HiGHS the largest t up to 1 with ``normals @ x + levels >= t``; -inf where there is none.

    ``tie``: a row and a level of which ``row @ x + level`` is 0. ``bounds``: of each coordinate.
    """
    dims = normals.shape[1]
    solved = linprog(
        np.append(np.zeros(dims), -1.0),
        np.column_stack([-normals, np.ones(len(normals))]),
        levels,
        None if tie is None else np.append(tie[0], 0.0)[None],
        None if tie is None else [-tie[1]],
        bounds=[*(bounds or [(None, None)] * dims), (None, 1.0)],
    )
    return -solved.fun if solved.status == 0 else -np.inf


def shortest_move(normals: np.ndarray, levels: np.ndarray) -> float:
    """min |x| with ``normals @ x + levels >= 0``, by Lawson and Hanson; inf where there is none."""
    size = np.linalg.norm(normals, axis=1)
    is_row = size > 1e-12
    if (levels[~is_row] < -1e-12).any():
        return np.inf
    if not is_row.any():
        return 0.0
    stacked = np.vstack([normals[is_row].T, -levels[is_row]]) / size[is_row]
    target = np.append(np.zeros(len(stacked) - 1), 1.0)
    dual, residual = nnls(stacked, target, maxiter=1000)
    rest = stacked @ dual - target
    return np.inf if residual < 1e-9 else float(np.linalg.norm(rest[:-1] / rest[-1]))


def points_of_boundary(y: np.ndarray, gap, starts, gradient=None):
    """Points where ``gap`` is 0 and |x - y| least, by SLSQP from each start that converges."""
    constraint = {"type": "eq", "fun": gap} | ({} if gradient is None else {"jac": gradient})
    for start in starts:
        solved = minimize(
            lambda x: ((x - y) ** 2).sum(),
            start,
            jac=lambda x: 2.0 * (x - y),
            constraints=constraint,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 300},
        )
        if abs(gap(solved.x)) < 1e-8:
            yield solved.x


def distance_to_boundary(y: np.ndarray, gap) -> float:
    """The least of a few starts; inf where none converges."""
    starts = [y + 0.2 * n * np.random.default_rng(n).standard_normal(len(y)) for n in range(4)]
    points = points_of_boundary(y, gap, starts)
    return min((float(np.linalg.norm(point - y)) for point in points), default=np.inf)


# ------------------------------------------------------------------------------ certified instances
TRUTH = Path(__file__).resolve().parents[1] / "data/cells_truth.json"
INSTANCES: list[dict[str, Any]] = json.loads(TRUTH.read_text("utf-8"))["instances"]

#: Instances of which all cells are known, and those that the exact reference walks within seconds.
WHOLE = [i for i in INSTANCES if i["ball_radius"] is None and i["n_cells"] <= 500]
SMALL = [i for i in WHOLE if i["E"] <= 16]


def arrays(instance: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """W and b by the convention of the file; b is None for a central router."""
    generator = np.random.default_rng(instance["seed"])
    experts = instance["E"]
    weight = generator.standard_normal((experts, instance["d"]))
    bias = generator.standard_normal(experts) if instance["affine"] else np.zeros(experts)
    for change in instance["mods"]:
        weight, bias = changed(weight, bias, *change)
    return weight, bias if instance["affine"] or bias.any() else None


def changed(weight: np.ndarray, bias: np.ndarray, name: str, *rest) -> tuple[Any, Any]:
    """Rows and biases after one of the changes that the file names."""
    match name, rest:
        case "dup", (i, j):
            weight[j], bias[j] = weight[i], bias[i]
        case "duprow", (i, j):
            weight[j] = weight[i]
        case "zero", (i,):
            weight[i] = 0
        case (("collinear" | "collinear_b"), ((first, second, *others),)):
            for array in (weight, bias)[: 1 + (name == "collinear_b")]:
                for m, row in enumerate(others, 2):
                    array[row] = array[first] + m * (array[second] - array[first])
        case "int", (q,):
            weight, bias = np.rint(q * weight), np.rint(q * bias)
        case "voronoi", ():
            bias = -0.5 * (weight * weight).sum(1)
        case "neardup", (i, j, e):
            weight[j], bias[j] = weight[i] * (1.0 + e), bias[i] * (1.0 - e)
        case "grid", (n,):
            axes = np.indices((n,) * weight.shape[1]).reshape(weight.shape[1], -1)
            weight = axes.T.astype(np.float64)
            bias = -(weight * weight).sum(1) / 2
        case _:
            raise ValueError(name)
    return weight, bias


def digest(cells: list[tuple[int, ...]]) -> str:
    """SHA-1 over the sorted cells, as the file has it."""
    return hashlib.sha1(";".join(",".join(map(str, cell)) for cell in cells).encode()).hexdigest()


# ------------------------------------------------------------------- measures that no command needs
def orthonormal_border_share(num_experts: int, k: int, order: int) -> float:
    """Border share of a tie of n + 1 experts, for orthonormal rows: of the m = E - n - 1 others at
    least k - n and at most k - 1 are above the tied ones (A7).
    """
    others, scale = num_experts - order - 1, 1.0 / math.sqrt(order + 1.0)

    def density(c: float) -> float:
        inside = np.diff(binom.cdf([k - order - 1, k - 1], others, norm.sf(c)))[0]
        return float(norm.pdf(c, scale=scale) * inside)

    return quad(density, -12.0 * scale, 12.0 * scale, epsabs=1e-13, epsrel=1e-12)[0]


def tie_spread(scores: np.ndarray, k: int, order: int) -> np.ndarray:
    """Of each token the least spread of ``order`` + 1 scores in a row on both sides of the border
    (A2); inf where there are none.
    """
    ordered = -np.sort(-np.asarray(scores, dtype=np.float64), axis=1)
    experts = ordered.shape[1]
    starts = [a for a in range(experts - order) if a <= k - 1 and a + order >= k]
    spreads = [ordered[:, a] - ordered[:, a + order] for a in starts]
    return np.min([np.full(len(ordered), np.inf), *spreads], axis=0)


def order_eps(scores: np.ndarray, k: int, eps: float) -> np.ndarray:
    """Of each token the largest n of which n + 1 scores in a row, on both sides of the border,
    differ by ``eps`` or less (A2); 0 where there are none.
    """
    found = []
    for row in -np.sort(-np.asarray(scores, dtype=np.float64), axis=1):
        spreads = [
            (last - first, row[first] - row[last])
            for first in range(k)
            for last in range(k, len(row))
        ]
        found.append(max((n for n, spread in spreads if spread <= eps), default=0))
    return np.array(found)


def extra_experts(scores: np.ndarray, k: int, eps: float) -> np.ndarray:
    """Of each token the experts less than ``eps`` below its k-th score, beyond the k (A12)."""
    ordered = np.sort(np.asarray(scores, dtype=np.float64), axis=1)[:, ::-1]
    return (ordered[:, k - 1 : k] - ordered[:, k:] < eps).sum(axis=1)


def flat_distance(logits: np.ndarray, rows: np.ndarray, tied: tuple[int, ...]) -> float:
    """Distance to the inputs where all of ``tied`` have one logit, others anywhere (A4): the
    shortest step; inf where dependent rows forbid the tie.
    """
    away = rows[list(tied[1:])] - rows[tied[0]]
    gaps = logits[list(tied[1:])] - logits[tied[0]]
    step = np.linalg.lstsq(away, -gaps)[0]
    is_met = np.allclose(away @ step, -gaps, rtol=0.0, atol=1e-9 * max(1.0, np.abs(gaps).max()))
    return float(np.linalg.norm(step)) if is_met else math.inf


def moment_router(experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (t, ..., t^(2k - 1)) and biases -t^(2k), of which every k-set is a cell (B4); for more
    than E / 2 those of E - k, negated.
    """
    least = min(k, experts - k)
    powers = np.linspace(-1.0, 1.0, experts)[:, None] ** np.arange(1, 2 * least + 1)
    sign = 1.0 if k == least else -1.0
    return sign * powers[:, :-1], -sign * powers[:, -1]


def log_slab_share(dimension: int, distance: float, width: float, radius: float) -> float:
    """Logarithm of the share of a ball within ``width`` of a hyperplane at a signed ``distance`` of
    its centre: the integral of the sections (A7).
    """
    low, high = max(-1.0, (distance - width) / radius), min(1.0, (distance + width) / radius)
    if low >= high:
        return -math.inf
    with mpmath.workdps(60):
        power = (mpmath.mpf(dimension) - 1) / 2
        # most of it may lie at the end that is nearer to the middle
        near, far = (low, high) if abs(low) < abs(high) else (high, low)
        cuts = sorted(near + (far - near) * (mpmath.mpf(step) / 64) ** 5 for step in range(65))
        share = mpmath.quad(lambda s: (1 - s * s) ** power, cuts)
        return float(mpmath.log(share / mpmath.beta(mpmath.mpf(1) / 2, power + 1)))


def tube_share(dimension: int, order: int, distance: float, width: float, radius: float) -> float:
    """Share of a ball within ``width`` of a flat of codimension n > 1 at a ``distance``: over the
    spheres around the centre of the flat's complement, the cap of each that is near (A7).
    """
    low, high = max(0.0, distance - width), min(radius, distance + width)
    if low >= high:
        return 0.0
    scale = math.log(order) + log_half_binomial(dimension, order) - order * math.log(radius)

    def density(rho: float) -> float:
        cosine = -1.0 if distance == 0.0 else rho * rho + distance**2 - width**2
        cosine = min(1.0, max(-1.0, cosine / (2.0 * rho * distance or 1.0)))
        cap = 0.5 * betainc((order - 1) / 2.0, 0.5, 1.0 - cosine * cosine)
        shell = (order - 1) * math.log(rho)
        shell += 0.5 * (dimension - order) * math.log1p(-((rho / radius) ** 2))
        return (cap if cosine >= 0.0 else 1.0 - cap) * math.exp(scale + shell)

    # where all of a sphere is near its share has a corner
    corner = [abs(width - distance)] if low < abs(width - distance) < high else None
    return quad(density, low, high, points=corner, epsrel=1e-10, limit=200)[0]


def tube_occupation(
    order: int, distance: float, width: float, horizon: float, scale: float = 1.0
) -> float:
    """Mean time within ``width`` of a flat of codimension n, for isotropic noise of standard
    deviation ``scale`` a coordinate per unit of time (A10).
    """

    def inside(log_time: float) -> float:
        spread = scale**2 * math.exp(log_time)
        return ncx2.cdf(width**2 / spread, order, distance**2 / spread) * math.exp(log_time)

    # before this nothing is reached, or nothing has left: 40 standard deviations
    start = 2.0 * math.log(max(abs(distance - width), 1e-150) / (40.0 * scale))
    start = min(start, math.log(horizon))
    before = math.exp(start) if distance < width else 0.0
    found = quad(inside, start, math.log(horizon), epsabs=1e-13 * horizon, epsrel=1e-10, limit=400)
    return before + found[0]


def tied_weight(logits: np.ndarray, chosen: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """Softmax over the chosen logits of the expert of the pair that is given up, at a tie (A13)."""
    tied = np.take_along_axis(logits, pair[:, :1], axis=1)
    return 1.0 / np.exp(np.take_along_axis(logits, chosen, axis=1) - tied).sum(axis=1)


def tie_factor(rows, tied):
    """kappa = det(A A')^(-1/2), A the differences of the tied rows to one of them (docs/theory.md A7)."""
    tied = list(tied)
    return 1.0 / np.linalg.svd(rows[tied[1:]] - rows[tied[0]], compute_uv=False).prod()


def log_order_ratio(totals, orders, dimension, width, convention):
    """Logarithm of the ratio of leading terms of two orders, the first over the second.

    ``totals`` are sums of border shares, times their factors but for ``euclidean`` (docs/theory.md
    A7, F-10): the largest difference to the logit of one tied expert is ``base``, half the spread of
    the tied logits ``half_spread``, that spread ``spread``.
    """
    sums, scale = [], 2.0 if convention in ("base", "half_spread") else 1.0
    for total, order in zip(totals, orders, strict=True):
        left = (dimension - order) / 2
        volume = left * math.log(math.pi) - math.lgamma(left + 1)
        if convention == "euclidean":
            volume = log_half_binomial(dimension, order)
        corners = math.log(order + 1) if convention.endswith("spread") else 0.0
        sums.append(math.log(total) + volume + order * math.log(scale * width) + corners)
    return sums[0] - sums[1]
