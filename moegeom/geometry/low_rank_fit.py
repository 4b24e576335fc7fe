r"""What best reproduces another's choices: updates of rows, factors of columns, offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Integer
from moegeom.geometry.selection import sigmoid
from moegeom.geometry.set_code import chosen_mask

#: Steps of the search, and the noise that it allows in median gaps between scores.
_STEPS, _SOFT = 30, 0.3

#: Searches with the errors that the one before left, and the finest of these in those of no change.
_ROUNDS, _FINEST = 3, 2.0**-5


@dataclass(frozen=True, eq=False)
class ChoicesOfScores:
    r"""Choices S_t, and logits z_t whose scores :math:`s_{te} = \phi(z_{te}) + b_e` are compared.

    :math:`\phi` is the identity, or the sigmoid (``is_sigmoid``), b the ``bias``. Logits that are
    not finite take no part. ``values`` are what the other recorded of its own logits, up to a
    number of each token: they or their log-sigmoids (``are_log_sigmoids``), nan where unknown; None
    where all of it is. They are known to ``value_error``; None: to the rms of what differs.
    """

    logits: Float64[np.ndarray, "tokens experts"]
    chosen: Integer[np.ndarray, "tokens k"]
    bias: Float[np.ndarray, "experts"] | None = None
    is_sigmoid: bool = False
    values: Float64[np.ndarray, "tokens experts"] | None = None
    are_log_sigmoids: bool = False
    value_error: float | None = None

    @cached_property
    def _is_known(self) -> Bool[np.ndarray, "tokens experts"]:
        return np.isfinite(self.logits)

    @cached_property
    def _is_chosen(self) -> Bool[np.ndarray, "tokens experts"]:
        return chosen_mask(self.chosen, self.logits.shape[1])

    @cached_property
    def usable(self) -> Bool[np.ndarray, "tokens"]:
        """Tokens of which all chosen logits are known, and one other."""
        has_all = np.where(self._is_chosen, self._is_known, True).all(axis=1)
        return np.asarray(has_all & (self._is_known & ~self._is_chosen).any(axis=1))

    @cached_property
    def _part(self) -> ChoicesOfScores:
        """The usable tokens alone, which every step looks at."""
        some = self.usable
        values = None if self.values is None else self.values[some]
        return dataclasses.replace(
            self, logits=self.logits[some], chosen=self.chosen[some], values=values
        )

    @cached_property
    def gap(self) -> float:
        """The median gap between the scores on both sides of the boundary."""
        part = self._part
        scores, _ = self._scores(part.logits)
        last = np.where(part._is_chosen, scores, np.inf).min(axis=1)
        is_other = part._is_known & ~part._is_chosen
        gap = np.abs(last - np.where(is_other, scores, -np.inf).max(axis=1))
        return float(np.median(gap[gap > 0.0])) if (gap > 0.0).any() else 1.0

    @cached_property
    def _tau(self) -> float:
        """What values are known to, 0 where they say nothing."""
        if self.value_error is not None:
            return self.value_error
        return self.error_of(np.zeros(self._part.logits.shape))

    def error_of(self, change: Float64[np.ndarray, "usable experts"]) -> float:
        """The rms of what is left of the values under other logits; 0 where they are unknown."""
        left = self._values_left(change)
        if left is None:
            return 0.0
        return float(np.sqrt((left**2).sum() / max(np.count_nonzero(left), 1)))

    def _values_left(
        self, change: Float64[np.ndarray, "usable experts"]
    ) -> Float64[np.ndarray, "usable experts"] | None:
        """What other logits leave of the values; 0 where a value is unknown."""
        part = self._part
        if part.values is None:
            return None
        moved = part.logits + change
        own = -np.logaddexp(0.0, -moved) if self.are_log_sigmoids else moved
        return np.nan_to_num(_centred(own - part.values), posinf=0.0, neginf=0.0)

    def _scores(
        self, logits: Float64[np.ndarray, "some experts"]
    ) -> tuple[Float64[np.ndarray, "some experts"], Float64[np.ndarray, "some experts"] | float]:
        """Scores, and their slopes."""
        bias = 0.0 if self.bias is None else self.bias
        if not self.is_sigmoid:
            return logits + bias, 1.0
        chance = sigmoid(logits)
        return chance + bias, chance * (1.0 - chance)

    def loss(
        self, change: Float64[np.ndarray, "usable experts"]
    ) -> tuple[float, Float64[np.ndarray, "usable experts"]]:
        r"""How unlikely the choices of the usable tokens are under other logits, and its gradient.

        .. math::
            \sum_t \log\left(1 + \Big(\sum_{e \notin S_t} e^{s_{te} / T}\Big)
            \Big(\sum_{e \in S_t} e^{-s_{te} / T}\Big)\right)
            + \sum_t \sum_e \frac{(v_{te} - c_t)^2}{2 \tau^2}

        for scores of :math:`z + \delta`: a soft count of choices against the scores, T a part of
        the ``gap``, and the squares of the values that are left, in units of what they are known
        to.
        """
        part, soft = self._part, _SOFT * self.gap
        scores, slope = self._scores(part.logits + change)
        value, pull = _set_loss(scores / soft, part._is_chosen, part._is_known)
        pull = pull * slope / soft
        left = self._values_left(change)
        if left is not None and self._tau > 0.0:
            value += 0.5 * float(((left / self._tau) ** 2).sum())
            slope = sigmoid(-part.logits - change) if self.are_log_sigmoids else 1.0
            pull += left / self._tau**2 * slope
        return value, pull


def fitted_update(
    inputs: Float[np.ndarray, "tokens hidden"], choices: ChoicesOfScores, rank: int
) -> Float64[np.ndarray, "experts hidden"]:
    r"""Rows :math:`U V^\top` of rank r to add, which make the choices likely.

    Minimises :meth:`ChoicesOfScores.loss` of :math:`\delta_t = U V^\top x_t` over U [experts, r]
    and V [hidden, r]. Columns of ``inputs`` are scaled to equal size inside. A local minimum, from
    the leading directions of the gradient at 0. Zeros where nothing says anything.

    Oracle in tests: a planted update, of which the choices of other tokens are foretold.
    """
    experts, hidden = choices.logits.shape[1], inputs.shape[1]
    seen, size = _in_units(inputs, choices)
    _, pull = choices.loss(np.zeros((len(seen), experts)))
    left, strength, right = np.linalg.svd(pull.T @ seen, full_matrices=False)
    if strength[0] == 0.0:
        return np.zeros((experts, hidden))
    share = np.sqrt(strength[:rank] / strength[0] * choices.gap / np.sqrt(hidden))
    start = np.concatenate([(-left[:, :rank] * share).ravel(), (right[:rank].T * share).ravel()])

    def cost(both: np.ndarray) -> tuple[float, np.ndarray]:
        u, v = both[: experts * rank].reshape(experts, rank), both[experts * rank :]
        v = v.reshape(hidden, rank)
        along = seen @ v
        value, pull = choices.loss(along @ u.T)
        return value, np.concatenate([(pull.T @ along).ravel(), (seen.T @ (pull @ u)).ravel()])

    solution = _minimum(cost, start)
    u, v = solution[: experts * rank].reshape(experts, rank), solution[experts * rank :]
    return (u @ v.reshape(hidden, rank).T) / size


def fitted_rows(
    inputs: Float[np.ndarray, "tokens hidden"], choices: ChoicesOfScores
) -> Float64[np.ndarray, "experts hidden"]:
    r"""Rows of any rank to add, which make the choices likely.

    Minimises :meth:`ChoicesOfScores.loss` of :math:`\delta_t = D x_t` over D [experts, hidden],
    plus :math:`\tfrac{1}{2} \sum_{ed} D_{ed}^2` in units of the sizes of the columns of ``inputs``:
    convex in D where scores are logits. Zeros where nothing says anything.

    Oracle in tests: planted rows, of which the choices of other tokens are foretold.
    """
    experts, hidden = choices.logits.shape[1], inputs.shape[1]
    seen, size = _in_units(inputs, choices)
    flat, error = np.zeros(experts * hidden), choices.error_of(np.zeros((len(seen), experts)))
    for _ in range(_ROUNDS if error > 0.0 else 1):

        def cost(flat: np.ndarray, choices: ChoicesOfScores = choices) -> tuple[float, np.ndarray]:
            update = flat.reshape(experts, hidden)
            value, pull = choices.loss(seen @ update.T)
            return value + 0.5 * float(flat @ flat), (pull.T @ seen + update).ravel()

        flat = _minimum(cost, flat)
        # changes of other rows are met nearly exactly, those of other inputs are not
        left = choices.error_of(seen @ flat.reshape(experts, hidden).T)
        choices = dataclasses.replace(choices, value_error=max(left, _FINEST * error))
    return flat.reshape(experts, hidden) / size


def fitted_offsets(choices: ChoicesOfScores) -> Float64[np.ndarray, "experts"]:
    r"""A number to add to each logit, of all tokens alike, that makes the choices likely.

    Minimises :meth:`ChoicesOfScores.loss` of :math:`\delta_{te} = c_e`, plus
    :math:`\tfrac{1}{2} \sum_e (c_e / T)^2`; less their median. Zeros where nothing says anything.

    Oracle in tests: planted offsets of groups.
    """
    shape, gap = (int(choices.usable.sum()), choices.logits.shape[1]), choices.gap

    def cost(offsets: np.ndarray) -> tuple[float, np.ndarray]:
        value, pull = choices.loss(np.broadcast_to(offsets * gap, shape))
        return value + 0.5 * float(offsets @ offsets), pull.sum(axis=0) * gap + offsets

    start = np.zeros(shape[1])
    fit = _minimum(cost, start) * gap
    return fit - float(np.median(fit))


def fitted_factors(
    inputs: Float[np.ndarray, "tokens hidden"],
    weight: Float[np.ndarray, "experts hidden"],
    choices: ChoicesOfScores,
    size: int = 1,
) -> Float64[np.ndarray, "blocks"]:
    r"""A factor for each block of ``size`` columns that makes the choices likely.

    Minimises over f :meth:`ChoicesOfScores.loss` of
    :math:`\delta_{te} = \sum_d (f_{d / n} - 1) x_{td} W_{ed}`, n the size, plus
    :math:`\tfrac{1}{2} \sum_b (f_b - 1)^2`; over the median f, since choices by logits say nothing
    of a common factor. Convex in f where scores are logits. Ones where nothing says anything.

    Oracle in tests: planted factors.
    """
    number = -(-inputs.shape[1] // size)
    seen, rows = inputs[choices.usable].astype(np.float32), weight.astype(np.float32)
    block = np.arange(inputs.shape[1]) // size

    def cost(change: np.ndarray) -> tuple[float, np.ndarray]:
        moved = seen @ (rows * change[block].astype(np.float32)).T
        value, pull = choices.loss(moved.astype(np.float64))
        of_each = (seen * (pull.astype(np.float32) @ rows)).sum(axis=0, dtype=np.float64)
        return value + 0.5 * float(change @ change), np.bincount(block, of_each, number) + change

    start = np.zeros(number)
    fit = 1.0 + _minimum(cost, start)
    usual = float(np.median(fit))
    return fit / usual if usual > 0.0 else fit


def _minimum(
    cost: Callable[[np.ndarray], tuple[float, np.ndarray]], start: Float64[np.ndarray, "numbers"]
) -> Float64[np.ndarray, "numbers"]:
    """Where so many steps of L-BFGS end."""
    from scipy.optimize import minimize

    return minimize(cost, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x


def _in_units(
    inputs: Float[np.ndarray, "tokens hidden"], choices: ChoicesOfScores
) -> tuple[Float64[np.ndarray, "usable hidden"], Float64[np.ndarray, "hidden"]]:
    """Inputs of the usable tokens in units of the rms of each column, and these."""
    size = np.sqrt((inputs.astype(np.float64) ** 2).mean(axis=0))
    size = np.where(size > 0.0, size, 1.0)
    return inputs[choices.usable] / size, size


def _set_loss(
    scores: Float64[np.ndarray, "tokens experts"],
    is_chosen: Bool[np.ndarray, "tokens experts"],
    is_known: Bool[np.ndarray, "tokens experts"],
) -> tuple[float, Float64[np.ndarray, "tokens experts"]]:
    r""":math:`\sum_t \log(1 + e^{a_t + b_t})`, a and b the log-sums of others and of chosen."""
    others = np.where(is_known & ~is_chosen, scores, -np.inf)
    theirs = np.where(is_chosen, -scores, -np.inf)
    top, low = others.max(axis=1, keepdims=True), theirs.max(axis=1, keepdims=True)
    of_others, of_theirs = np.exp(others - top), np.exp(theirs - low)
    sum_others = of_others.sum(axis=1, keepdims=True)
    sum_theirs = of_theirs.sum(axis=1, keepdims=True)
    both = (top + low + np.log(sum_others) + np.log(sum_theirs))[:, 0]
    chance = np.exp(both - np.logaddexp(0.0, both))[:, None]
    pull = chance * (of_others / sum_others - of_theirs / sum_theirs)
    return float(np.logaddexp(0.0, both).sum()), pull


def _centred(apart: Float64[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    """Numbers less the mean of the finite ones of their token."""
    is_finite = np.isfinite(apart)
    number = np.maximum(is_finite.sum(axis=1, keepdims=True), 1)
    return apart - np.where(is_finite, apart, 0.0).sum(axis=1, keepdims=True) / number
