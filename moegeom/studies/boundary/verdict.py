"""The verdict of a boundary report: what flips most, or how two sides differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moegeom.core.row_keys import CHECKPOINT_B, RUN_B, SIDES
from moegeom.core.text import percent
from moegeom.studies.boundary.record import BoundaryReport, VariantFlips


def verdict_sentence(report: BoundaryReport) -> str:
    """The verdict as one sentence."""
    sides = [variant for variant in report.variants if variant.name in SIDES]
    if sides:
        return " ".join(_SIDE_VERDICTS[variant.name](report, variant) for variant in sides)
    most = max(report.variants, key=lambda variant: variant.mean("flipped_share") or 0.0)
    share = most.mean("flipped_share")
    if not share:
        return _nothing_flips(report)
    worst = most.worst
    place = report.summary.places([worst["router"]])
    text = (
        f"{most.name} flips most: {share_text(share)} of the choices ({place}: "
        f"{share_text(worst['flipped_share'])})"
    )
    if most.any_share is not None:
        text += f", {share_text(most.any_share)} of the tokens at some layer"
    return f"{text}; {share_text(most.mean('weight_moved_mean'))} of the routing weight moves."


def _nothing_flips(report: BoundaryReport) -> str:
    """The verdict where nothing flips, with the share that flips if exact ties break otherwise."""
    tied = [(v.mean("flipped_share_most") or 0.0, v.name) for v in report.variants if v.is_tied]
    if not tied:
        return "No arithmetic asked for flips any of these tokens."
    most, name = max(tied)
    return (
        "No arithmetic asked for flips a token unless an exact tie breaks otherwise; if it does, "
        f"{name} flips up to {share_text(most)} of the choices. Ties are counted as the lowest "
        "expert wins."
    )


def _difference(report: BoundaryReport, variant: VariantFlips) -> str:
    """How A and B differ, and where it begins."""
    share = variant.mean("flipped_share")
    if not share:
        return "A and B choose the same experts for every token."
    first, worst = variant.rows[0], variant.worst
    text = f"A and B choose differently in {share_text(share)} of (token, layer) pairs"
    if variant.any_share is not None:
        text += f"; {share_text(variant.any_share)} of the tokens differ somewhere"
    where = next(row for row in variant.rows if row["flipped_share"])
    begins = report.summary.places([where["router"]])
    return (
        f"{text}. It begins in {begins} ({share_text(where['flipped_share'])}), the first layer "
        f"{'itself' if where is first else 'being equal'}; most in "
        f"{report.summary.places([worst['router']])} ({share_text(worst['flipped_share'])}). "
        f"{share_text(variant.mean('weight_moved_mean'))} of the routing weight differs."
    )


def _replaced(report: BoundaryReport, variant: VariantFlips) -> str:
    """What the routers of another checkpoint choose otherwise."""
    share, against = variant.mean("flipped_share"), report.summary.run.get("checkpoint_b")
    if not share and against:
        others = against["num_compared"] - len(against["equal"])
        why = (
            f"though {others} of {against['num_compared']} routers are others"
            if others
            else "because its routers are the same"
        )
        return f"C chooses the same experts as A for every token, {why}."
    text = f"The routers of C choose differently from those of A in {share_text(share)} of "
    text += "(token, layer) pairs"
    if variant.any_share is not None:
        text += f"; {share_text(variant.any_share)} of the tokens differ somewhere"
    worst = variant.worst
    return (
        f"{text}. Most in {report.summary.places([worst['router']])} "
        f"({share_text(worst['flipped_share'])}). {share_text(variant.mean('weight_moved_mean'))} "
        "of the routing weight differs."
    )


#: The sentence on a side, by its variant.
_SIDE_VERDICTS: Mapping[str, Callable[[BoundaryReport, VariantFlips], str]] = {
    RUN_B: _difference,
    CHECKPOINT_B: _replaced,
}


def share_text(share: float | None) -> str:
    """Two significant figures below ten per cent; ``0`` is said only where nothing flipped."""
    if share is None:
        return "-"
    if share == 0.0:
        return "0 %"
    if share < 0.00005:
        return "<.01 %"
    return percent(share, ".2f" if share < 0.01 else ".1f" if share < 0.9995 else ".0f")
