r"""How much of a choice the mean input decides, whatever the token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float64, Int, Int64


def input_pull(scores: Float64[np.ndarray, "tokens experts"]) -> float:
    r"""The pull of the mean input, :math:`\mathrm{rms}_e(\bar m_e) / \mathrm{rms}_{t,e}(\bar z_{te}
    - \bar m_e)`.

    :math:`\bar z` are the scores less the mean of each token over experts, :math:`\bar m` its mean
    over tokens: what all tokens have in common, over what tells them apart. Dimensionless; 0 where
    no expert is favoured on average, inf where all tokens score alike and some expert is, nan for
    no token, one expert, or scores that are all equal. Unmoved by the order of tokens, the numbers
    of experts, a number added to all scores of a token, and a factor of all scores. Float64; error
    about 1e-12. Oracle in tests: planted means, and the definition by loops.
    """
    if not scores.size:
        return math.nan
    centred = scores - scores.mean(axis=1, keepdims=True)
    mean = centred.mean(axis=0)
    return ScoreMoments(mean, float(((centred - mean) ** 2).mean())).pull()


@dataclass(frozen=True, eq=False)
class ScoreMoments:
    """Mean over tokens of token-centred scores, and mean square of what remains."""

    mean: Float64[np.ndarray, "experts"]
    square: float

    def pull(self, bias: Float[np.ndarray, "experts"] | None = None) -> float:
        """:func:`input_pull` of the scores, or of the scores with a bias, which moves the mean."""
        if len(self.mean) < 2:
            return math.nan
        mean = self.mean
        if bias is not None:
            own = bias.astype(np.float64)
            mean = mean + (own - own.mean())
        pull, rest = math.sqrt(float((mean**2).mean())), math.sqrt(self.square)
        if rest == 0.0:
            return math.inf if pull > 0.0 else math.nan
        return pull / rest


@dataclass(frozen=True, eq=False)
class BlockedScores:
    """Sums by block, which give the moments without any one block by subtraction.

    Sums of double-centred scores (token mean and grand ``mean`` removed, to avoid cancellation):
    ``sums`` over tokens, and ``squares`` over tokens and experts.
    """

    mean: Float64[np.ndarray, "experts"]
    tokens: Int64[np.ndarray, "blocks"]
    sums: Float64[np.ndarray, "blocks experts"]
    squares: Float64[np.ndarray, "blocks"]

    @classmethod
    def of(
        cls,
        scores: Float[np.ndarray, "tokens experts"],
        block: Int[np.ndarray, "tokens"],
        num_blocks: int,
    ) -> BlockedScores:
        """Oracle in tests: :func:`input_pull` of the tokens that are left."""
        rest = scores - scores.mean(axis=1, keepdims=True, dtype=np.float64)
        mean = rest.mean(axis=0) if len(rest) else np.zeros(scores.shape[1])
        rest -= mean
        member = np.zeros((num_blocks, len(rest)))
        member[block, np.arange(len(rest))] = 1.0
        squares = np.einsum("ij,ij->i", rest, rest)
        tokens = np.bincount(block, minlength=num_blocks)
        return cls(mean, tokens, member @ rest, member @ squares)

    def without(self, block: int | None) -> ScoreMoments:
        """Moments of all tokens but those of one block; the mean is nan without tokens."""
        is_included = np.ones(len(self.tokens), dtype=bool)
        if block is not None:
            is_included[block] = False
        number = int(self.tokens[is_included].sum())
        if not number:
            return ScoreMoments(np.full(len(self.mean), np.nan), math.nan)
        moved = self.sums[is_included].sum(axis=0) / number
        square = float(self.squares[is_included].sum()) / (number * len(self.mean))
        square -= float((moved**2).mean())
        return ScoreMoments(self.mean + moved, max(square, 0.0))


def pull_of_random_rows(
    inputs: Float64[np.ndarray, "tokens hidden"],
    participation_ratio: float,
    lengths: Float64[np.ndarray, "experts"],
) -> tuple[float, float]:
    r"""Mean and standard deviation of the pull over rows of these lengths in random directions.

    Rows :math:`l_e u_e` with independent uniform directions see a mean input :math:`\mu` and a
    covariance S by quadratic forms with expectations in the ratio :math:`|\mu|^2 / \mathrm{tr} S`
    and relative variances

    .. math::
        v = 2\, \frac{\mathrm{tr}\,(P L)^2}{((1 - 1/E)\,\mathrm{tr} L)^2}, \quad
        v / \mathrm{PR}, \quad \text{covariance } v \rho, \quad
        \rho = \frac{\mu^\top S \mu}{|\mu|^2\, \mathrm{tr} S},

    L the squares of the lengths, P the centring over experts, PR the participation ratio of S.
    To second order :math:`|\mu| / \sqrt{\mathrm{tr} S} \cdot (1 - v/8 + 3v / 8\mathrm{PR} -
    v\rho/4)` and, to first, the standard deviation :math:`|\mu| / \sqrt{\mathrm{tr} S} \cdot
    \tfrac12 \sqrt{v (1 + 1/\mathrm{PR} - 2 \rho)}`. Of logits; of scores that squash them nearly.
    nan for fewer than two tokens or experts, inputs that are all equal, rows of zeros. Error for
    E >= 16 in tests: 3 % of the mean, 15 % of the deviation. Oracle in tests: 4000 draws of rows.
    """
    if len(inputs) < 2 or len(lengths) < 2:
        return math.nan, math.nan
    mean = inputs.mean(axis=0)
    apart = inputs - mean
    trace = float((apart**2).sum()) / len(inputs)
    square, size = lengths**2, float(mean @ mean)
    experts, total = len(lengths), float((lengths**2).sum())
    if trace == 0.0 or total == 0.0:
        return math.nan, math.nan
    if size == 0.0:
        return 0.0, 0.0
    along = float(((apart @ mean) ** 2).mean()) / (size * trace)
    squares = float((square**2).sum())
    spread = squares * (1.0 - 2.0 / experts) + (total / experts) ** 2
    v = 2.0 * spread / ((1.0 - 1.0 / experts) * total) ** 2
    pull = math.sqrt(size / trace)
    expected = 1.0 - v / 8.0 + 3.0 * v / (8.0 * participation_ratio) - v * along / 4.0
    deviation = 0.5 * math.sqrt(max(v * (1.0 + 1.0 / participation_ratio - 2.0 * along), 0.0))
    return pull * expected, pull * deviation
