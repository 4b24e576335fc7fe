"""Rows of two routers held against each other, and the norm in front of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from moegeom.core.shapes import Bool, Float, Float32, Float64, Int32, Int64, Integer
from moegeom.geometry.gram import cosines


# -------------------------------------------------------------------------------------------- norms
def normed(
    values: Float[np.ndarray, "tokens hidden"],
    kind: Literal["rms", "layer"],
    eps: float,
    gain: Float[np.ndarray, "hidden"],
    bias: Float[np.ndarray, "hidden"] | None = None,
) -> Float32[np.ndarray, "tokens hidden"]:
    r"""Router inputs from the inputs of the norm, :math:`g \odot x / \sqrt{mean(x^2) + \epsilon}`.

    A bias is added to that. For ``layer`` the mean of each token is subtracted first. Statistics in
    float64, rounded once.
    Source: docs/theory.md E3. Oracle in tests: torch.nn.functional.rms_norm, layer_norm.
    """
    x = values.astype(np.float64)
    if kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    scale = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    return (x / scale * gain + (0.0 if bias is None else bias)).astype(np.float32)


#: Rows that stay in the processor's cache while several things are done to them.
ROWS_IN_CACHE = 64


def unit_rows(values: Float[np.ndarray, "tokens hidden"]) -> Float64[np.ndarray, "tokens hidden"]:
    """Each row over its Euclidean length; 0 for a zero row, nan or 0 for one that is not finite."""
    unit = np.empty(values.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(values), ROWS_IN_CACHE):
            there = slice(start, start + ROWS_IN_CACHE)
            rows = values[there].astype(np.float64)
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            np.divide(rows, np.where(lengths == 0.0, 1.0, lengths), out=unit[there])
    return unit


# ------------------------------------------------------------------------------------- initial rows
def drawn_errors(
    rows: Float64[np.ndarray, "rows columns"], kurtosis: float = 0.0, rounding: float = 0.0
) -> tuple[float, ...]:
    r"""How far figures of rows are from those of independent numbers of one law, in their errors.

    With :math:`x = w / \sqrt{mean(w^2)}`: the mean of x; its excess kurtosis less ``kurtosis`` (0
    normal, -1.2 uniform), beyond what ``rounding`` may have made of it; the spread of the mean
    squares of rows and of columns over :math:`(\kappa + 2) / n`, of n numbers each; the mean
    squared cosine of two rows times the columns, 1 of independent ones, and their mean cosine, 0.
    The last four count above that alone: rows that were scaled to one length, or less their mean,
    are no sign of training.

    float64, units of standard errors for many numbers. Two rows at least, none of zeros.
    Oracle in tests: numbers that are drawn.
    """
    count, columns = rows.shape
    x = rows / np.abs(rows).max()
    squares = (x := x / np.sqrt((x**2).mean())) ** 2
    excess = float((squares**2).mean() / squares.mean() ** 2) - 3.0
    # variance of a sample kurtosis by the delta method, of normal and of uniform numbers
    error = np.sqrt((24.0 if kurtosis > -0.6 else 1.32) / rows.size)
    unit = x / np.sqrt(squares.sum(axis=1, keepdims=True))
    cosine = (unit @ unit.T)[np.triu_indices(count, 1)]

    def spread(means: Float64[np.ndarray, "means"], each: int) -> float:
        ratio = means.var(ddof=1) * each / (kurtosis + 2.0)
        return max(0.0, float(ratio - 1.0)) * np.sqrt((len(means) - 1) / 2.0)

    alike = float((cosine**2).mean() * columns - 1.0) * np.sqrt(len(cosine) / 2.0)
    return (
        float(x.mean()) * np.sqrt(rows.size),
        max(0.0, abs(excess - kurtosis) - rounding) / error,
        spread(squares.mean(axis=1), columns),
        spread(squares.mean(axis=0), count),
        max(0.0, alike),
        max(0.0, float(cosine.mean()) * np.sqrt(columns * len(cosine))),
    )


#: Laws of drawn numbers by their excess kurtosis, and standard errors within which figures lie.
_LAWS, _LAW_ERRORS = {"normal": 0.0, "uniform": -1.2}, 4.0


def drawn_law(rows: Float64[np.ndarray, "rows columns"], rounding: float = 0.0) -> str:
    """``normal`` or ``uniform`` where rows are independent numbers of one size; empty elsewhere.

    :func:`drawn_errors` within four, of two rows at least; empty where a row is 0.
    Oracle in tests: numbers that are drawn.
    """
    if not rows.any(axis=1).all():
        return ""
    laws = (
        law
        for law, kurtosis in _LAWS.items()
        if max(map(abs, drawn_errors(rows, kurtosis, rounding))) <= _LAW_ERRORS
    )
    return next(laws, "")


#: Numbers that tell the law of a router, of so many of its rows; of several routers together.
_OF_LAW, _ROWS_OF_LAW, _OF_LAW_TOGETHER = 2**15, 32, 2**18

#: Mean and variance of each of :func:`drawn_errors`, of drawn numbers in 8 to 64 rows; the largest
#: that occur.
_EXPECTED = np.array([[0.0, 0.8, *4 * [0.42]], [1.0, 0.38, *4 * [0.5]]])
_LARGEST_ERROR = 6.0

#: Columns in which lengths of rows are compared.
_COLUMNS_OF_LENGTHS = 1024


def law_of(weight: Float[np.ndarray, "experts hidden"], most: int = _ROWS_OF_LAW) -> str | None:
    """The :func:`drawn_law` of 32,768 numbers in ``most`` rows; None where there are fewer."""
    count = min(most, len(weight))
    rows, columns = weight[np.arange(count) * len(weight) // count], -(-_OF_LAW // count)
    if count < 2 or columns > weight.shape[1]:
        return None
    return drawn_law(rows[:, :columns].astype(np.float64))


def law_together(weights: Sequence[Float[np.ndarray, "experts hidden"]]) -> str | None:
    """The law that each of some small routers has; None of fewer than 262,144 numbers in all.

    Of each of :func:`drawn_errors` the mean over routers is within four standard errors of what
    drawn numbers have, and every one within six. Oracle in tests: numbers that are drawn.
    """
    if sum(weight.size for weight in weights) < _OF_LAW_TOGETHER:
        return None
    for law, kurtosis in _LAWS.items():
        errors: list[tuple[float, ...]] = []
        for weight in weights:
            rows = weight[:: -(-len(weight) // _ROWS_OF_LAW)].astype(np.float64)
            errors.append(drawn_errors(rows, kurtosis) if rows.any(axis=1).all() else (np.inf,))
            if max(map(abs, errors[-1])) > _LARGEST_ERROR:
                break
        else:
            mean, variance = _EXPECTED
            beyond = (np.mean(errors, axis=0) - mean) / np.sqrt(variance / len(weights))
            if max(abs(beyond[0]), *beyond[1:]) <= _LAW_ERRORS:
                return law
    return ""


def drawn_run(weight: Float[np.ndarray, "experts hidden"]) -> tuple[str, range] | None:
    """The longest run of rows, in whole eighths and not of all, that has a :func:`law_of`; and it.

    Lengths in some columns are looked at first: those of drawn rows hardly differ.
    """
    some_columns = weight[:, :_COLUMNS_OF_LENGTHS].astype(np.float64)
    squares, columns = (some_columns**2).mean(axis=1), some_columns.shape[1]
    ends = np.unique(np.arange(9) * len(weight) // 8)
    first, last = (ends[at] for at in np.triu_indices(len(ends), 1))
    sums = np.concatenate([[[0.0, 0.0]], np.cumsum(np.stack([squares, squares**2], 1), axis=0)])
    mean, mean_square = ((sums[last] - sums[first]) / (last - first)[:, None]).T
    most = 2.0 * (1.0 + _LAW_ERRORS * np.sqrt(2.0 / (last - first))) / columns
    is_even = (mean_square - mean**2 <= most * mean**2) & (last - first < len(weight))
    runs = zip(first[is_even].tolist(), last[is_even].tolist(), strict=True)
    for start, stop in sorted(runs, key=lambda run: run[0] - run[1]):
        if law := law_of(weight[start:stop], max(_ROWS_OF_LAW, -(-_OF_LAW // columns))):
            return law, range(start, stop)
    return None


# ----------------------------------------------------------------------------- projections in front
#: Shorter vectors are divided by this instead of their length.
LEAST_LENGTH = 1e-12


def unit_length(rows: Float[np.ndarray, "rows size"]) -> Float64[np.ndarray, "rows size"]:
    """Rows over their Euclidean length, at least 1e-12: a row of zeros stays one.

    Source: torch.nn.functional.normalize.
    """
    exact = rows.astype(np.float64)
    length = np.sqrt(np.einsum("ij,ij->i", exact, exact))
    return exact / np.maximum(length, LEAST_LENGTH)[:, None]


def composed_rows(
    rows: Float[np.ndarray, "experts projected"],
    projection: Float[np.ndarray, "projected hidden"],
    bias: Float[np.ndarray, "projected"] | None,
) -> tuple[Float64[np.ndarray, "experts hidden"], Float64[np.ndarray, "experts"] | None]:
    r"""W and b of :math:`W y + b = U (P y + c)`, U the rows made unit length.

    Products are taken in float64: an entry is within :math:`\gamma_{p+4} |u|^T |P|` of the exact
    one, :math:`\gamma_n = n u / (1 - n u)` with u = 2^-53 and p projected dimensions, so W is
    nearer to the stored numbers than any float32 engine. The bias is None where c is.
    Source: microsoft/tutel tutel/gates/cosine_top.py. Oracle in tests: torch.
    """
    unit = unit_length(rows)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is looked at later
        weight = unit @ projection.astype(np.float64)
        return weight, None if bias is None else unit @ bias.astype(np.float64)


def cosine_scale(
    length: Float64[np.ndarray, "tokens"], scale: float
) -> Float64[np.ndarray, "tokens"]:
    r"""The factor :math:`s / |P y + c|` from ``W y + b`` to cosine logits, for each token.

    Positive, and the same for all experts: it changes no choice. ``length`` is that of the
    projected input, at least 1e-12 counts.
    """
    return scale / np.maximum(length, LEAST_LENGTH)


# --------------------------------------------------------------------------------------- signatures
_SEED = 20_261_120


@lru_cache(maxsize=4)
def projection_matrix(dimension: int, count: int) -> Float64[np.ndarray, "dimension count"]:
    """Independent normal numbers of variance 1 / count; the same for every run and machine."""
    generator = np.random.Generator(np.random.PCG64([_SEED, dimension, count]))
    return generator.standard_normal((dimension, count)) / np.sqrt(count)


def projected(
    rows: Float64[np.ndarray, "rows dimension"], count: int
) -> Float64[np.ndarray, "rows count"]:
    r"""``count`` seeded projections of each row, :math:`x R`.

    :math:`|xR - yR| / |x - y|` has mean square 1 and standard deviation about 1 / sqrt(2 count):
    12 % for 32. Linear, so that centring can come before or after. Johnson and Lindenstrauss 1984.
    """
    return rows @ projection_matrix(rows.shape[1], count)


# ------------------------------------------------------------------------------------------ changes
#: With fewer rows the Gram matrix has too few entries to tell a rotation from chance.
LEAST_ROWS_FOR_GRAM = 3


def size(values: Float64[np.ndarray, "rows dimension"]) -> float:
    """Frobenius norm; 0 for an empty matrix."""
    return float(np.linalg.norm(values))


def common_factor(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    r""":math:`\langle a, b \rangle / \langle a, a \rangle`, the s that minimises :math:`|b - sa|`.

    1 when a is 0.
    """
    square = float(np.vdot(a, a))
    return float(np.vdot(a, b)) / square if square > 0.0 else 1.0


def usual_factor(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    """The median over rows of the factor of each row, which a few rows do not drag.

    0 where no row of a is longer than 0.
    """
    square = np.einsum("ij,ij->i", a, a)
    is_nonzero = square > 0.0
    if not is_nonzero.any():
        return 0.0
    return float(np.median(np.einsum("ij,ij->i", a, b)[is_nonzero] / square[is_nonzero]))


def spread_factor(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    """The median ratio of the distances between rows, the same whatever was added to all of them.

    0 where no two rows of a differ.
    """
    pairs = np.triu_indices(len(a), 1)
    before, after = (squared_distances(rows, rows)[pairs] for rows in (a, b))
    is_apart = before > 0.0
    return float(np.sqrt(np.median(after[is_apart] / before[is_apart]))) if is_apart.any() else 0.0


def column_factors(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, "dimension"]:
    r"""The same for each column: :math:`s_j = a_{\cdot j} \cdot b_{\cdot j} / |a_{\cdot j}|^2`.

    1 where a column of a is 0. With r rows of noise the factors take away a share 1 / r of its
    square, so that they explain nothing by chance from four rows on.
    """
    square = np.einsum("ij,ij->j", a, a)
    products = np.einsum("ij,ij->j", a, b)
    return np.divide(products, square, out=np.ones_like(square), where=square > 0.0)


def multiples(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, "rows"]:
    r"""What each row of a is multiplied by in b: :math:`r_i = a_i \cdot b_i / |a_i|^2`.

    nan where a row of a is 0, or :math:`|b_i - r_i a_i|` exceeds two roundings to bfloat16 of
    :math:`|b_i|`.
    """
    square, product = np.einsum("ij,ij->i", a, a), np.einsum("ij,ij->i", a, b)
    ratios = np.divide(product, square, out=np.full(len(a), np.nan), where=square > 0.0)
    left = np.linalg.norm(b - ratios[:, None] * a, axis=1)
    return np.where(left <= 2.0**-7 * np.linalg.norm(b, axis=1), ratios, np.nan)


def own_cosines(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, "rows"]:
    """Cosine between each row and the same row of the other; nan where one is 0."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.einsum("ij,ij->i", a, b) / lengths, -1.0, 1.0)


