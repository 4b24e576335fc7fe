"""Tests that a recording must pass before a study uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moegeom.core.digest import digits_of
from moegeom.core.router import Norm
from moegeom.core.shapes import Bool, Float, Float64
from moegeom.core.text import number_of, percent
from moegeom.geometry.rows import ROWS_IN_CACHE

#: An RMS within this of 1 counts as right. Rounding moves it far less: independent errors of
#: 2^-9 per element (bf16) average out over the hidden size, and a norm computed in bf16
#: throughout carries one common error of 2^-9 = 0.2 %.
TOLERANCE = 0.02

#: What rounding spreads the RMS behind a norm by, and half as much again; independent numbers
#: spread it by 3.3 / sqrt(hidden size).
_NO_SPREAD = 0.01

#: Tokens that tell a spread.
_LEAST_TOKENS = 16

#: Share of tokens that must be right. The rest may be tokens whose input is so small that the
#: norm's eps matters; a residual stream spreads by tens of percent and has a few percent at most.
MIN_SHARE = 0.95

#: Where dimensions have gain 0 their part of the norm is lost: an RMS over the others may then
#: be smaller (a massive activation may sit in a lost one), so the test from below is loose.
LOOSE_MINIMUM = 0.5

FingerprintVerdict = Literal["matches", "differs", "unknown"]


@dataclass(frozen=True)
class RmsTest:
    """Is each row the output of the norm in front of the router?

    ``median``, ``p01`` and ``p99`` are those of RMS(y / gain), which is 1 after an RMS norm (less
    where ``eps`` matters), or of the standard deviation of (y - bias) / gain after a layer norm,
    whose mean must be 0 as well (``worst_mean``, the 99th percentile of its size). NaN when no
    token could be tested. ``eps_may_explain``: no token is larger than 1, so that inputs of the
    norm which are small beside the root of its ``eps`` would look like this.
    """

    kind: Literal["rms", "layer"]
    median: float
    p01: float
    p99: float
    share_within_2_percent: float
    passed: bool
    num_tokens: int
    num_zero_tokens: int
    num_not_finite: int
    num_dimensions_skipped: int
    worst_mean: float = 0.0
    eps_may_explain: bool = False

    @property
    def sentence(self) -> str:
        """What was found and what was expected; for a failed test also what it looks like."""
        measured = (
            "RMS of value / gain"
            if self.kind == "rms"
            else "standard deviation of (value - bias) / gain"
        )
        skipped = (
            f" ({self.num_dimensions_skipped} dimensions of gain 0 skipped)"
            if self.num_dimensions_skipped
            else ""
        )
        text = (
            f"{measured} has median {self.median:.4g} and 1 % to 99 % range {self.p01:.4g} to "
            f"{self.p99:.4g}{skipped}; expected 1, {percent(self.share_within_2_percent, '.1f')} "
            f"of {number_of(self.num_tokens, 'token is', 'tokens are')} within 2 %."
        )
        return text if self.passed else f"{text} {self._guess}"

    @property
    def is_constant(self) -> bool:
        """True when every token has the same size, 1: what a norm leaves, and nothing else does."""
        is_known = self.num_tokens - self.num_not_finite >= _LEAST_TOKENS
        is_one = abs(self.median - 1) <= TOLERANCE and self.worst_mean <= TOLERANCE
        return is_known and is_one and self.p99 - self.p01 <= _NO_SPREAD

    @property
    def is_of_the_norm(self) -> bool:
        """True when sizes vary from token to token, as those of inputs of the norm do."""
        return self.p99 - self.p01 > 2 * TOLERANCE * self.median

    @property
    def _guess(self) -> str:
        if np.isnan(self.median):
            return "No token could be tested: no finite row, or no gain other than 0."
        if self.num_zero_tokens > (1 - MIN_SHARE) * self.num_tokens:
            are_zero = number_of(self.num_zero_tokens, "token is", "tokens are")
            return f"{are_zero} all zero: padding was recorded."
        if self.worst_mean > TOLERANCE:
            return f"The mean reaches {self.worst_mean:.4g}; a layer norm leaves 0."
        if self.is_of_the_norm:
            return (
                "The norm varies from token to token: this looks like the residual stream "
                "(stage pre_norm) or another layer."
            )
        return "The norm is constant but not 1: the gain belongs to another layer or convention."


def rms_test(
    values: Float[np.ndarray, "tokens hidden"],
    gain: Float[np.ndarray, "hidden"] | None,
    norm: Norm | None = None,
    bias: Float[np.ndarray, "hidden"] | None = None,
) -> RmsTest:
    r"""Whether rows recorded as router inputs are what the norm in front gives.

    .. math:: r(y) = \sqrt{\frac1D \sum_i (y_i / g_i)^2} = \frac{\rho}{\sqrt{\rho^2 + \epsilon}}

    with :math:`\rho` the RMS of the norm's input: 1 unless the norm's eps matters. Passed when 95 %
    of the tokens (so the median too) are within 2 % of 1. Dimensions with gain 0 say nothing and
    are skipped; then a token must lie above 0.5 and its sum of squares must not exceed D.

    Parameters
    ----------
    values
        Router inputs as recorded; a few thousand tokens are enough. Rows that are not finite are
        counted and not tested.
    gain
        The effective gain of the norm; None is 1.
    norm
        RMS when None.
    bias
        Added by a layer norm after the gain; None is 0.
    """
    kind = norm.kind if norm else "rms"
    keeps = np.ones(values.shape[1], bool) if gain is None else gain != 0
    # no mask as large as the values
    parts = np.array_split(values, max(len(values) // ROWS_IN_CACHE, 1))
    is_finite = np.concatenate([np.isfinite(part).all(axis=1) for part in parts])
    is_zero = ~np.any(values, axis=1)
    is_tested = is_finite & keeps.any()
    tested = values if is_tested.all() else values[is_tested]
    size, mean = np.zeros(len(tested)), np.zeros(len(tested))
    for start in range(0, len(tested), ROWS_IN_CACHE):
        there = slice(start, start + ROWS_IN_CACHE)
        unit = _unit_rows(tested[there], keeps, gain, bias)
        size[there], mean[there] = _size_and_mean(unit, kind)
    share, is_right = _share_right(size, mean, float(keeps.mean()))
    p01, median, p99 = np.quantile(size, (0.01, 0.5, 0.99)) if len(size) else (np.nan,) * 3
    worst_mean = float(np.quantile(np.abs(mean), 0.99)) if len(mean) else 0.0
    return RmsTest(
        kind=kind,
        median=float(median),
        p01=float(p01),
        p99=float(p99),
        share_within_2_percent=share,
        passed=is_right,
        num_tokens=len(values),
        num_zero_tokens=int(is_zero.sum()),
        num_not_finite=int((~is_finite).sum()),
        num_dimensions_skipped=int((~keeps).sum()),
        worst_mean=worst_mean,
        eps_may_explain=_eps_may_explain(size, worst_mean, norm),
    )


def _unit_rows(
    values: Float[np.ndarray, "tokens hidden"],
    keeps: Bool[np.ndarray, "hidden"],
    gain: Float[np.ndarray, "hidden"] | None,
    bias: Float[np.ndarray, "hidden"] | None,
) -> Float64[np.ndarray, "tokens kept"]:
    unit = (values if keeps.all() else values[:, keeps]).astype(np.float64)
    if bias is not None:
        unit -= bias[keeps].astype(np.float64)
    if gain is not None:
        unit /= gain[keeps].astype(np.float64)
    return unit


def _size_and_mean(
    unit: Float64[np.ndarray, "tokens kept"], kind: str
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
    mean = np.zeros(len(unit))
    if kind == "layer":
        mean = unit.mean(axis=1)
        unit = unit - mean[:, None]
    return np.sqrt(np.square(unit).mean(axis=1)), mean


def _share_right(
    size: Float64[np.ndarray, "tokens"], mean: Float64[np.ndarray, "tokens"], seen_share: float
) -> tuple[float, bool]:
    """Share of tokens within 2 %, and whether enough tokens are as they must be.

    ``seen_share`` is the share of dimensions that were recorded. Below 1 the sum of squares over
    them is still at most the hidden size, which bounds the RMS from above.
    """
    if not len(size):
        return 0.0, False
    within = (np.abs(size - 1) <= TOLERANCE) & (np.abs(mean) <= TOLERANCE)
    bounded = (size >= LOOSE_MINIMUM) & (size * np.sqrt(seen_share) <= 1 + TOLERANCE)
    allowed = within if seen_share == 1 else bounded
    return float(within.mean()), bool(allowed.mean() >= MIN_SHARE)


def _eps_may_explain(
    size: Float64[np.ndarray, "tokens"], worst_mean: float, norm: Norm | None
) -> bool:
    """Whether an eps > 0 makes such rows: any size below 1 is that of some input of the norm."""
    if norm is None or norm.eps <= 0.0 or not len(size) or worst_mean > TOLERANCE:
        return False
    return bool(size.min() > 0.0 and size.max() <= 1 + TOLERANCE)


def fingerprint_test(recorded: str, checkpoint: str) -> FingerprintVerdict:
    """Whether the recording was made from this checkpoint; unknown when either does not say.

    A recording may hold the digits of the hash alone, as ``moegeom list routers`` prints them.
    """
    if not recorded or not checkpoint:
        return "unknown"
    return "matches" if recorded in (checkpoint, digits_of(checkpoint)) else "differs"
