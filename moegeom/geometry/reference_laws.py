r"""Normal laws of logits fitted to ever more of the data, and each law's part of a figure."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

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


Normal = Float[np.ndarray, "tokens rank"]
Logits = Float[np.ndarray, "tokens experts"]
Random = np.random.Generator


@dataclass(frozen=True, eq=False)
class Law:
    """A law of logits that is made of standard normal numbers times a ``root``, A."""

    root: Float64[np.ndarray, "experts rank"]

    def draw(self, tokens: int, random: Random) -> Logits:
        """Logits of so many independent tokens."""
        normal = random.standard_normal((tokens, self.root.shape[1]))
        return self.of_normal(normal, normal @ self.root.T, random)

    @abstractmethod
    def of_normal(self, normal: Normal, product: Logits, random: Random) -> Logits:
        """The logits of these numbers, of which ``product`` is that with the root."""


@dataclass(frozen=True, eq=False)
class LogitLaw(Law):
    r"""A normal law of logits: ``mean``, and the covariance :math:`s^2 A A^\top`."""

    mean: Float64[np.ndarray, "experts"]
    scale: float = 1.0

    def of_normal(self, normal: Normal, product: Logits, random: Random) -> Logits:
        return product * product.dtype.type(self.scale) + self.mean.astype(product.dtype)


def reference_laws(
    logits: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts hidden"],
    inputs: Float64[np.ndarray, "some hidden"] | None,
) -> dict[str, LogitLaw]:
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
    laws = {"covariance": LogitLaw(spread, bias), "gaussian": LogitLaw(spread, mean)}
    if inputs is not None:
        gram = symmetric_root(rows @ rows.T)
        square, mean_input = np.vdot(inputs, inputs) / inputs.size, inputs.mean(axis=0)
        about_mean = max(square - np.vdot(mean_input, mean_input) / len(mean_input), 0.0)
        laws["isotropic"] = LogitLaw(gram, bias, float(square) ** 0.5)
        laws["mean"] = LogitLaw(gram, mean, float(about_mean) ** 0.5)
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
    their experts that a pair has in common, ``modal_share`` that of the most frequent set,
    ``near_share`` that of tokens nearer to a boundary than a distance that counts as near; None,
    like ``median_distance``, where no distance is known.
    """

    max_vio: float
    cv: float
    num_sets: float
    coverage: float
    collision_share: float
    pair_overlap: float
    modal_share: float
    near_share: float | None
    median_distance: float | None


#: Names of the figures of choices.
FIGURES = tuple(field.name for field in dataclasses.fields(ChoiceFigures))

#: Those that are parted among the laws.
Parted = Literal["max_vio", "cv", "log_effective_sets", "near_share"]
PARTED: tuple[Parted, ...] = get_args(Parted)


def choice_figures(
    chosen: Int32[np.ndarray, "tokens k"],
    experts: int,
    distance: Float64[np.ndarray, "tokens"] | None = None,
    near: float | None = None,
) -> ChoiceFigures:
    """Figures of these choices; ``distance`` is that to the boundary, below ``near`` it is near;
    nan where it was not looked at.

    Oracle in tests: samples by other code.
    """
    counts = np.bincount(chosen.ravel(), minlength=experts)
    _, of_sets = np.unique(expert_set_key(chosen, experts), return_counts=True)
    equal, pairs = pairs_of_equals(of_sets)
    if distance is not None:
        distance = distance[~np.isnan(distance)]
    near_share = None if distance is None or near is None else float((distance < near).mean())
    return ChoiceFigures(
        max_vio=float(max_vio(counts)),
        cv=float(load_cv(counts)),
        num_sets=float(len(of_sets)),
        coverage=good_turing_coverage(of_sets),
        collision_share=equal / pairs if pairs else float("nan"),
        pair_overlap=float(pair_overlap(counts, chosen.shape[1])),
        modal_share=float(of_sets.max() / len(chosen)),
        near_share=near_share,
        median_distance=None if distance is None else float(np.median(distance)),
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
            normal = random.standard_normal((tokens, len(root)), dtype=np.float32)
            product = normal @ root
            for name, law in laws.items():
                if id(law.root) == key:
                    draws[name].append(figures(law.of_normal(normal, product, random)))
    return [
        LawFigures(
            name,
            _each_figure(many, lambda values: float(np.mean(values))),
            _each_figure(many, lambda values: float(np.std(values, ddof=1) / len(values) ** 0.5)),
        )
        for name, many in draws.items()
    ]


def figures_of_tokens(
    chosen: Int32[np.ndarray, "tokens k"],
    experts: int,
    distance: Float64[np.ndarray, "tokens"] | None,
    near: float | None,
    block: Int32[np.ndarray, "tokens"],
) -> LawFigures:
    """The tokens themselves, with jackknife errors over their blocks; nan with one block."""
    whole = choice_figures(chosen, experts, distance, near)
    others = [block != number for number in np.unique(block)]
    without = [
        choice_figures(chosen[rows], experts, None if distance is None else distance[rows], near)
        for rows in others
        if rows.any()
    ]
    if len(without) < 2:
        return LawFigures("tokens", whole, ChoiceFigures(*[float("nan")] * len(FIGURES)))
    error = _each_figure(without, lambda values: float(jackknife_error(values)))
    return LawFigures("tokens", whole, error)


def _each_figure(
    many: Sequence[ChoiceFigures], statistic: Callable[[np.ndarray], float]
) -> ChoiceFigures:
    """A statistic of each figure; None where the figure is not known."""
    columns = [[getattr(one, name) for one in many] for name in FIGURES]
    values: list[Any] = [
        None if any(value is None for value in column) else statistic(np.array(column))
        for column in columns
    ]
    return ChoiceFigures(*values)


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