def likeness_z(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    r"""Mean cosine of equal rows less that of different rows, in standard errors of the first.

    :math:`(\bar c_{ii} - \bar c_{ij}) \sqrt{E} / s` with s the standard deviation of the cosines
    between different rows, at least that of random directions, :math:`1 / \sqrt{D}`. About a
    standard normal for two unrelated routers; nan when no cosine is defined.
    """
    both = np.concatenate([a, b])
    across = cosines(both @ both.T)[: len(a), len(a) :]
    own = np.diag(across)
    own = own[~np.isnan(own)]
    others = across[~np.eye(len(a), dtype=bool)]
    others = others[~np.isnan(others)]
    if not own.size:
        return float("nan")
    spread = max(float(others.std()) if others.size else 0.0, 1.0 / np.sqrt(a.shape[1]))
    centre = float(others.mean()) if others.size else 0.0
    return (float(own.mean()) - centre) * np.sqrt(own.size) / spread


def gram_noise(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    r"""Relative noise of the rows that would change their Gram matrix as much as it changed.

    Noise of relative size r in random directions changes :math:`a_i \cdot a_j / (|a_i| |a_j|)` by
    :math:`r \sqrt{2 / D}` rms, and by :math:`\sqrt 2` times as much where i = j; this is the rms of
    the changes in those units, more than r when r is not small (noise lengthens rows). 0 for a
    rotation, :math:`A A^\top = B B^\top`, of the order of 1 for unrelated rows of equal lengths.
    Zero rows are left out; nan with fewer than LEAST_ROWS_FOR_GRAM others. Oracle in tests:
    orthogonal matrices, Monte Carlo.
    """
    lengths = np.linalg.norm(a, axis=1)
    is_nonzero = lengths > 0.0
    if is_nonzero.sum() < LEAST_ROWS_FOR_GRAM:
        return float("nan")
    a, b, lengths = a[is_nonzero], b[is_nonzero], lengths[is_nonzero]
    changes = (b @ b.T - a @ a.T) / (lengths[:, None] * lengths[None, :])
    changes *= np.sqrt(a.shape[1] / 2.0)
    np.fill_diagonal(changes, np.diag(changes) / np.sqrt(2.0))
    entries = changes[np.triu_indices(len(changes))]
    return float(np.sqrt(np.mean(entries**2)))


# ----------------------------------------------------------------------------------- places of rows
#: A row has changed places when the other place is nearer than this share of the distance to its
#: own: less than a quarter of the squared change is left.
NEARER = 0.5

#: ... and its own place is further away than this share of its length.
AWAY = 0.05

#: Rows that are equal stay where they are: a place of its own counts this much of a mean square.
_OWN_PLACE = 1e-6


def squared_distances(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "others dimension"]
) -> Float64[np.ndarray, "others rows"]:
    r""":math:`|b_i - a_j|^2 = |b_i|^2 + |a_j|^2 - 2 b_i \cdot a_j`, at least 0.

    True to 1e-15 of the squared lengths. Oracle in tests: the differences themselves.
    """
    lengths = [np.einsum("ij,ij->i", rows, rows) for rows in (b, a)]
    return np.maximum(lengths[0][:, None] + lengths[1][None, :] - 2.0 * (b @ a.T), 0.0)


def nearest_order(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Int64[np.ndarray, "rows"]:
    r"""The permutation p that minimises :math:`\sum_i |b_i - a_{p_i}|^2`.

    Among equal rows the one in the same place. Where the nearest rows are all different they are
    it, for each term is least; else the Hungarian method (scipy). Oracle in tests: all permutations
    of up to six rows.
    """
    cost = squared_distances(a, b)
    np.fill_diagonal(cost, np.diag(cost) - _OWN_PLACE * cost.mean())
    nearest = cost.argmin(axis=1)
    if len(np.unique(nearest)) == len(nearest):
        return nearest.astype(np.int64)
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(cost)[1].astype(np.int64)


def matched_places(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Int64[np.ndarray, "rows"]:
    r"""For each row of b the row of a that it is: i itself unless rows changed places.

    :func:`nearest_order` after a common factor is taken out (the median ratio of lengths in order
    of length). A cycle of it is kept only where each of its rows is nearer to the other place than
    NEARER times the distance to its own, and further from its own than AWAY of its length; so rows
    that merely moved keep their places, and the answer is always a permutation. Rows with values
    that are not finite, or all zero, give the identity.
    """
    own = np.arange(len(a))
    scale = _length_ratio(a, b)
    if not 0.0 < scale < np.inf or len(a) < 2:
        return own
    b = b / scale
    stayed = np.linalg.norm(b - a, axis=1)
    is_away = stayed > AWAY * np.linalg.norm(a, axis=1)
    # a superset of what is kept below: these squares are true to 1e-11 of themselves there
    limit = np.where(is_away, (NEARER * stayed) ** 2, 0.0) * (1.0 + 1e-9)
    if not _has_cycle(squared_distances(a, b) < limit[:, None]):
        return own
    order = nearest_order(a, b)
    moved = np.linalg.norm(b - a[order], axis=1)
    is_elsewhere = is_away & (moved < NEARER * stayed)
    for cycle in cycles(order):
        if not is_elsewhere[cycle].all():
            order[cycle] = cycle
    return order


def _has_cycle(leads: Bool[np.ndarray, "nodes nodes"]) -> bool:
    """True when edges ``leads[from, to]`` close a cycle: nodes are left that have both ends."""
    while not (goes_on := leads.any(axis=0) & leads.any(axis=1)).all():
        leads = leads[np.ix_(goes_on, goes_on)]
    return leads.size > 0


def cycles(order: Int64[np.ndarray, "rows"]) -> list[list[int]]:
    """The cycles of a permutation that move anything."""
    left, loops = set(np.flatnonzero(order != np.arange(len(order))).tolist()), []
    while left:
        cycle = [min(left)]
        while (after := int(order[cycle[-1]])) != cycle[0]:
            cycle.append(after)
        left -= set(cycle)
        loops.append(cycle)
    return loops


def _length_ratio(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    """The same whatever rows changed places; nan when nothing can be compared."""
    lengths = [np.sort(np.linalg.norm(rows, axis=1)) for rows in (a, b)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = lengths[1] / lengths[0]
    finite = ratios[np.isfinite(ratios)]
    return float(np.median(finite)) if finite.size else float("nan")


# -------------------------------------------------------------------------------- places of experts
def common_choices(
    one: Integer[np.ndarray, "tokens k"], other: Integer[np.ndarray, "tokens m"], num_experts: int
) -> Int64[np.ndarray, "experts experts"]:
    r""":math:`N_{ab}`: tokens for which the one side chose expert a and the other expert b."""
    pairs = one.astype(np.int64)[:, :, None] * num_experts + other.astype(np.int64)[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=num_experts * num_experts)
    return counts.reshape(num_experts, num_experts).astype(np.int64)


def completed_sets(
    sets: Int32[np.ndarray, "tokens k"],
    others: Int32[np.ndarray, "tokens k"],
    is_empty: Bool[np.ndarray, "tokens k"],
) -> Int32[np.ndarray, "tokens k"]:
    """Sets whose empty slots hold the first experts of others that they lack.

    What was chosen, where sets are those of the others less what was dropped.
    """
    rows = np.flatnonzero(is_empty.any(axis=1))
    left = np.where(is_empty[rows], -1, sets[rows])
    is_lacking = (others[rows][:, :, None] != left[:, None, :]).all(axis=2)
    lacking = np.take_along_axis(
        others[rows], np.argsort(~is_lacking, axis=1, kind="stable"), axis=1
    )
    place = np.maximum(np.cumsum(is_empty[rows], axis=1) - 1, 0)
    whole = sets.copy()
    whole[rows] = np.where(is_empty[rows], np.take_along_axis(lacking, place, axis=1), left)
    return whole


def overlap_beyond_chance(
    counts: Int64[np.ndarray, "experts experts"],
    matching: Int64[np.ndarray, "experts"],
    num_tokens: int,
) -> float:
    r"""(o - c) / (k - c) for sets of k experts: o is the mean number of common ones, c that of two
    dice with the same loads; 1 for equal sets, and where no other sets were possible.

    ``counts`` as of ``common_choices``; expert a is number ``matching[a]`` of the other side.
    Cohen's kappa where k is 1. Oracle in tests: scikit-learn's.
    """
    k = float(np.sqrt(counts.sum() / num_tokens)) if num_tokens else 0.0
    if not k:
        return 1.0
    mine = counts.sum(axis=1) / (k * num_tokens)
    theirs = counts.sum(axis=0)[matching] / (k * num_tokens)
    common = float(np.trace(counts[:, matching])) / num_tokens
    chance = float(mine @ theirs)
    return (common - chance) / (k - chance) if chance < k else 1.0


def expert_matching(counts: Int64[np.ndarray, "experts experts"]) -> Int64[np.ndarray, "experts"]:
    r"""For each expert of the one side its number on the other: the permutation p with most
    :math:`\sum_a N_{a p_a}`.

    Where several are as good, the one that leaves more experts where they are. Hungarian method
    (scipy). Oracle in tests: all permutations of six experts.
    """
    from scipy.optimize import linear_sum_assignment

    experts = len(counts)
    # less than one token for all experts together, so that it decides between equals only
    own = np.eye(experts) / (experts + 1)
    return linear_sum_assignment(counts + own, maximize=True)[1].astype(np.int64)
