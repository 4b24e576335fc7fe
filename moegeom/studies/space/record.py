"""What the data let each router use: the record and its closed list of meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moegeom.checks.measured import MeanPull
from moegeom.core.option import option
from moegeom.core.tokens import SampleCounts
from moegeom.engine.request import StudyRequest
from moegeom.geometry.reference_laws import Attribution


@dataclass(frozen=True)
class SpaceRequest(StudyRequest):
    """What was asked for; ``out`` is a file for the laws, or for the biases of centring,
    ``measure`` one for the shares near ties; ``radius`` that of balls in place of rms lengths.
    ``experts`` asks for their ranks, ``yes`` says that more than 2 GB of them may be read.
    """

    out: Path | None = option(
        "Write the laws, FILE.parquet, or the biases of centring, FILE.npz or FILE.safetensors."
    )
    measure: Path | None = option(
        "Write FILE.parquet: shares near ties of two, three and four experts at every width, of "
        "tokens, laws and balls. Takes about 20 s a layer."
    )
    radius: float | None = option("Of the balls, in place of the rms length of the inputs.")
    experts: bool = option("Read the experts: their rank where tokens are.", False)
    yes: bool = option("Read more than 2 GB of experts.", False)


Meaning = Literal["even", "mean input", "covariance", "rows", "rest", "unknown", "few"]

#: What makes a router's loads uneven, in the order in which the screen tells it.
SENTENCES: Mapping[Meaning, str] = {
    "mean input": "the mean input makes most of the imbalance: rows lean towards what all tokens "
    "have in common. Take that away (centring below, a selection bias) and loads are far more "
    "even.",
    "covariance": "the directions in which tokens differ make most of the imbalance.",
    "rows": "the rows and biases themselves make most of the imbalance: inputs without any "
    "preferred direction would be as uneven.",
    "rest": "neither mean nor covariance of the inputs makes most of the imbalance: it is in how "
    "tokens cluster.",
    "unknown": "uneven; what makes it needs recorded router inputs.",
    "few": "not judged: on so few tokens or documents chance alone may give an expert twice its "
    "fair share.",
    "even": "loads are even within what chance shows.",
}

#: Figures of a law, and those that are parted among the laws: words for them.
FIGURES: Mapping[str, str] = {
    "max_vio": "MaxVio",
    "cv": "CV of the load",
    "log_effective_sets": "log of effective expert sets",
    "near_share": "share of tokens near a boundary",
}


@dataclass(frozen=True)
class LawValues:
    """Figures of some choices.

    ``log_effective_sets`` is the Miller-Madow entropy of the expert sets in nats, ``modal_share``
    the share of the most frequent set, ``near_share`` that of tokens nearer to a boundary than a
    tenth of the recorded tokens are; None, like ``median_distance``, where boundaries are not
    linear.
    """

    max_vio: float
    cv: float
    num_sets: float
    log_effective_sets: float
    modal_share: float
    near_share: float | None
    median_distance: float | None


@dataclass(frozen=True)
class LawFigures:
    """The figures under a law, as many tokens as are recorded, and their standard errors.

    Over seeds for drawn laws; for the tokens by leaving out one of 16 blocks of documents.
    """

    law: str
    figures: LawValues
    errors: LawValues


@dataclass(frozen=True)
class Centring:
    """Scores with their mean over tokens taken away, which makes the mean input say nothing.

    ``change`` is added to the selection scores, mean 0. ``other_documents`` is the MaxVio of each
    half of the documents with the change that the other half gives: the worse one; None with one
    unit. ``weight_moved`` is the share of the routing weight on experts that are no longer chosen.
    """

    change: tuple[float, ...]
    max_vio: float
    other_documents: float | None
    effective_sets: float
    weight_moved: float


@dataclass(frozen=True)
class NearBoundaries:
    """What counting boundaries says of the share near one, in a ball around 0.

    The ball has the rms length of the inputs, ``width`` is the distance that counts as near.
    ``borders`` is how many of the ``num_pairs`` boundaries z_i = z_j border the chosen set, each by
    the share of it that does; ``leading`` the share of the ball near them if all went through its
    middle and none met; ``bounds_log10`` bounds of the share near ties of 2, 3 and 4 experts.
    """

    width: float
    radius: float
    borders: float
    num_pairs: int
    leading: float
    bounds_log10: tuple[float, ...]


@dataclass(frozen=True)
class Balls:
    """Radii of a ball around 0 and of one around the mean input, and W times that mean."""

    around_zero: float
    around_mean: float
    logits_of_mean: tuple[float, ...]


@dataclass(frozen=True)
class TieCount:
    """What counting ties of one order says of a ball: ``borders`` and ``weighted`` are the sums of
    border shares and of these times their factors, the rest logarithms of shares and ratios to
    order 1, by convention of a width.
    """

    flats: int
    borders: float
    borders_se: float
    weighted: float
    weighted_se: float
    bound_log10: float
    leading_log10: float
    ratios_log10: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredShare:
    """The share of a law nearer than ``epsilon`` to ties of an order, between two certain ends.

    The ends are one number for order 1 and where searches came to their end. The error is that of
    the upper one. Balls have a centre and a radius.
    """

    law: str
    order: int
    epsilon: float
    centre: str | None
    radius: float | None
    share_lower: float
    share_upper: float
    share_se: float
    counted: TieCount | None = None


@dataclass(frozen=True)
class Reach:
    """What an affine set of ``dims`` dimensions can meet: cells of any router of this size, and the
    mean number of those of Gaussian rows and biases (None where that is beyond reach).
    """

    dims: int
    most_log10: float
    random_log10: float | None


@dataclass(frozen=True)
class ConeShares:
    """Cells of the visited expert sets as shares of all directions, from so many drawn ones.

    ``correlation`` of ranks between visits and shares, and the one that as many tokens without any
    preferred direction would show; None where directions meet fewer than half of the visited cells.
    ``modal`` is the share of the set that is visited most.
    """

    directions: int
    covered: float
    covered_se: float
    correlation: float | None
    correlation_by_size: float | None
    modal: float


@dataclass(frozen=True)
class ExpertRanks:
    """Neurons of the experts on the ``dims`` directions that hold 99 % of the inputs' variance.

    Ranks and effective ranks of the gate matrices there, over experts; ``effective_random`` is that
    of random matrices of their shape. The local figures are medians around 64 tokens, on as many
    directions as the inputs have dimensions; None where those are not known.
    ``width_over_dimension`` is neurons over the larger end of the dimension.
    """

    width: int
    dims: int
    rank_min: int
    rank_median: float
    effective_min: float
    effective_median: float
    effective_random: float
    local_dims: int | None
    local_median: float | None
    local_random: float | None
    width_over_dimension: float | None

    @property
    def is_narrow(self) -> bool:
        """Whether an expert has fewer neurons than the data dimensions."""
        return self.width_over_dimension is not None and self.width_over_dimension < 1.0


@dataclass(frozen=True)
class RouterSpace:
    """One router: ``laws`` end with the ball, where it is known, and the tokens; ``parts`` by
    figure, empty where a law is missing.

    ``limit`` is the MaxVio that even routing stays below on such documents. ``pull`` is that of
    the mean input on what is compared, ``pull_random`` and its deviation those of rows in random
    directions; None without inputs. ``dimension`` is the range of the intrinsic dimension of the
    inputs, ``reach`` what affine sets of both ends meet, rounded up, ``cones`` how large the
    visited cells are, and ``near`` what counting boundaries says of the share near one; of linear
    rules. ``measured`` is empty and ``experts`` None unless they were asked for.
    """

    router: str
    num_experts: int
    top_k: int
    num_tokens: int
    limit: float
    pull: float
    pull_random: float | None
    pull_random_sd: float | None
    laws: tuple[LawFigures, ...]
    parts: Mapping[str, Attribution]
    centring: Centring
    dimension: tuple[float, float] | None
    reach: tuple[Reach, ...]
    cones: ConeShares | None
    near: NearBoundaries | None
    meaning: Meaning
    measured: tuple[MeasuredShare, ...] = ()
    experts: ExpertRanks | None = None

    @property
    def tokens(self) -> LawValues:
        return self.laws[-1].figures

    @property
    def is_pulled(self) -> bool:
        """Whether the mean input pulls more than it would rows of random directions."""
        if self.pull_random is None or self.pull_random_sd is None:
            return False
        return MeanPull(self.pull, self.pull_random, self.pull_random_sd).is_above(0.0)


@dataclass(frozen=True)
class RouterSpaces:
    """Every router that could be looked at, and the facts of the run as in ``run.json``.

    ``left_out`` are routers with the reason; ``seeds`` is the number of draws of each law.
    """

    run: Mapping[str, Any]
    routers: tuple[RouterSpace, ...]
    left_out: tuple[tuple[str, str], ...]
    seeds: int
    sample: SampleCounts
    seed: int
    written: str | None = None
    measure: str | None = None
