r"""Normal laws of logits fitted to ever more of the data, and each law's part of a figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from moegeom.core.shapes import Float, Float64, Int32
from moegeom.geometry.gram import symmetric_root
from moegeom.geometry.keys import expert_set_key
from moegeom.geometry.load import (
    good_turing_coverage,
    load_cv,
    max_vio,
    pair_overlap,
    pairs_of_equals,
)
from moegeom.geometry.statistics import jackknife_error

#: The laws, in the order in which they know more.
LAWS = ("isotropic", "mean", "covariance", "gaussian")


Logits = Float[np.ndarray, "tokens experts"]


@dataclass(frozen=True, eq=False)
class Law:
    r"""A normal law of logits: its mean, and the covariance :math:`s^2 A A^\top`, A the root."""

    root: Float64[np.ndarray, "experts rank"]
    mean: Float64[np.ndarray, "experts"]
    scale: float = 1.0

    def draw(self, tokens: int, random: np.random.Generator) -> Logits:
        """Logits of so many independent tokens."""
        return self.of_product(random.standard_normal((tokens, self.root.shape[1])) @ self.root.T)

    def of_product(self, product: Logits) -> Logits:
        """The logits of normal numbers times the root."""
        return product * product.dtype.type(self.scale) + self.mean.astype(product.dtype)


def reference_laws(
    logits: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts hidden"],
    inputs: Float64[np.ndarray, "some hidden"] | None,
) -> dict[str, Law]:
    r"""The normal laws that these logits are compared with, where they can be computed.

    With m and C the mean and covariance of the logits (divisor T), :math:`G = W W^\top`, and mean
    squares per coordinate of the inputs, :math:`s^2 = \mathrm{tr}\,\mathrm{cov}(y) / D` about their
    mean and :math:`q^2 = \overline{|y|^2} / D` about 0:

    .. math::
        \text{isotropic } N(b, q^2 G), \quad \text{mean } N(m, s^2 G), \quad
        \text{covariance } N(b, C), \quad \text{gaussian } N(m, C).

    Isotropic inputs have no preferred direction, so only the rows are left; the mean adds what all
    tokens have in common, the covariance in which directions they differ. The first two need
    ``inputs``, of some tokens or all. Covariances that are not positive by rounding are taken as
    0. Float64. Oracle in tests: moments of draws; two experts, of which the first wins with
    probability :math:`\Phi`.
    """
    mean = logits.mean(axis=0)
    centred = logits - mean
    spread = symmetric_root(centred.T @ centred / len(logits))
    laws = {"covariance": Law(spread, bias), "gaussian": Law(spread, mean)}
    if inputs is not None:
        gram = symmetric_root(rows @ rows.T)
        square, mean_input = np.vdot(inputs, inputs) / inputs.size, inputs.mean(axis=0)
        about_mean = max(square - np.vdot(mean_input, mean_input) / len(mean_input), 0.0)
        laws["isotropic"] = Law(gram, bias, float(square) ** 0.5)
        laws["mean"] = Law(gram, mean, float(about_mean) ** 0.5)
    return {name: laws[name] for name in LAWS if name in laws}


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


# ----------------------------------------------------------------------------- figures of choices
@dataclass(frozen=True)
class ChoiceFigures:
    """Figures of some choices.

    ``coverage`` is the share of further tokens whose expert set is among the ``num_sets``,
    ``collision_share`` the share of pairs of tokens with one set, ``pair_overlap`` the share of
    their experts that a pair has in common, ``modal_share`` that of the most frequent set.
    """

    max_vio: float
    cv: float
    num_sets: float
    coverage: float
    collision_share: float
    pair_overlap: float
    modal_share: float


#: Names of the figures of choices.
FIGURES = tuple(field.name for field in dataclasses.fields(ChoiceFigures))

#: Those that are parted among the laws.
Parted = Literal["max_vio", "cv", "log_effective_sets"]
PARTED: tuple[Parted, ...] = get_args(Parted)


def choice_figures(chosen: Int32[np.ndarray, "tokens k"], experts: int) -> ChoiceFigures:
    """Figures of these choices. Oracle in tests: samples by other code."""
    counts = np.bincount(chosen.ravel(), minlength=experts)
    _, of_sets = np.unique(expert_set_key(chosen, experts), return_counts=True)
    equal, pairs = pairs_of_equals(of_sets)
    return ChoiceFigures(
        max_vio=float(max_vio(counts)),
        cv=float(load_cv(counts)),
        num_sets=float(len(of_sets)),
        coverage=good_turing_coverage(of_sets),
        collision_share=equal / pairs if pairs else float("nan"),
        pair_overlap=float(pair_overlap(counts, chosen.shape[1])),
        modal_share=float(of_sets.max() / len(chosen)),
    )


#: Largest relative error of a share of pairs of which the logarithm is taken.
_LEAST_SHARP = 1.0 / 3.0


@dataclass(frozen=True)
class LawFigures:
    """The figures under a law, of as many tokens as are recorded, and their standard errors.

    Over draws for a law; for the ``tokens`` themselves by leaving out blocks of documents.
    """

    law: str
    figures: ChoiceFigures
    errors: ChoiceFigures

    @property
    def log_effective_sets(self) -> float | None:
        """Collision entropy of the expert sets, in nats; None where hardly any pair shares one."""
        share, error = self.figures.collision_share, self.errors.collision_share
        return -math.log(share) if error <= _LEAST_SHARP * share and share > 0.0 else None

    @property
    def effective_sets_error(self) -> float | None:
        """Relative standard error of the effective number of sets."""
        if self.log_effective_sets is None:
            return None
        return self.errors.collision_share / self.figures.collision_share

    def parted(self, name: Parted) -> float | None:
        """A figure that is parted among the laws."""
        return getattr(self if name == "log_effective_sets" else self.figures, name)


#: Draws of each law.
SEEDS = 8


def figures_of_laws(
    laws: Mapping[str, Law], figures: Callable[[Logits], ChoiceFigures], tokens: int, seed: int
) -> list[LawFigures]:
    """Means of the figures of so many tokens over the draws of each law, and their errors.

    All laws are made of the same numbers: what one adds to another has little of their noise.
    """
    draws: dict[str, list[ChoiceFigures]] = {name: [] for name in laws}
    roots = {id(law.root): law.root.T.astype(np.float32) for law in laws.values()}
    for stream in np.random.SeedSequence(seed).spawn(SEEDS):
        for key, root in roots.items():
            random = np.random.default_rng(stream)
            product = random.standard_normal((tokens, len(root)), dtype=np.float32) @ root
            for name, law in laws.items():
                if id(law.root) == key:
                    draws[name].append(figures(law.of_product(product)))
    return [
        LawFigures(
            name,
            _each_figure(many, lambda values: float(np.mean(values))),
            _each_figure(many, lambda values: float(np.std(values, ddof=1) / len(values) ** 0.5)),
        )
        for name, many in draws.items()
    ]


def figures_of_tokens(
    chosen: Int32[np.ndarray, "tokens k"], experts: int, block: Int32[np.ndarray, "tokens"]
) -> LawFigures:
    """The tokens themselves, with jackknife errors over their blocks; nan with one block."""
    whole = choice_figures(chosen, experts)
    others = [block != number for number in np.unique(block)]
    without = [choice_figures(chosen[rows], experts) for rows in others if rows.any()]
    if len(without) < 2:
        return LawFigures("tokens", whole, ChoiceFigures(*[float("nan")] * len(FIGURES)))
    error = _each_figure(without, lambda values: float(jackknife_error(values)))
    return LawFigures("tokens", whole, error)


def _each_figure(
    many: Sequence[ChoiceFigures], statistic: Callable[[np.ndarray], float]
) -> ChoiceFigures:
    """A statistic of each figure."""
    columns = [[getattr(one, name) for one in many] for name in FIGURES]
    return ChoiceFigures(*(statistic(np.array(column)) for column in columns))


def parted(laws: Sequence[LawFigures]) -> dict[Parted, Attribution]:
    """What each law makes of the figures that can be parted; nothing where a law is missing."""
    figures = {one.law: one for one in laws}
    if any(name not in figures for name in LAWS):
        return {}
    parts: dict[Parted, Attribution] = {}
    for name in PARTED:
        values = {law: v for law in LAWS if (v := figures[law].parted(name)) is not None}
        tokens = figures["tokens"].parted(name)
        if tokens is not None and len(values) == len(LAWS):
            parts[name] = attributed(values, tokens)
    return parts
