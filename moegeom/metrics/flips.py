"""Flips: tokens whose chosen set is another one under a variant of the arithmetic.

The variant is beside the router as stored, on the same recorded inputs. Exact ties go to the lower
expert number; an engine that breaks them otherwise flips between ``flipped_share_least`` and
``flipped_share_most`` of the tokens. ``proved_share`` are tokens whose set stays by a bound on all
that is not known about the variant: the order in which it adds (any order that its preset allows)
and what the last bit of its scores is; the recorded inputs are taken as exactly those of the
engine. ``predicted_flipped_share`` needs no emulation: it is the noise model of docs/theory.md E4
with the size of the roundings, for linear boundaries. Of the choices of another run only the sets
are known, of those of another checkpoint also their order; what is not known is missing. A flipped
expert is not a wrong answer: ``weight_moved_mean`` says how much routing weight leaves the experts
chosen before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.flips import (
    DISPROVED,
    FIXED_POINT,
    FLIPPED,
    KNOWN,
    MOVED,
    PERHAPS,
    PREDICTED,
    PROVED,
    REORDERED,
    SUM,
    SURELY,
    TIED,
    TOKENS,
)

_SHARES = {
    "flipped_share": FLIPPED,
    "flipped_share_least": SURELY,
    "flipped_share_most": PERHAPS,
    "reordered_share": REORDERED,
    "tied_share": TIED,
    "proved_share": PROVED,
}


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["flips"]
    tokens = int(counts[TOKENS, SUM])
    if not tokens:
        return {"layers": {}}
    sums = [int(total) if known else None for total, known in counts[:, [SUM, KNOWN]].tolist()]
    return {
        "layers": {
            **{name: _over(sums[column], tokens) for name, column in _SHARES.items()},
            "num_disproved": sums[DISPROVED],
            "weight_moved_mean": _over(sums[MOVED], FIXED_POINT * tokens),
            "predicted_flipped_share": _over(sums[PREDICTED], FIXED_POINT * tokens),
        }
    }


def _over(total: int | None, tokens: float) -> float | None:
    return None if total is None else total / tokens


METRIC = Metric(
    name="flips",
    version=2,
    text="Tokens that choose other experts under a variant, and those that are proved not to.",
    scope="flip",
    needs=("flips",),
    columns={
        "layers": (
            Column(
                "flipped_share",
                "share of tokens with another chosen set, exact ties to the lower expert",
                formula="flipped_share",
                has_se=True,
            ),
            Column(
                "flipped_share_least",
                "share of tokens with another set however exact ties are broken",
                formula="flipped_share",
            ),
            Column(
                "flipped_share_most",
                "share of tokens with another set for some way of breaking exact ties",
                formula="flipped_share",
            ),
            Column("reordered_share", "share of tokens with the same set in another order"),
            Column("tied_share", "share of tokens on an exact tie that was none before"),
            Column(
                "proved_share",
                "share of tokens whose set is proved to stay for the recorded inputs, in any order "
                "of summation that the arithmetic allows",
                formula="proved_share",
            ),
            Column(
                "num_disproved",
                "proved tokens that flipped: 0, or a bound is wrong",
                "tokens",
                "int",
            ),
            Column(
                "weight_moved_mean",
                "mean share of routing weight on experts that leave the set",
                formula="weight_moved",
                has_se=True,
            ),
            Column(
                "predicted_flipped_share",
                "flipped_share by the noise model, without emulation",
                formula="predicted_flipped_share",
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
