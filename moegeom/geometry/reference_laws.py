r"""Laws of logits that know ever more of the data: what of a figure each of them makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.gram import symmetric_root

#: The laws, in the order in which they know more.
LAWS = ("isotropic", "mean", "covariance", "gaussian")


@dataclass(frozen=True, eq=False)
class LogitLaw:
    r"""A normal law of logits: ``mean`` and a ``root`` A with covariance :math:`A A^\top`."""

    mean: Float64[np.ndarray, "experts"]
    root: Float64[np.ndarray, "experts rank"]

    def draw(
        self, tokens: int, random: np.random.Generator
    ) -> Float64[np.ndarray, "tokens experts"]:
        """Logits of so many independent tokens."""
        return self.mean + random.standard_normal((tokens, self.root.shape[1])) @ self.root.T


@dataclass(frozen=True, eq=False)
class InputSizes:
    r"""Mean squares per coordinate of the inputs: :math:`s^2 = \mathrm{tr}\,\mathrm{cov}(y) / D`
    about their mean, :math:`q^2 = \overline{|y|^2} / D` about 0.
    """

    about_mean: float
    about_zero: float


def reference_laws(
    logits: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts hidden"] | None,
    sizes: InputSizes | None,
) -> dict[str, LogitLaw]:
    r"""The normal laws that these logits are held against, those that can be known.

    With m and C the mean and covariance of the logits (divisor T), :math:`G = W W^\top`:

    .. math::
        \text{isotropic } N(b, q^2 G), \quad \text{mean } N(m, s^2 G), \quad
        \text{covariance } N(b, C), \quad \text{gaussian } N(m, C).

    Isotropic inputs have no preferred direction, so only the rows are left; the mean adds what all
    tokens have in common, the covariance in which directions they differ. The first two need
    ``rows`` and ``sizes``. Covariances that are not positive by rounding are taken as 0. Float64.
    Oracle in tests: moments of draws; two experts, of which the first wins with probability
    :math:`\Phi`.
    """
    mean = logits.mean(axis=0)
    centred = logits - mean
    spread = symmetric_root(centred.T @ centred / len(logits))
    found = {"covariance": LogitLaw(bias, spread), "gaussian": LogitLaw(mean, spread)}
    if rows is not None and sizes is not None:
        gram = symmetric_root(rows @ rows.T)
        found["isotropic"] = LogitLaw(bias, np.sqrt(sizes.about_zero) * gram)
        found["mean"] = LogitLaw(mean, np.sqrt(sizes.about_mean) * gram)
    return {name: found[name] for name in LAWS if name in found}


@dataclass(frozen=True)
class Attribution:
    """What of a figure the rows make, the mean input, the covariance, and the rest of the data.

    The four add up to ``tokens``.
    """

    rows: float
    mean: float
    covariance: float
    rest: float

    @property
    def tokens(self) -> float:
        return self.rows + self.mean + self.covariance + self.rest


def attributed(figure: Mapping[str, float], tokens: float) -> Attribution:
    r"""A figure under each law, F, parted by the mean of both orders in which laws may be added.

    .. math::
        \text{rows} = F_\text{iso}, \quad
        \text{mean} = \tfrac12 [(F_\text{mean} - F_\text{iso}) + (F_\text{gauss} - F_\text{cov})],
        \quad \text{covariance} = \tfrac12 [(F_\text{cov} - F_\text{iso}) +
        (F_\text{gauss} - F_\text{mean})], \quad \text{rest} = F_\text{tokens} - F_\text{gauss}

    (Shapley values of mean and covariance.) Adds up to F of the tokens exactly but for rounding.
    """
    isotropic, mean, covariance, gaussian = (figure[name] for name in LAWS)
    return Attribution(
        rows=isotropic,
        mean=0.5 * ((mean - isotropic) + (gaussian - covariance)),
        covariance=0.5 * ((covariance - isotropic) + (gaussian - mean)),
        rest=tokens - gaussian,
    )
