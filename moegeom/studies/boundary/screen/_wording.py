"""The sentences of a boundary report; the screen and Markdown show the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from moegeom.core.text import number_of
from moegeom.core.variant_names import SIDES
from moegeom.studies.boundary.screen._exposure import Exposure, VariantExposure
from moegeom.studies.boundary.screen._shares import certain, percent
from moegeom.studies.boundary.screen._sides import SIDE_VERDICTS

#: Pairs of experts that are named, and layers.
_NAMED = 3


def verdict(exposure: Exposure) -> str:
    """The sentence that is read first."""
    sides = [variant for variant in exposure.variants if variant.name in SIDES]
    if sides:
        return " ".join(SIDE_VERDICTS[variant.name](exposure, variant) for variant in sides)
    most = max(exposure.variants, key=lambda variant: variant.mean("switched_share") or 0.0)
    share = most.mean("switched_share")
    if not share:
        return "No arithmetic asked for switches any of these tokens."
    worst = most.worst
    place = exposure.summary.places([worst["router"]])
    said = (
        f"{most.name} switches most: {percent(share)} of the choices ({place}: "
        f"{percent(worst['switched_share'])})"
    )
    if most.any_share is not None:
        said += f", {percent(most.any_share)} of the tokens at some layer"
    return f"{said}; {percent(most.mean('weight_moved_mean'))} of the routing weight moves."


def distances(exposure: Exposure) -> list[str]:
    """How near the tokens are to another choice."""
    said = []
    rms = exposure.share_column("boundary_distance_rms_p50")
    if rms:
        router, least = min(rms, key=lambda pair: pair[1])
        said.append(
            f"Half of the tokens are within{_bound(exposure)} {_median(rms):.3g} of another "
            f"choice, in units of the input's rms (nearest {exposure.summary.places([router])}: "
            f"{least:.3g})."
        )
        said += _ties(exposure)
    likely = exposure.share_column("stable_share_input_rounding_1e6")
    worst = exposure.share_column("stable_share_input_rounding_worst")
    if likely and worst:
        said.append(
            f"Rounding the input to bfloat16 keeps {certain(_median(likely))} of them with "
            f"probability 1 - 1e-6, {certain(_median(worst))} in the worst case."
        )
    return said


def _ties(exposure: Exposure) -> list[str]:
    """How near they are to where walls meet; nothing where that is not known, or there is none."""
    ends = [exposure.share_column(f"order_{order}_distance_rms_p50_upper") for order in (2, 3)]
    if not all(ends) or any(math.isinf(_median(end)) for end in ends):
        return []
    three, four = map(_median, ends)
    sample = _median(exposure.share_column("num_order_distance_tokens"))
    said = (
        f"Half of a sample ({sample:.0f} tokens of a router) are within {three:.3g} of a tie of "
        f"three experts at the border, and within {four:.3g} of a tie of four."
    )
    return [said]


def _bound(exposure: Exposure) -> str:
    """What is to be added where some of the distances are lower bounds."""
    exact = exposure.share_column("distance_exact_share")
    return " at least" if any(share < 1.0 for _, share in exact) else ""


def noise_lines(exposure: Exposure) -> list[str]:
    """What noise on the inputs does; nothing where none was asked for."""
    simulated = exposure.share_column("noise_simulated_share")
    if not simulated:
        return []
    worst = max(simulated, key=lambda pair: pair[1])
    said = (
        f"{_noise_size(exposure)} switches {percent(_mean(simulated))} of the choices in a "
        f"simulation ({exposure.summary.places([worst[0]])}: {percent(worst[1])})"
    )
    means = [
        _mean(exposure.share_column(f"noise_switched_share{end}"))
        for end in ("", "_lower", "_upper")
    ]
    if means[0] is not None:
        expected, least, most = means
        said += (
            f"; {percent(expected)} by the noise model, {percent(least)} to {percent(most)} by its "
            "bounds"
        )
    lines = [f"{said}."]
    early, late = (exposure.share_column(f"exit_time_p50_{end}") for end in ("lower", "upper"))
    if early and late:
        lines.append(
            f"An input that drifts with this noise per unit of time leaves its cell within "
            f"{_median(early):.3g} to {_median(late):.3g} of it, for half of the paths of half of "
            "the tokens."
        )
    return lines


def _noise_size(exposure: Exposure) -> str:
    noise = exposure.summary.run.get("noise")
    if not noise:
        return "Noise of a size that the results do not say"
    if "scale" in noise:
        return f"Noise of {100.0 * noise['scale']:.3g} % of the input's rms"
    relative, kappa, shared = (
        [found[field] for found in noise.values()]
        for field in ("relative", "kappa", "systematic_share")
    )
    return (
        f"Noise as between the two recordings ({100 * min(relative):.3g} to "
        f"{100 * max(relative):.3g} % of the input's rms, {min(kappa):.2g} to {max(kappa):.2g} "
        f"roundings to bfloat16; up to {percent(max(shared))} of its square is common to all "
        "tokens)"
    )


def worst_layers(exposure: Exposure, variant: VariantExposure) -> str:
    """The layers that a variant switches most, beside a random router's."""
    ranked = sorted(variant.rows, key=lambda row: -row["switched_share"])[:_NAMED]
    return ", ".join(
        f"{exposure.summary.places([row['router']])} {percent(row['switched_share'])}"
        for row in ranked
        if row["switched_share"] or row is ranked[0]
    )


