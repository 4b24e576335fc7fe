r"""How far experts lie apart, and whether what lies between them is noise alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh, helmert
from scipy.special import gammaincc, ndtri

from moegeom.core.shapes import Bool, Float, Float64
from moegeom.geometry.noise import spacing

#: Entries count whose spacing in storage is at most so many deviations of the noise: rounding adds
#: to such as independent uniform noise does, to a few parts in a million.
_MOST_STEPS = 1.25

#: Estimates of the noise, each from the entries that count by the one before.
_ROUNDS = 4

#: Rows of contrasts whose largest singular value is looked at.
_MOST_ROWS = 512

#: Mean and standard deviation of the Tracy-Widom law of real matrices.
_TRACY_WIDOM = (-1.2065, 1.2680)

#: No p-value is told apart below: 37 standard errors.
_LEAST_P = 1e-300


@dataclass(frozen=True)
class ExpertSpread:
    r"""What :func:`expert_spread` finds.

    ``upcycled_share`` 1 - mean_e |W_e - W|^2 / mean_e |W_e|^2, W the mean of the experts: 1/E for
    experts that have nothing in common, 1 for copies. ``correlation`` is the mean cosine of two
    experts: 0 and 1 there. ``deviation`` is the standard deviation of an entry around what the
    experts share, ``step`` the root mean square spacing of the stored numbers; ``is_resolved`` says
    that the deviation is not hidden by that spacing.

    ``errors`` say by how many standard errors the spread differs from independent normal numbers of
    one variance: its excess ``kurtosis`` (of either sign); the energies of ``rows``, ``columns``
    and ``experts`` (of three or more), which vary more; its largest singular value (``spectrum``),
    which is ``edge_ratio`` times that of noise, the Marchenko-Pastur edge; and its part along
    ``mean``, what the experts share. Empty, and the two figures nan, where it is not resolved.
    """

    num_experts: int
    num_values: int
    upcycled_share: float
    correlation: float
    deviation: float
    step: float
    is_resolved: bool
    kurtosis: float
    edge_ratio: float
    errors: dict[str, float]

    @property
    def farthest(self) -> float:
        """The largest of ``errors``, below 0 that of kurtosis alone; 0 where there are none."""
        return max(*self.errors.values(), abs(self.errors.get("kurtosis", 0.0)), 0.0, 0.0)


def expert_spread(
    experts: Float[np.ndarray, "experts rows columns"], unit: float = 0.0
) -> ExpertSpread:
    r"""Whether experts differ by more than independent normal noise around a common start.

    ``unit`` is the unit roundoff of the format in which they are stored: its rounding is part of
    the noise. With s the variance of an entry, that of rounding included, the contrasts of experts
    :math:`Y = (H \otimes 1)\,W / \sqrt s`, H with orthonormal rows that sum to 0, are independent
    standard normal numbers if there is nothing but noise, whatever the experts share. Energies of n
    entries are then chi-squared over n, and the largest squared singular value of a rows times
    columns matrix follows the Tracy-Widom law around
    :math:`(\sqrt{r - 1} + \sqrt c)^2`.

    float64, units of the weights; shares and correlation nan for experts that are all 0, copies
    have deviation 0 and are not resolved. Raises ValueError for fewer than two experts.
    Source: Johnstone 2001 for the edge. Oracle in tests: simulation, numpy.linalg.svd, scipy.stats.
    """
    number, rows, columns = experts.shape
    if number < 2:
        raise ValueError(f"{number} experts have no spread")
    values = experts.astype(np.float64)
    mean = values.mean(axis=0)
    beside = values - values[0]  # copies are exactly 0 apart
    apart = (beside - beside.mean(axis=0)) * math.sqrt(number / (number - 1))
    energy, spread = float((values**2).mean()), float((apart**2).mean())
    steps = spacing(mean.ravel(), unit).reshape(mean.shape)
    rounding = steps**2 / 12.0
    variance, is_usable = spread, np.ones_like(steps, dtype=bool)
    for _ in range(_ROUNDS):  # what rounding adds makes the noise look larger than it is
        is_usable = steps <= _MOST_STEPS * math.sqrt(max(variance, 0.0))
        if not is_usable.any():
            break
        variance = float((apart**2)[:, is_usable].mean() - rounding[is_usable].mean())
    is_resolved = bool(variance > 0.0 and 2 * is_usable.sum() >= is_usable.size)
    kurtosis, edge_ratio, errors = math.nan, math.nan, {}
    if is_resolved:
        scale = np.where(is_usable, 1.0 / np.sqrt(variance + rounding), 0.0)
        share = (rounding / (variance + rounding))[is_usable]
        kurtosis, errors["kurtosis"] = _kurtosis(apart * scale, is_usable, share)
        errors |= _energies(apart * scale, is_usable)
        edge_ratio, errors["spectrum"] = _edge(beside, scale)
        errors["mean"] = _along(beside, mean, scale)
    return ExpertSpread(
        num_experts=number,
        num_values=rows * columns,
        upcycled_share=float((mean**2).mean() / energy) if energy else math.nan,
        correlation=_correlation(values),
        deviation=math.sqrt(spread),
        step=math.sqrt(float((steps**2).mean())),
        is_resolved=is_resolved,
        kurtosis=kurtosis,
        edge_ratio=edge_ratio,
        errors=errors,
    )


def _correlation(values: Float64[np.ndarray, "experts rows columns"]) -> float:
    """The mean cosine of two experts; nan where one is 0."""
    number = len(values)
    lengths = np.sqrt((values**2).sum(axis=(1, 2)))
    if not lengths.all():
        return math.nan
    together = np.tensordot(1.0 / lengths, values, axes=1)
    return (float((together**2).sum()) / number - 1.0) / (number - 1)


def _kurtosis(
    scaled: Float64[np.ndarray, "experts rows columns"],
    is_usable: Bool[np.ndarray, "rows columns"],
    rounded: Float64[np.ndarray, "usable"],
) -> tuple[float, float]:
    """Excess kurtosis, and how far it is from that of normal numbers that were rounded.

    ``rounded`` is the part of the variance that is rounding. Experts at one place have the
    correlation -1/(E - 1), which counts by its fourth power.
    """
    number = len(scaled)
    squares = scaled[:, is_usable] ** 2
    kurtosis = float((squares**2).mean() / squares.mean() ** 2) - 3.0
    weights = (1.0 - 1.0 / number) ** 4 + (number - 1) / number**4
    uniform = -1.2 * float((rounded**2).mean()) * weights * (number / (number - 1)) ** 2
    error = math.sqrt(24.0 * (1.0 + (number - 1.0) ** -3) / squares.size)
    return kurtosis, (kurtosis - uniform) / error


def _energies(
    scaled: Float64[np.ndarray, "experts rows columns"], is_usable: Bool[np.ndarray, "rows columns"]
) -> dict[str, float]:
    """How much more energies of rows, columns and experts vary than those of noise."""
    number = len(scaled)
    squares = scaled**2 / (scaled[:, is_usable] ** 2).mean()
    place = squares.mean(axis=0)
    of = {
        "rows": _excess(place.sum(axis=1), is_usable.sum(axis=1), number - 1.0),
        "columns": _excess(place.sum(axis=0), is_usable.sum(axis=0), number - 1.0),
    }
    if number > 2:
        counts = np.full(number, is_usable.sum())
        # neighbours in one place share 1/(E - 1)^2 of the variance of a square
        of["experts"] = _excess(
            squares.sum(axis=(1, 2)), counts, 1.0 / (1.0 - (number - 1.0) ** -2)
        )
    return of


def _excess(
    energy: Float64[np.ndarray, "parts"], counts: np.ndarray, freedom_of_each: float
) -> float:
    """Standard errors by which the energies of parts vary more than chi-squared numbers do.

    0 of fewer than two parts. Their squared distances have mean 1 and variance 2 + 12/n; their sum
    is taken for a gamma variable of these moments.
    """
    energy, counts = energy[counts > 0], counts[counts > 0].astype(np.float64)
    freedom = counts * freedom_of_each
    total = float(((energy / counts - 1.0) ** 2 * freedom / 2.0).sum())
    expected = len(counts) - 1.0
    variance = 2.0 * expected + 12.0 * float((1.0 / freedom).sum())
    if expected < 1.0:
        return 0.0
    return _errors(float(gammaincc(expected**2 / variance, total * expected / variance)))


def _edge(
    values: Float64[np.ndarray, "experts rows columns"], scale: Float64[np.ndarray, "rows columns"]
) -> tuple[float, float]:
    """The largest singular value of contrasts over the edge of noise, and its standard errors.

    Entries that do not count, of scale 0, are drawn: as zeros they would leave columns uneven.
    """
    number, rows, columns = values.shape
    some = min(number - 1, max(1, _MOST_ROWS // rows))
    contrasts = np.tensordot(helmert(some + 1), values[: some + 1], axes=1) * scale
    left_out = scale == 0.0
    noise = np.random.default_rng(0).standard_normal((some, int(left_out.sum())))
    contrasts[:, left_out] = noise
    wide = contrasts.reshape(some * rows, columns)
    wide = wide if len(wide) <= columns else wide.T
    least, most = wide.shape
    gram = wide @ wide.T
    top = float(eigh(gram, eigvals_only=True, subset_by_index=[least - 1, least - 1])[0])
    roots = math.sqrt(max(most - 1.0, 1.0)), math.sqrt(least)
    centre = sum(roots) ** 2
    width = sum(roots) * (1.0 / roots[0] + 1.0 / roots[1]) ** (1.0 / 3.0)
    centred, deviation = _TRACY_WIDOM
    return math.sqrt(top / centre), ((top - centre) / width - centred) / deviation


def _along(
    values: Float64[np.ndarray, "experts rows columns"],
    mean: Float64[np.ndarray, "rows columns"],
    scale: Float64[np.ndarray, "rows columns"],
) -> float:
    """Standard errors by which contrasts lie along the mean more than noise does."""
    direction = mean * scale
    length = math.sqrt(float((direction**2).sum()))
    if not length:
        return 0.0
    parts = np.tensordot(values * scale, direction / length, axes=2)
    energy = float(((parts - parts.mean()) ** 2).sum())
    return _errors(float(gammaincc((len(values) - 1) / 2.0, energy / 2.0)))


def _errors(p_value: float) -> float:
    """Standard errors of a normal number that is exceeded so often."""
    return -float(ndtri(max(p_value, _LEAST_P)))
