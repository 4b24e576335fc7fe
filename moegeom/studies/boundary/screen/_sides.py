"""The sentences on another run and on a second checkpoint: B and C beside A."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moegeom.core.text import number_of
from moegeom.core.variant_names import AGAINST, OTHER
from moegeom.studies.boundary.screen._exposure import Exposure, VariantExposure
from moegeom.studies.boundary.screen._shares import percent


def side_lines(exposure: Exposure) -> list[tuple[str, str]]:
    """With what the choices are compared: another run, another checkpoint; label and text."""
    return [*_other_lines(exposure), *_against_lines(exposure)]


def _other_lines(exposure: Exposure) -> list[tuple[str, str]]:
    """Which run, and how its tokens were matched."""
    other = exposure.summary.run.get("other")
    if not other:
        return []
    tokens = exposure.summary.run["tokens"]["num_tokens"]
    engine = f", {other['engine']}" if other["engine"] else ""
    lines = [("B", f"{other['name']}{engine}: {number_of(other['num_tokens'], 'token')}")]
    matched = f"{other['num_matched']:,} of {tokens:,} tokens"
    return [*lines, ("aligned", "; ".join([matched, *other["notes"]]) + ".")]


#: What a comparison on the same inputs leaves out.
_OWN_INPUTS = "Its own hidden states would differ, behind the first MoE layer at the latest."


def _against_lines(exposure: Exposure) -> list[tuple[str, str]]:
    """Which checkpoint, and what was done to its routers."""
    found = exposure.summary.run.get("against")
    if not found:
        return []
    said = [f"{found['name']}: its routers on the inputs of A."]
    equal, compared = len(found["equal"]), found["num_compared"]
    if equal < compared:
        said.append(_OWN_INPUTS)
    if equal:
        which = "All routers" if equal == compared else f"{equal} of {compared} routers"
        said.append(f"{which} are those of A, bit for bit.")
    if not found["has_same_rule"]:
        said.append(f"It chooses by its own rule: {found['rule']}.")
    if found["regained"]:
        said.append(
            f"Another gain stands in front of {exposure.summary.places(found['regained'])}: rows "
            "are scaled by its gain over that of A."
        )
    if found["unknown_gain"]:
        said.append(
            f"The gain in front of {exposure.summary.places(found['unknown_gain'])} is known in "
            "one of the checkpoints only, and taken as equal."
        )
    return [("C", " ".join(said))]


def _difference(exposure: Exposure, variant: VariantExposure) -> str:
    """How A and B differ, and where it begins."""
    share = variant.mean("switched_share")
    if not share:
        return "A and B choose the same experts for every token."
    first, worst = variant.rows[0], variant.worst
    said = f"A and B choose differently in {percent(share)} of layer-tokens"
    if variant.any_share is not None:
        said += f"; {percent(variant.any_share)} of the tokens differ somewhere"
    where = next(row for row in variant.rows if row["switched_share"])
    begins = exposure.summary.places([where["router"]])
    return (
        f"{said}. It begins in {begins} ({percent(where['switched_share'])}), the first layer "
        f"{'itself' if where is first else 'being equal'}; most in "
        f"{exposure.summary.places([worst['router']])} ({percent(worst['switched_share'])}). "
        f"{percent(variant.mean('weight_moved_mean'))} of the routing weight differs."
    )


def _replaced(exposure: Exposure, variant: VariantExposure) -> str:
    """What the routers of another checkpoint choose otherwise."""
    share, found = variant.mean("switched_share"), exposure.summary.run.get("against")
    if not share and found:
        others = found["num_compared"] - len(found["equal"])
        why = (
            f"though {others} of {found['num_compared']} routers are others"
            if others
            else "because its routers are the same"
        )
        return f"C chooses the same experts as A for every token, {why}."
    said = f"The routers of C choose differently from those of A in {percent(share)} of "
    said += "layer-tokens"
    if variant.any_share is not None:
        said += f"; {percent(variant.any_share)} of the tokens differ somewhere"
    worst = variant.worst
    return (
        f"{said}. Most in {exposure.summary.places([worst['router']])} "
        f"({percent(worst['switched_share'])}). {percent(variant.mean('weight_moved_mean'))} of "
        "the routing weight differs."
    )


#: The sentence on a side, by its variant.
SIDE_VERDICTS: Mapping[str, Callable[[Exposure, VariantExposure], str]] = {
    OTHER: _difference,
    AGAINST: _replaced,
}

#: What it means that at least this share of the switches is among the tokens with least margin.
_NEARNESS = (
    (0.8, "near-ties"),
    (0.5, "near-ties for the most part"),
    (0.0, "not explained by near-ties"),
)


def near_line(variant: VariantExposure) -> str:
    """Whether near-ties explain what switches; empty where nothing switches or no margin is known.

    A tenth of the tokens holds all of the switches only where no more than a tenth switches.
    """
    share, most = variant.near_share, variant.largest_near_share
    if share is None or most is None:
        return ""
    word = next(word for least, word in _NEARNESS if share >= least)
    only = "only " if share < _NEARNESS[1][0] else ""
    limit = f" (10 % by chance, {100.0 * most:.0f} % at most)" if most < 1.0 else ""
    return (
        f"{only}{100.0 * share:.0f} % of the switches are among the 10 % of tokens with the least "
        f"margin{limit}: {word}"
    )


def next_line(exposure: Exposure) -> str:
    """What to type to learn why two runs differ; empty where there are no two."""
    return str(exposure.summary.run.get("next_command") or "")


def shift_line(exposure: Exposure, variant: VariantExposure) -> str:
    """The expert whose load changes most."""
    known = [row for row in variant.rows if row.get("load_shift_max") is not None]
    if not known:
        return ""
    most = max(known, key=lambda row: abs(row["load_shift_max"]))
    return (
        f"{exposure.summary.places([most['router']])}: expert {most['load_shift_expert']} "
        f"{most['load_shift_max']:+.2g} fair shares"
    )