def traders(exposure: Exposure, variant: VariantExposure) -> str:
    """The pairs of experts that trade most of the switched tokens of their layer."""
    return ", ".join(
        f"{exposure.summary.places([pair['router']])} {pair['first']}<->{pair['second']} "
        f"{percent(pair['share'])}"
        for pair in variant.trades[:_NAMED]
    )


def remarks(exposure: Exposure) -> list[str]:
    """What has to be known about some of the figures."""
    said = []
    tied = [variant for variant in exposure.variants if variant.is_tied]
    for variant in tied:
        least, most = (variant.mean(f"switched_share_{end}") for end in ("least", "most"))
        anyhow = (
            "the engine breaks them anyhow"
            if variant.facts.get("ties") == "undetermined"
            else "counted as the lowest expert wins"
        )
        said.append(
            f"{variant.name}: exact ties leave {percent(least)} to {percent(most)}; {anyhow}."
        )
    for variant in exposure.variants:
        wrong = sum(row["num_disproved"] or 0 for row in variant.rows)
        if wrong:
            said.append(
                f"{variant.name}: "
                f"{number_of(wrong, 'token switched that was', 'tokens switched that were')} "
                "proved to stay: a mistake of moegeom, please report it."
            )
    copied = [
        v
        for v in exposure.variants
        if v.name not in SIDES and not str(v.facts.get("engine")).startswith("none")
    ]
    said += [
        f"{variant.name}: emulated after {variant.facts['engine']} ({variant.facts['version']}); a "
        "recording of that engine would decide."
        for variant in copied
    ]
    return said


def limits() -> Sequence[str]:
    """What these figures do not say."""
    exposed = (
        "A switched expert is not a wrong answer: this is exposure, for these tokens and inputs. "
        "An arithmetic changes the routers only; inputs that come out otherwise are not looked at."
    )
    kept = (
        "Kept for certain: proved for these inputs, in any order of summation that the arithmetic "
        "allows. Random: a router of the same shape and row lengths, on a sample of these tokens."
    )
    return exposed, kept


def _mean(pairs: Sequence[tuple[str, float]]) -> float | None:
    return statistics.fmean(value for _, value in pairs) if pairs else None


def _median(pairs: Sequence[tuple[str, float]]) -> float:
    return statistics.median(value for _, value in pairs)
