"""The boundary report as a document: what was read, the verdict, the variants, their flips."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moegeom.core.row_keys import RUN_B, SIDES
from moegeom.core.text import number_of, percent, percent_of_all, small_percent
from moegeom.document.drawing import figures_of
from moegeom.document.excerpts import in_part
from moegeom.document.header import size
from moegeom.document.model import Block, Command, Document, Excerpt, Fact, Gallery, Headline, View
from moegeom.document.rule_words import rule_facts
from moegeom.document.study import Column, study_page, table_of
from moegeom.studies.boundary.record import BoundaryReport, VariantFlips
from moegeom.tokens.recording.harm import LATER

#: Pairs of experts that are named, and layers.
_NAMED = 3

#: Figures of results that are about boundaries.
_FIGURES = ("flips", "near_boundary")
#: Variants that a screen shows where it has no room for more.
_LEAST_ROWS = 4

#: What a comparison on the same inputs leaves out.
_OWN_INPUTS = "Its own hidden states would differ, behind the first MoE layer at the latest."

#: Fewer flips tell nothing of where flips lie. Heuristic.
_FEWEST_FLIPS = 20

#: What it means that at least this share of the flips is among the tokens with least margin.
_NEARNESS = (
    (0.8, "near-ties"),
    (0.5, "near-ties for the most part"),
    (0.0, "not explained by near-ties"),
)


def document(report: BoundaryReport, view: View) -> Document:
    """What ``moegeom boundary-report`` says; a page has details of every variant."""
    flipped = [variant for variant in report.variants if variant.mean("flipped_share")]
    details = [line for variant in _shown(flipped, view) for line in _details(report, variant)]
    whole = [line for variant in flipped for line in _details(report, variant)]
    return study_page(
        report,
        "boundary-report",
        view,
        [_table(report, view)],
        [Gallery(lambda: figures_of(report.results, _FIGURES))],
        [*_lines("jump", _jumps(report)), *_lines("harm", _harm(report))],
        [
            *(Fact("noise", text, "dim") for text in _noise(report)),
            in_part(details, "line", view.detail, page=whole),
        ],
        [in_part(_lines("near", _distances(report)), "line", view.detail, least=1)],
        labels=("routers", "tokens", "trust"),
        verdict=_verdict(report),
        facts=(*_other(report), *_against(report)),
        notes=(*_remarks(report), *_limits(report)),
        record=lambda: _record(report),
    )


def _lines(label: str, texts: Sequence[str]) -> list[Block]:
    """Sentences, with the label before the first."""
    return [Fact(label * (not number), text, "plain") for number, text in enumerate(texts)]


def _shown(flipped: Sequence[VariantFlips], view: View) -> Sequence[VariantFlips]:
    """Variants with details on the screen: what A is compared with, or else the worst."""
    if view.detail:
        return flipped
    sides = [variant for variant in flipped if variant.name in SIDES]
    return sides or sorted(flipped, key=lambda variant: -variant.flipped)[:1]


def _other(report: BoundaryReport) -> Iterator[Fact]:
    """Which other run, and how its tokens were matched."""
    other = report.summary.run.get("run_b")
    if not other:
        return
    tokens = report.summary.run["tokens"]["num_tokens"]
    engine = f", {other['engine']}" if other["engine"] else ""
    yield Fact("B", f"{other['name']}{engine}: {number_of(other['num_tokens'], 'token')}")
    matched = f"{other['num_matched']:,} of {tokens:,} tokens"
    yield Fact("aligned", "; ".join([matched, *other["notes"]]) + ".")


def _against(report: BoundaryReport) -> Iterator[Fact]:
    """Which second checkpoint, and what was done to its routers."""
    against = report.summary.run.get("checkpoint_b")
    if not against:
        return
    texts = [f"{against['name']}: its routers on the inputs of A."]
    equal, compared = len(against["equal"]), against["num_compared"]
    if equal < compared:
        texts.append(_OWN_INPUTS)
    if equal:
        which = "All routers" if equal == compared else f"{equal} of {compared} routers"
        texts.append(f"{which} are those of A, bit for bit.")
    if not against["has_same_rule"]:
        texts.append(f"It chooses by its own rule: {against['rule']}.")
    if against["regained"]:
        texts.append(
            f"Another gain stands in front of {report.summary.places(against['regained'])}: rows "
            "are scaled by its gain over that of A."
        )
    if against["unknown_gain"]:
        texts.append(
            f"The gain in front of {report.summary.places(against['unknown_gain'])} is known in "
            "one of the checkpoints only, and taken as equal."
        )
    yield Fact("C", " ".join(texts))


def _verdict(report: BoundaryReport) -> Iterator[Block]:
    yield Fact("VERDICT", _verdict_sentence(report))
    if report.variants:
        most = report.most_flipped
        shares = {
            f"of the choices flip under {most.name}": most.mean("flipped_share"),
            "of the tokens flip at some layer": most.any_share,
            "of the routing weight moves": most.mean("weight_moved_mean"),
        }
        yield Headline([(_share(share), text, "plain") for text, share in shares.items()])
    if typed := report.summary.run.get("next_command"):
        yield Command("next: ", str(typed))


def _distances(report: BoundaryReport) -> list[str]:
    """How near the tokens are to another choice."""
    texts = []
    if distances := report.column("boundary_distance_p50"):
        sizes = {facts["name"]: facts["hidden_size"] for facts in report.summary.run["routers"]}
        rms = {name: value / math.sqrt(sizes[name]) for name, value in distances.items()}
        nearest = min(rms, key=rms.__getitem__)
        exact = report.column("distance_exact_share").values()
        bound = " at least" if any(share < 1.0 for share in exact) else ""
        texts.append(
            f"Half of the tokens are within{bound} {_median(rms):.3g} of another choice, in units "
            f"of the input's rms (nearest {report.place(nearest)}: {rms[nearest]:.3g})."
        )
    likely = report.column("stable_share_input_rounding_1e6")
    worst = report.column("stable_share_input_rounding_worst")
    if likely and worst:
        # what the worst rounding keeps is kept with any probability, whichever bound says so
        most = {name: max(share, worst.get(name, 0.0)) for name, share in likely.items()}
        texts.append(
            f"An error the size of bfloat16 rounding keeps the choice of "
            f"{_certain(_median(worst))} of the tokens in the worst case, of "
            f"{_certain(_median(most))} with probability 1 - 1e-6."
        )
    return texts


def _table(report: BoundaryReport, view: View) -> Excerpt:
    """A row for each variant, or for those that flip most; a sentence where that is too wide."""
    ranked = sorted(report.variants, key=lambda v: (v.name not in SIDES, -v.flipped))
    least = len(ranked) if view.detail else min(len(ranked), _LEAST_ROWS)
    columns, measured = _columns(report), {variant.name for variant in report.variants}
    recorded = [VariantFlips(n, {}, ()) for n in report.recorded if n not in measured]

    def rows(most: int) -> list[Block]:
        """In the order in which they were requested."""
        names, rest = {variant.name for variant in ranked[:most]}, len(ranked) - most
        flipping = [v for v in report.variants if v.name in names]
        table = table_of(columns[:-1], [*flipping, *recorded])
        paragraphs = [(f"  {row[0]:<12}  ", _paragraph(row)) for row in table.rows]
        more = f"and {rest} more that flip less: --detail" if rest else ""
        return [dataclasses.replace(table, paragraphs=paragraphs, rest=more)]

    screen, *shorter = map(rows, range(len(ranked), least - 1, -1))
    whole = table_of(columns, [*report.variants, *recorded])
    return Excerpt(screen, [whole], shorter=shorter)


def _columns(report: BoundaryReport) -> Sequence[Column]:
    """Figures of a variant; the last column is for pages alone."""

    def worst(one: VariantFlips) -> str:
        if not one.rows:
            return "-"
        router, share = (one.worst[name] for name in ("router", "flipped_share"))
        place = report.summary.place(router)
        return f"{_share(share)}  {'L' if place.isdigit() else ''}{place}" if share else "-"

    def of_arithmetic(column: str, text: Callable[[float | None], str], one: VariantFlips) -> str:
        return "-" if one.name in SIDES else text(one.mean(column))

    return (
        ("arithmetic", "", 0, lambda one: f"  {one.name}"),
        ("choices flipped", "mean", 0, lambda one: _share(one.mean("flipped_share"))),
        ("", "random", 0, lambda one: _share(one.random and one.random.mean("flipped_share"))),
        ("", "worst layer", 0, worst),
        ("tokens with", "any flip", 0, lambda one: _share(one.any_share)),
        ("weight", "moved", 0, lambda one: _share(one.mean("weight_moved_mean"))),
        ("provably", "unchanged", 0, partial(of_arithmetic, "proved_share", _certain)),
        ("predicted", "", 0, partial(of_arithmetic, "predicted_flipped_share", _share)),
    )


def _paragraph(cells: Sequence[str]) -> str:
    """The figures of a row in a sentence."""
    _, mean, random, worst, some, moved, stable = cells
    if mean == "-":
        return "not judged."
    return (
        f"{mean} of the choices flip (random router {random}, worst {worst}), {some} of the "
        f"tokens somewhere; {moved} of the weight moves; {stable} are provably unchanged."
    )


def _noise(report: BoundaryReport) -> list[str]:
    """What noise on the inputs does; nothing where none was asked for."""
    simulated = report.column("noise_simulated_share")
    if not simulated:
        return []
    worst = max(simulated, key=simulated.__getitem__)
    text = (
        f"{_noise_size(report)} flips {_share(report.mean('noise_simulated_share'))} of the "
        f"choices in a simulation ({report.place(worst)}: {_share(simulated[worst])})"
    )
    expected, least, most = (
        report.mean(f"noise_flipped_share{end}") for end in ("", "_lower", "_upper")
    )
    if expected is not None:
        text += (
            f"; {_share(expected)} by the noise model, {_share(least)} to "
            f"{_share(most)} by its bounds"
        )
    lines = [f"{text}."]
    early, late = (report.column(f"exit_time_p50_{end}") for end in ("lower", "upper"))
    if early and late:
        lines.append(
            "Drifting by this noise per unit of time, half of the tokens change experts with "
            f"probability 1/2 by time {_median(early):.3g} to {_median(late):.3g}."
        )
    return lines


def _jumps(report: BoundaryReport) -> list[str]:
    """What crossing a boundary does to the output; nothing where no experts were read."""
    over = report.column("jump_over_output_p50")
    if not over:
        return []
    most = max(over, key=over.__getitem__)
    text = (
        f"Crossing the nearest boundary changes the output of the experts by "
        f"{_share(_median(over))} of its length for the median token"
    )
    if len(over) > 1:
        text += f" (most in {report.place(most)}: {_share(over[most])})"
    expected = report.mean("expected_jump_over_output")
    if expected is not None:
        text += (
            f"; by {small_percent(expected)} on average, times the probability that bfloat16 "
            "rounding crosses it"
        )
    return [f"{text}.", *filter(None, map(_cost, report.variants)), _jumps_of(report)]


def _harm(report: BoundaryReport) -> list[str]:
    """What flips cost that were made in the running model; nothing where none was."""
    kl, later = report.column("harm_kl"), report.column("harm_kl_later")
    if not kl:
        return []
    most, beside = max(kl, key=kl.__getitem__), report.column("harm_kl_beside")
    text = (
        f"A flip made in the model costs its next token {_median(kl):.2g} nats of KL, and the "
        f"{LATER} behind it {_median(later):.2g} together"
    )
    if len(kl) > 1:
        text += f", in the median layer; most in {report.place(most)}: {kl[most]:.2g}"
    if beside:
        text += f". The same step without a flip costs {_median(beside):.2g}"
    costs = {
        variant.name: sum(
            row["flipped_share"] * (kl[name] + later[name])
            for row in variant.rows
            if (name := row["router"]) in kl
        )
        for variant in report.variants
    }
    texts = [f"{text}."]
    if any(costs.values()):
        listed = ", ".join(f"{name} {nats:.2g}" for name, nats in costs.items() if nats)
        texts.append(f"If flips of all layers add up, they cost in nats a token: {listed}.")
    return texts


def _cost(variant: VariantFlips) -> str:
    """What the flips of a variant cost; empty where none has a known jump."""
    over, cost = (
        variant.mean(f"flip_{of}") for of in ("jump_over_output_mean", "cost_over_output")
    )
    if over is None:
        return ""
    points, flips = (
        sum(row.get(name) or 0 for row in variant.rows)
        for name in ("num_flip_jumps", "num_flip_jump_tokens")
    )
    return (
        f"{variant.name}: a flip costs {_share(over)} of the output ({points:,} of "
        f"{number_of(flips, 'flip')} with a known boundary point), {small_percent(cost)} a token."
    )


def _jumps_of(report: BoundaryReport) -> str:
    """How many tokens and experts jumps are of, and what is left out."""
    tokens = report.column("num_jump_tokens")
    points = sum(tokens[name] * share for name, share in report.column("jump_known_share").items())
    total = sum(tokens.values())
    parts = report.summary.run.get("parts", {}).values()
    read, size_read = (
        sum(part.get(name, 0) for part in parts) for name in ("experts_read", "expert_bytes")
    )
    experts = f"{number_of(read, 'expert')} read ({size(size_read)})" if read else "experts read"
    text = f"Of a sample of {number_of(int(total), 'token')} of all routers; {experts}."
    if points < total:
        text += (
            f" {_share(1.0 - points / total)} of them are left out: their nearest boundary "
            "point is not known."
        )
    return text


def _noise_size(report: BoundaryReport) -> str:
    noise = report.summary.run.get("noise")
    if not noise:
        return "Noise of a size that the results do not say"
    if "scale" in noise:
        return f"Noise of {percent(noise['scale'], '.3g')} of the input's rms"
    relative, kappa, shared = (
        [one[field] for one in noise.values()]
        for field in ("relative", "kappa", "systematic_share")
    )
    lost = max(one.get("num_non_finite") or 0 for one in noise.values())
    left_out = f"; {number_of(lost, 'token')} left out, not finite" if lost else ""
    return (
        f"Noise as between the two recordings ({100 * min(relative):.3g} to "
        f"{percent(max(relative), '.3g')} of the input's rms, {min(kappa):.2g} to {max(kappa):.2g} "
        f"roundings to bfloat16; up to {_share(max(shared))} of its square is common to all "
        f"tokens{left_out})"
    )


def _details(report: BoundaryReport, variant: VariantFlips) -> Iterator[Fact]:
    """Where a variant flips, whether near-ties explain it, and what it does to experts."""
    ranked = sorted(variant.rows, key=lambda row: -row["flipped_share"])[:_NAMED]
    worst = [
        f"{report.place(row['router'])} {_share(row['flipped_share'])}"
        for row in ranked
        if row["flipped_share"] or row is ranked[0]
    ]
    pairs = [
        f"{report.place(pair['router'])} {pair['first']}<->{pair['second']} {_share(pair['share'])}"
        for pair in variant.swaps[:_NAMED]
    ]
    details = {
        "worst": ", ".join(worst),
        "margins": near_ties(variant) if variant.name in SIDES else "",
        "load": _load_shift(report, variant),
        "swaps": ", ".join(pairs),
    }
    for label, text in details.items():
        if text:
            yield Fact(label, f"{variant.name}: {text}", "dim")


def near_ties(variant: VariantFlips) -> str:
    """Whether near-ties explain what flips; empty where nothing flips or no margin is known.

    A tenth of the tokens holds all of the flips only where no more than a tenth flips.
    """
    if variant.near is None:
        return ""
    flips, share, most = variant.near
    if flips < _FEWEST_FLIPS:
        few = number_of(flips, "flip is", "flips are")
        return f"{few} too few to tell whether near-ties explain them"
    word = next(word for least, word in _NEARNESS if share >= least)
    only = "only " if share < _NEARNESS[1][0] else ""
    limit = f" (10 % by chance, {percent(most, '.0f')} at most)" if most < 1.0 else ""
    return (
        f"{only}{percent(share, '.0f')} of the flips are among the 10 % of tokens with the least "
        f"margin{limit}: {word}"
    )


def _load_shift(report: BoundaryReport, variant: VariantFlips) -> str:
    """The expert whose load changes most."""
    rows = [row for row in variant.rows if row.get("load_shift_max") is not None]
    if not rows:
        return ""
    most = max(rows, key=lambda row: abs(row["load_shift_max"]))
    return (
        f"{report.place(most['router'])}: expert {most['load_shift_expert']} "
        f"{most['load_shift_max']:+.2g} fair shares"
    )


def _remarks(report: BoundaryReport) -> Iterator[str]:
    """Caveats on single figures, such as exact ties."""
    for name, routers in report.recorded.items():
        yield (
            f"{name}, {report.summary.places(routers)}: not judged, the inputs and rows are of its "
            f"16 bits; what it flips is in A already. {_RECORD}"
        )
    for variant in filter(lambda one: one.is_tied, report.variants):
        least, most = (variant.mean(f"flipped_share_{end}") for end in ("least", "most"))
        counted = f"{_share(variant.mean('flipped_share'))} if ties go to the lower index"
        if variant.facts.get("ties") == "undetermined":
            counted = "the engine breaks ties anyhow"
        rule = f"{_share(least)} to {_share(most)} depending on the tie rule"
        yield f"{variant.name}: {counted}; {rule}."
    for variant in filter(lambda one: one.num_disproved, report.variants):
        flipped = number_of(
            variant.num_disproved, "token flipped that was", "tokens flipped that were"
        )
        yield (f"{variant.name}: {flipped} proved to stay: a mistake of moegeom, please report it.")
    for variant in report.variants:
        engine, version = (variant.facts.get(name) for name in ("engine", "version"))
        if variant.name not in SIDES and not str(engine).startswith("none"):
            yield (
                f"{variant.name}: emulated after {engine} ({version}); a recording of that engine "
                "would decide."
            )


def _limits(report: BoundaryReport) -> Iterator[str]:
    """What these figures do not say."""
    yield (
        "A flip is not by itself a worse output; measured on these tokens and inputs. An "
        "arithmetic changes the routers only: inputs that it changes too are not checked."
    )
    yield (
        "Provably unchanged: for these inputs, in any order of summation that the arithmetic "
        "allows. Random: a router of the same shape and row norms, on a sample of these tokens."
    )
    if report.column("jump_over_output_p50"):
        yield (
            "Jumps are those of one block's routed experts; what later layers make of them is not "
            "looked at."
        )


def _certain(share: float | None) -> str:
    """A share that is proved: rounded down, so that 100 % means all of them."""
    return "-" if share is None else percent_of_all(share)


def _median(column: Mapping[str, float]) -> float:
    return statistics.median(column.values())


def _record(report: BoundaryReport) -> Mapping[str, Any]:
    return {
        "verdict": _verdict_sentence(report),
        "distances": _distances(report),
        "noise": _noise(report),
        "jumps": _jumps(report),
        "harm": _harm(report),
        "remarks": [*_remarks(report)],
        "routers": report.summary.layers,
        "variants": [_variant_record(variant) for variant in report.variants],
        "recorded": report.recorded,
        **rule_facts(report.summary.run),
        "run": report.summary.run,
    }


def _variant_record(variant: VariantFlips) -> dict[str, Any]:
    random = variant.random or VariantFlips("", {}, ())
    layers, of_random = (
        [{name: value for name, value in row.items() if value is not None} for row in of.rows]
        for of in (variant, random)
    )
    return {
        "variant": variant.name,
        "facts": variant.facts,
        "flipped_share": variant.mean("flipped_share"),
        "random_flipped_share": random.mean("flipped_share"),
        "worst_router": variant.worst["router"],
        "any_layer_share": variant.any_share,
        "random_any_layer_share": random.any_share,
        "weight_moved_mean": variant.mean("weight_moved_mean"),
        "flipped_near_share": variant.near and variant.near[1],
        "proved_share": variant.mean("proved_share"),
        "layers": layers,
        "random": of_random,
        "swaps": variant.swaps,
    }


# ------------------------------------------------------------------------------------------ verdict
#: What shows the effect that a recording holds.
_RECORD = "To see it, record in float32: moegeom capture --keep hidden --dtype float32."


def _verdict_sentence(report: BoundaryReport) -> str:
    """The verdict as one sentence."""
    sides = [variant for variant in report.variants if variant.name in SIDES]
    if sides:
        return " ".join(_difference(report, variant) for variant in sides)
    if not report.variants:
        names = " or ".join(report.recorded)
        return f"NOT JUDGED under {names}: A was recorded with that rounding. {_RECORD}"
    most = report.most_flipped
    share = most.mean("flipped_share")
    if not share:
        return _nothing_flips(report)
    place, worst = report.place(most.worst["router"]), _share(most.worst["flipped_share"])
    text = f"{most.name} flips most: {_share(share)} of the choices ({place}: {worst})"
    if most.any_share is not None:
        text += f", {_share(most.any_share)} of the tokens at some layer"
    return f"{text}; {_share(most.mean('weight_moved_mean'))} of the routing weight moves."


def _nothing_flips(report: BoundaryReport) -> str:
    """The verdict where nothing flips, with the share that flips if exact ties break otherwise."""
    tied = [(v.mean("flipped_share_most") or 0.0, v.name) for v in report.variants if v.is_tied]
    if not tied:
        return "No arithmetic asked for flips any of these tokens."
    most, name = max(tied)
    return (
        "No arithmetic asked for flips a token unless an exact tie breaks otherwise; if it does, "
        f"{name} flips up to {_share(most)} of the choices. Ties are counted as the lowest "
        "expert wins."
    )


def _difference(report: BoundaryReport, variant: VariantFlips) -> str:
    """How A and B differ and where it begins, or what the routers of C choose otherwise."""

    def at(row: Mapping[str, Any]) -> str:
        return f"{report.place(row['router'])} ({_share(row['flipped_share'])})"

    share, is_run_b = variant.mean("flipped_share"), variant.name == RUN_B
    against = report.summary.run.get("checkpoint_b")
    if not share and is_run_b:
        return "A and B choose the same experts for every token."
    if not share and against:
        others, compared = against["num_compared"] - len(against["equal"]), against["num_compared"]
        why = "because its routers are the same"
        if others:
            why = f"though {others} of {compared} routers are others"
        return f"C chooses the same experts as A for every token, {why}."
    who = (
        "A and B choose differently"
        if is_run_b
        else ("The routers of C choose differently from those of A")
    )
    somewhere, most = "", "Most"
    if variant.any_share is not None:
        somewhere = f"; {_share(variant.any_share)} of the tokens differ somewhere"
    if is_run_b:
        where = next(row for row in variant.rows if row["flipped_share"])
        first = "itself" if where is variant.rows[0] else "being equal"
        most = f"It begins in {at(where)}, the first layer {first}; most"
    moved = f"{_share(variant.mean('weight_moved_mean'))} of the routing weight differs."
    pairs = f"{_share(share)} of (token, layer) pairs{somewhere}"
    return f"{who} in {pairs}. {most} in {at(variant.worst)}. {moved}"


def _share(share: float | None) -> str:
    """Two significant figures below ten per cent; ``0`` is said only where nothing flipped."""
    if share is None:
        return "-"
    if share == 0.0:
        return "0 %"
    if share < 0.00005:
        return "<.01 %"
    return percent(share, ".2f" if share < 0.01 else ".1f" if share < 0.9995 else ".0f")
