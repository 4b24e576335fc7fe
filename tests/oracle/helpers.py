"""What several oracles share: drawn routers, choices and exact logits of points, programs of SciPy."""

import hashlib
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linprog, minimize, nnls
from scipy.special import expit

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


def moment_router(experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (t, ..., t^(2k - 1)) and biases -t^(2k), of which every k-set is a cell (B4); for more
    than E / 2 those of E - k, negated.
    """
    least = min(k, experts - k)
    powers = np.linspace(-1.0, 1.0, experts)[:, None] ** np.arange(1, 2 * least + 1)
    sign = 1.0 if k == least else -1.0
    return sign * powers[:, :-1], -sign * powers[:, -1]


def tied_weight(logits: np.ndarray, chosen: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """Softmax over the chosen logits of the expert of the pair that is given up, at a tie (A13)."""
    tied = np.take_along_axis(logits, pair[:, :1], axis=1)
    return 1.0 / np.exp(np.take_along_axis(logits, chosen, axis=1) - tied).sum(axis=1)
