"""An explanation as a document: both sides, the verdict, the faults, the layers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import figure_text, number_of, percent, percent_of_all, small_percent
from moegeom.document.chart import Axis, Bars, Chart, Panel, Polyline
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, size, tokens_line
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Headline,
    Look,
    Note,
    Table,
    View,
)
from moegeom.document.place import place, span
from moegeom.document.rule_words import rule_facts
from moegeom.document.summary import Summary
from moegeom.studies.explain.record import Explanation, LayerEvidence

#: Hypotheses that a screen shows beside nothing changed.
_SHOWN = 5

#: Layers that a screen shows, evenly spread.
_LAYERS = 8

#: Hypotheses, and layers, that a screen shows where it has no room for more.
_LEAST = 2

#: Verdicts that are no fault: green only where none is there.
_LOOKS: Mapping[str, Look] = {
    **dict.fromkeys(("no disagreement", "arithmetic noise only"), "good"),
    "inconclusive": "warning",
}

#: The last column is for pages alone.
_LAYER_HEADS = (
    ("", "equal", "agreed", "of these", "noise", "noise on", "beyond", "noise in roundings"),
    ("layer", "sets", "before", "flip", "makes", "input", "noise", "to bfloat16"),
)


def document(report: Explanation, view: View) -> Document:
    """What ``moegeom explain`` says; where nothing disagrees, a screen asks nothing further."""
    return Document(
        "explain",
        report.run["checkpoint"]["name"],
        [
            [*_verdict(report)],
            [
                *header(report.summary, "routers", "rule"),
                Fact("A", tokens_line(report.summary)),
                *_sides(report),
            ],
            [_cut(report, _faults, _SHOWN, _faults(report, None), view)],
            [_cut(report, _layers, _LAYERS, _layers(report, None, is_page=True), view)],
            _costs(report),
            [Gallery(lambda: [*_chart_of_faults(report), *_chart_of_layers(report)])],
            _ending(report, view),
        ],
        lambda: _record(report),
    )


def _cut(
    report: Explanation,
    tell: Callable[[Explanation, int | None], list[Block]],
    most: int,
    page: list[Block],
    view: View,
) -> Excerpt:
    """The blocks of ``tell`` for ``most`` entries or fewer; for all with ``detail``."""
    if report.verdict.cause == "no disagreement":
        return Excerpt([], page)
    first, *shorter = [None] if view.detail else range(most, _LEAST - 1, -1)
    return Excerpt(tell(report, first), page, shorter=[tell(report, number) for number in shorter])


def _sides(report: Explanation) -> Iterator[Fact]:
    """Run B, how its tokens were matched, and checkpoint C."""
    other = report.other
    engine = f", {other['engine']}" if other["engine"] else ""
    stage = other["stage"].replace("_", " ")
    elsewhere = ", RECORDED FROM ANOTHER CHECKPOINT" if report.is_of_another else ""
    description = f"{other['name']}{engine}: {stage} of {other['num_tokens']:,} tokens{elsewhere}"
    yield Fact("B", description)
    matched = f"{report.num_matched:,} of {report.run['tokens']['num_tokens']:,} tokens"
    if lost := report.num_non_finite:
        matched += f", {lost:,} of them not finite and left out"
    if report.num_examined + lost < report.num_matched:
        matched += f", the first {report.num_examined:,} examined"
    yield Fact("aligned", "; ".join([matched, *other["notes"]]) + ".")
    if report.against:
        yield Fact("C", f"{report.against}: what B may have loaded instead")


def _verdict(report: Explanation) -> Iterator[Block]:
    """The verdict as one sentence, with the number of things that were not checked."""
    verdict, look = report.verdict, _LOOKS.get(report.verdict.cause, "error")
    text = f"{verdict.cause}: {verdict.meaning}"
    if verdict.detail:
        text += f" {verdict.detail[:1].upper()}{verdict.detail[1:]}"
    unseen = number_of(len(report.not_looked_at), "thing")
    yield Fact("VERDICT", f"{text} Not checked: {unseen}, below.", look)
    if report.remedy:
        yield Fact("next", report.remedy)
    if report.layers:
        apart = [layer for layer in report.layers if layer.agreement < 1.0]
        worst = min(report.layers, key=lambda layer: layer.agreement)
        where = f", layer {report.summary.place(worst.router)}" if apart else ""
        yield Headline(
            [
                (percent(1.0 - report.agreement), "of the expert sets differ", "plain"),
                (percent(1.0 - worst.agreement), f"of them where most do{where}", "plain"),
                (
                    f"{len(apart)} of {len(report.layers)}",
                    "layers with a set that differs",
                    "plain",
                ),
            ]
        )


def _faults(report: Explanation, most: int | None) -> list[Block]:
    """The bits that each fault saves on its scope, and the share of B's choices it reproduces.

    Not those that save nothing, unless ``most`` is None.
    """
    if not report.num_tried:
        return []
    summary, named = report.summary, report.verdict.faults
    worth = [fault for fault in report.faults if fault.bits > 0.0 or fault.name in named]
    faults = report.faults if most is None else worth[:most]
    first = next((layer for layer in report.layers if layer.agreement < 1.0), report.layers[0])
    place, equal = summary.place(first.router), percent_of_all(first.reproduced)
    rows = [("   nothing changed", "all", place, equal, "", "0")]
    paragraphs = [("      0", f"nothing changed: {equal} equal in layer {place}")]
    for fault in faults:
        arrow = "->" if fault.name in named else "  "
        where = summary.places(fault.routers)
        gained = percent_of_all(fault.reproduced[fault.routers[0]])
        before = f"from {percent_of_all(fault.before[fault.routers[0]])}"
        bits = f"{fault.bits:,.0f}"
        layers = where.removeprefix("layers ").removeprefix("layer ")
        rows.append((f"{arrow} {fault.text}", fault.scope or "all", layers, gained, before, bits))
        tokens = f"in {fault.scope}; " if fault.scope else ""
        text = f"{fault.text}; {tokens}{where}: {gained} equal, {before}"
        paragraphs.append((f"   {arrow} {bits}", text))
    looks: list[Look] = ["plain", *("strong" if f.name in named else "plain" for f in faults)]
    blocks: list[Block] = [
        Fact("causes", _whose_inputs(report)),
        Table(
            heads=[("", "tokens", "layers", "equal", "", "bits")],
            rows=rows,
            looks=looks,
            left=(0, 1, 2),
            indent=6,
            paragraphs=paragraphs,
        ),
    ]
    rest = report.num_tried - len(faults)
    hidden = len(report.faults) - len(faults)
    if rest > 0:
        more = ": --detail" if hidden else ""
        blocks.append(Fact("", f"{rest} others save fewer bits, or none{more}", "dim"))
    return blocks


def _whose_inputs(report: Explanation) -> str:
    """Whose inputs were routed again, and how to read the figures."""
    stage = report.run["tokens"]["stage"]
    if any(layer.num_routed for layer in report.layers):
        own = "A's logits" if stage == "logits" else f"{report.inputs_of}'s inputs"
        own = f"{own} routed with one change"
    else:
        own = "A's choices with one change"
    return f"each line: {own}; bits saved in all its layers, sets that equal B's in the first"


def _layers(report: Explanation, most: int | None, is_page: bool = False) -> list[Block]:
    """Agreement of A and B by layer, and the noise that explains the remaining flips."""
    groups = _shown_layers(report, most)
    summary, columns = report.summary, slice(None if is_page else -1)
    rest = len(report.layers) - sum(map(len, groups))
    table = Table(
        heads=[heads[columns] for heads in _LAYER_HEADS],
        rows=[(_name(summary, layers), *_figures(layers[0]))[columns] for layers in groups],
        indent=2,
        rest=f"and {number_of(rest, 'more layer')}: --detail" if rest else "",
    )
    names = report.verdict.faults
    if not names or report.verdict.cause == "inconclusive":
        return [table]
    text = next(fault.text for fault in report.faults if fault.name == names[0])
    left = f"what still differs with {text}, and the noise on the input that flips as many"
    return [Fact("residual", left), table]


def _name(summary: Summary, layers: Sequence[LayerEvidence]) -> str:
    """``3``, or ``3-7 (5)``."""
    first, number = summary.place(layers[0].router), len(layers)
    return first if number == 1 else f"{span([one.router for one in layers], first)} ({number})"


def _shown_layers(report: Explanation, most: int | None) -> list[list[LayerEvidence]]:
    """Layers to show, each alone where ``most`` is None.

    Else those are together that follow each other with the same figures, and of many some are
    evenly spread with those of the verdict.
    """
    if most is None:
        return [[layer] for layer in report.layers]
    runs = [[*alike] for _, alike in itertools.groupby(report.layers, key=_figures)]
    if len(runs) <= most:
        return runs
    step = (len(runs) - 1) / (most - 1)
    numbers = {round(number * step) for number in range(most)}
    numbers |= {
        number
        for number, run in enumerate(runs)
        if report.verdict.router in [layer.router for layer in run]
    }
    return [runs[number] for number in sorted(numbers)]


def _figures(layer: LayerEvidence) -> Sequence[str]:
    """The cells beside the name of a layer."""
    noise, noisy = layer.noise, ("-",) * 5
    if noise is not None:
        noisy = (
            small_percent(noise.observed),
            small_percent(noise.expected),
            small_percent(noise.scale),
            f"{noise.num_beyond:,}",
            f"{noise.roundings:.2g}",
        )
    return percent_of_all(layer.agreement), f"{layer.num_clean:,}", *noisy


def _ending(report: Explanation, view: View) -> list[Block]:
    scored = () if report.log_probs is None else (report.log_probs.sentence,)
    filled = any(layer.empty and layer.empty.is_written for layer in report.layers)
    lacking = ("empty slots of B count as the experts that A chose and the row lacks.",) * filled
    notes = (*_growth(report), *_details(report), *lacking, *scored)
    untold = sorted({layer.reason for layer in report.layers if layer.reason})
    whose = "B's own inputs are routed: every layer speaks for itself."
    if report.inputs_of == "A":
        whose = (
            "A's inputs are routed: from the second router on, B's may differ because earlier "
            "choices did."
        )
    return [
        in_part([Note(text, "plain") for text in notes], "note", view.detail, is_aside=True),
        in_part([Note(f"not tried: {r}.", "plain") for r in untold], "reason", view.detail),
        Note(whose),
        Note(f"Not checked: {'; '.join(report.not_looked_at)}."),
    ]


def _growth(report: Explanation) -> Iterator[str]:
    """How the noise on the inputs grows with depth; nothing where it is not known."""
    scales = [
        (layer.router, layer.noise.scale)
        for layer in report.layers
        if layer.noise and layer.noise.scale > 0.0
    ]
    if len(scales) < 2:
        return
    source = "what still differs" if report.verdict.faults else "the flips"
    (first, early), (last, late) = scales[0], scales[-1]
    yield (
        f"noise on the inputs that explains {source}: {small_percent(early)} of their rms in "
        f"{report.place(first)}, {small_percent(late)} in {report.place(last)} (rounding to "
        "bfloat16: 0.17 %)."
    )


def _details(report: Explanation) -> Iterator[str]:
    """What else was found: examples, renamed experts, weights."""
    for layer in report.layers:
        if layer.noise is not None and layer.noise.num_beyond:
            named = ", ".join(f"document {d} position {p}" for d, p in layer.noise.examples)
            yield (
                f"{report.place(layer.router)}: {layer.noise.num_beyond:,} flips too far from a "
                f"boundary for noise, such as {named}."
            )
            break
    if not report.verdict.faults:  # a fault is not doubted by a numbering that chance makes better
        yield _numbering(report)
    weights = [
        (layer.weights.error, layer.router) for layer in report.layers if layer.weights is not None
    ]
    if weights:
        error, router = max(weights, key=lambda pair: pair[0])
        yield (
            f"routing weights where both chose alike: differ by {error:.1g} at most "
            f"({report.place(router)}), relative rms."
        )


def _numbering(report: Explanation) -> str:
    """Whether B's experts fit A's choices best under another numbering."""
    renamed = [layer for layer in report.layers if layer.num_renamed]
    if not renamed:
        return "numbers of experts: each fits itself best, in all layers."
    most = max(renamed, key=lambda layer: layer.num_renamed)
    where = report.summary.places([layer.router for layer in renamed])
    return (
        f"numbers of experts: in {where} another numbering fits better (most in "
        f"{report.place(most.router)}: {most.num_renamed} experts)."
    )


def _costs(report: Explanation) -> list[Block]:
    """What flips do to the output, where experts were read."""
    costs = [cost for cost in report.costs if cost.over_output is not None]
    summary, texts = report.summary, []
    if costs:
        most = max(costs, key=lambda cost: cost.over_output or 0.0)
        sample, flipped = (
            sum(getattr(cost, name) for cost in costs) for name in ("num_looked", "num_flipped")
        )
        mean = sum(cost.num_looked * (cost.over_output or 0.0) for cost in costs) / sample
        read, of = (sum(getattr(c, n) for c in costs) for n in ("experts_read", "expert_bytes"))
        texts.append(
            f"B's choices change the output of the routed experts (A's experts, inputs and rule) "
            f"by {percent(mean)} of its length on average, most in {report.place(most.router)}: "
            f"{percent(most.over_output or 0.0)}. {sample:,} of {number_of(flipped, 'flip')} "
            f"looked at, {number_of(read, 'expert')} read ({size(of)})."
        )
    if report.nats_a_token:
        most = max(report.harm, key=report.harm.__getitem__)
        texts.append(
            f"Flips that were made in A's model cost up to {report.harm[most]:.2g} nats each "
            f"({report.place(most)}; KL of the next tokens); as many as differ here cost "
            f"{report.nats_a_token:.2g} nats a token, if they add up."
        )
    for reason in dict.fromkeys(cost.reason for cost in report.costs if cost.reason):
        places = summary.places([cost.router for cost in report.costs if cost.reason == reason])
        texts.append(f"{places}: not known: {reason}.")
    return [Fact("cost" * (not number), text, "plain") for number, text in enumerate(texts)]


#: What is recorded of a fault.
_OF_FAULT = "name text cause bits scope share routers reproduced before explained".split()


#: Fields of the evidence that are recorded as they are, in this order.
_COUNTS = ("inputs_of", "num_matched", "num_examined", "num_non_finite")
_EVIDENCE = ("layers", "costs", "harm", "log_probs", "not_looked_at")


def _record(report: Explanation) -> Mapping[str, Any]:
    verdict = report.verdict
    fields = dataclasses.asdict(dataclasses.replace(report, faults=(), run={}, other={}))
    return {
        "verdict": fields["verdict"] | {"meaning": verdict.meaning, "remedy": report.remedy},
        "agreement": report.agreement,
        "any_flipped_share": report.any_share,
        **{name: fields[name] for name in _COUNTS},
        "faults": [{name: getattr(one, name) for name in _OF_FAULT} for one in report.faults],
        **{name: fields[name] for name in _EVIDENCE},
        "checkpoint_b": report.against,
        "run_b": report.other,
        **rule_facts(report.run),
        "run": report.run,
    }


# ------------------------------------------------------------------------------------------ figures
#: Faults that are drawn; shares that are so many times apart stand on an axis of powers of ten.
_DRAWN_FAULTS, _ORDERS = 12, 100.0


def _chart_of_faults(report: Explanation) -> Iterator[Chart]:
    worth = [fault for fault in report.faults if fault.bits > 0.0]
    if not worth:
        return
    faults = worth[:_DRAWN_FAULTS]
    named = [f for f in faults if f.name in report.verdict.faults]
    names = [f"{f.text}{f', {f.scope}' if f.scope else ''}" for f in faults]
    marks = [
        Bars(text, role, [f.bits if (f in named) == is_named else None for f in faults])
        for text, role, is_named in (("named", "other", True), ("not named", "tokens", False))
        if any((f in named) == is_named for f in faults)
    ]
    caption = f"{names[0]} saves {figure_text(faults[0].bits)} bits"
    if len(faults) > 1:
        caption += f", the next, {names[1]}, {figure_text(faults[1].bits)}"
    yield Chart(
        "faults",
        "What explains the differences",
        "How many bits each fault saves when B's choices are told by A's router with that fault, "
        "less the bits that tell the fault. One bit more makes it twice as likely.",
        "Faults that were not tried, and causes outside the router.",
        f"{number_of(report.num_tried, 'fault')} tried; {caption}.",
        [Panel("", Axis("bits saved", low=0.0), Axis("", names=names), marks)],
        [
            ("fault", [f.text for f in report.faults]),
            ("scope", [f.scope or "all" for f in report.faults]),
            ("bits", [f.bits for f in report.faults]),
            ("explained", [f.explained for f in report.faults]),
        ],
    )


def _chart_of_layers(report: Explanation) -> Iterator[Chart]:
    layers = report.layers
    if all(layer.agreement == 1.0 for layer in layers):
        return
    names = [place(layer.router, (each.router for each in layers)) for layer in layers]
    at = list(range(len(layers)))
    differ = [100.0 * (1.0 - layer.agreement) for layer in layers]
    before = [100.0 * (1.0 - layer.num_clean / max(layer.num_tokens, 1)) for layer in layers]
    first = next(i for i in at if differ[i])
    most = max(at, key=differ.__getitem__)
    least = min(value for value in (*differ, *before) if value)
    axis = Axis("tokens that differ, %")
    if max(*differ, *before) >= _ORDERS * least:
        axis = dataclasses.replace(
            axis, scale="log10", low=10.0 ** (math.ceil(math.log10(least)) - 1)
        )
    yield Chart(
        "agreement",
        "Where the two runs part",
        "Tokens whose set of experts differs in each layer, in percent, and those that differed in "
        "a layer before it: what differs behind the first of these layers may only follow.",
        "Why: see the faults. On an axis of powers of ten, layers without a bar do not differ.",
        f"The first layer that differs is {names[first]}, in {figure_text(differ[first])} % of the "
        f"tokens; most do in {names[most]}, {figure_text(differ[most])} %.",
        [
            Panel(
                "",
                Axis("layer", names=names),
                axis,
                [
                    Bars("in this layer", "tokens", [value or None for value in differ]),
                    Polyline("in a layer before", "random", at, before),
                ],
            )
        ],
        [
            ("router", [layer.router for layer in layers]),
            ("agreement", [layer.agreement for layer in layers]),
            ("num_clean", [layer.num_clean for layer in layers]),
            ("num_tokens", [layer.num_tokens for layer in layers]),
        ],
    )
