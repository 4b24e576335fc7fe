"""An explanation as a document: both sides, the verdict, the faults, the layers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import number_of, percent, small_percent
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, size, tokens_line
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Look,
    Note,
    Table,
    View,
)
from moegeom.document.place import span
from moegeom.document.rule_trust import rule_facts
from moegeom.document.summary import Summary
from moegeom.studies.explain.figures import explanation_figures
from moegeom.studies.explain.record import Explanation, LayerEvidence

#: Hypotheses that a screen shows beside nothing changed.
_SHOWN = 5

#: Layers that a screen shows, evenly spread.
_LAYERS = 8

#: Hypotheses, and layers, that a screen shows where it has no room for more.
_LEAST = 2

#: Verdicts that are no fault.
_FINE = ("no disagreement", "arithmetic noise only")

#: The last column is for pages alone.
_LAYER_HEADS = (
    ("", "equal", "agreed", "of these", "noise", "noise on", "beyond", "noise in roundings"),
    ("layer", "sets", "before", "flip", "makes", "input", "noise", "to bfloat16"),
)


def document(found: Explanation, view: View) -> Document:
    """What ``moegeom explain`` says; where nothing disagrees, a screen asks nothing further."""
    return Document(
        "explain",
        found.run["checkpoint"]["name"],
        [
            _verdict(found),
            _header(found),
            [_cut(found, _faults, _SHOWN, _faults(found, None), view)],
            [_cut(found, _layers, _LAYERS, _layers(found, None, is_page=True), view)],
            _costs(found),
            [Gallery(lambda: explanation_figures(found))],
            _ending(found, view),
        ],
        lambda: _record(found),
    )


def _cut(
    found: Explanation,
    tell: Callable[[Explanation, int | None], list[Block]],
    most: int,
    page: list[Block],
    view: View,
) -> Excerpt:
    """What ``tell`` says of ``most`` at most, or of ever fewer; of all with ``detail``."""
    if found.verdict.cause == "no disagreement":
        return Excerpt([], page)
    first, *shorter = [None] if view.detail else range(most, _LEAST - 1, -1)
    return Excerpt(tell(found, first), page, shorter=[tell(found, number) for number in shorter])


def _summary(found: Explanation) -> Summary:
    """What the header needs, and what names routers as people call them."""
    return Summary(found.run, [{"router": layer.router} for layer in found.layers], [], [], [])


def _header(found: Explanation) -> list[Block]:
    summary = _summary(found)
    return [
        *header(summary, "routers", "rule"),
        Fact("A", tokens_line(summary)),
        *_sides(found),
    ]


def _sides(found: Explanation) -> Iterator[Fact]:
    """What B is, how it was matched, and the other checkpoint."""
    other = found.other
    engine = f", {other['engine']}" if other["engine"] else ""
    stage = other["stage"].replace("_", " ")
    elsewhere = ", RECORDED FROM ANOTHER CHECKPOINT" if found.is_of_another else ""
    told = f"{other['name']}{engine}: {stage} of {other['num_tokens']:,} tokens{elsewhere}"
    yield Fact("B", told)
    matched = f"{found.num_matched:,} of {found.run['tokens']['num_tokens']:,} tokens"
    if lost := found.num_non_finite:
        matched += f", {lost:,} of them not finite and left out"
    if found.num_examined + lost < found.num_matched:
        matched += f", the first {found.num_examined:,} examined"
    yield Fact("aligned", "; ".join([matched, *other["notes"]]) + ".")
    if found.against:
        yield Fact("C", f"{found.against}: what B may have loaded instead")


def _verdict(found: Explanation) -> list[Block]:
    remedy = found.verdict.remedy
    verdict = Fact("VERDICT", _verdict_sentence(found), _look(found))
    return [verdict, Fact("next", remedy)] if remedy else [verdict]


def _look(found: Explanation) -> Look:
    """Green only where no fault was found."""
    if found.verdict.cause in _FINE:
        return "good"
    return "warning" if found.verdict.cause == "inconclusive" else "error"


def _verdict_sentence(found: Explanation) -> str:
    """The sentence that is read first; it ends with how many things nobody looked at."""
    verdict, unseen = found.verdict, len(found.not_looked_at)
    said = f"{verdict.cause}: {verdict.meaning}"
    if verdict.detail:
        said += f" {verdict.detail[:1].upper()}{verdict.detail[1:]}"
    return f"{said} Not checked: {unseen} thing{'' if unseen == 1 else 's'}, below."


def _faults(found: Explanation, most: int | None) -> list[Block]:
    """What each operator saves on its scope, and how much of B it reproduces there.

    Not those that save nothing, unless ``most`` is None.
    """
    if not any(layer.num_tried for layer in found.layers):
        return []
    summary, named = _summary(found), found.verdict.faults
    worth = [fault for fault in found.faults if fault.bits > 0.0 or fault.name in named]
    shown = found.faults if most is None else worth[:most]
    first = next((layer for layer in found.layers if layer.agreement < 1.0), found.layers[0])
    place, equal = summary.place(first.router), _equal(first.reproduced)
    rows = [("   nothing changed", "all", place, equal, "", "0")]
    paragraphs = [("      0", f"nothing changed: {equal} equal in layer {place}")]
    for fault in shown:
        arrow = "->" if fault.name in named else "  "
        where = summary.places(fault.routers)
        gained = _equal(fault.reproduced[fault.routers[0]])
        before = f"from {_equal(fault.before[fault.routers[0]])}"
        bits = f"{fault.bits:,.0f}"
        layers = where.removeprefix("layers ").removeprefix("layer ")
        rows.append((f"{arrow} {fault.text}", fault.scope or "all", layers, gained, before, bits))
        tokens = f"in {fault.scope}; " if fault.scope else ""
        told = f"{fault.text}; {tokens}{where}: {gained} equal, {before}"
        paragraphs.append((f"   {arrow} {bits}", told))
    looks: list[Look] = ["plain", *("strong" if f.name in named else "plain" for f in shown)]
    blocks: list[Block] = [
        Fact("causes", _whose_inputs(found)),
        Table(
            heads=[("", "tokens", "layers", "equal", "", "bits")],
            rows=rows,
            looks=looks,
            left=(0, 1, 2),
            indent=6,
            paragraphs=paragraphs,
        ),
    ]
    rest = found.num_tried - len(shown)
    hidden = len(found.faults) - len(shown)
    if rest > 0:
        more = ": --detail" if hidden else ""
        blocks.append(Fact("", f"{rest} others save fewer bits, or none{more}", "dim"))
    return blocks


def _whose_inputs(found: Explanation) -> str:
    """What was routed again, and what the figures are."""
    stage = found.run["tokens"]["stage"]
    if any(layer.num_routed for layer in found.layers):
        own = "A's logits" if stage == "logits" else f"{found.inputs_of}'s inputs"
        own = f"{own} routed again with one thing changed"
    else:
        own = "A's choices with one thing changed"
    return f"{own}; sets equal to B's in the first of the layers, bits saved in all"


def _layers(found: Explanation, most: int | None, is_page: bool = False) -> list[Block]:
    """How often A and B agree, layer by layer, and the noise that makes what is left over."""
    shown = _shown_layers(found, most)
    summary, columns = _summary(found), slice(None if is_page else -1)
    rest = len(found.layers) - sum(map(len, shown))
    table = Table(
        heads=[heads[columns] for heads in _LAYER_HEADS],
        rows=[(_name(summary, layers), *_figures(layers[0]))[columns] for layers in shown],
        indent=2,
        rest=f"and {number_of(rest, 'more layer')}: --detail" if rest else "",
    )
    told = found.verdict.faults
    if not told or found.verdict.cause == "inconclusive":
        return [table]
    text = next(fault.text for fault in found.faults if fault.name == told[0])
    left = f"of tokens that agreed before, what is left over with {text}; noise that makes as many"
    return [Fact("residual", left), table]


def _name(summary: Summary, layers: Sequence[LayerEvidence]) -> str:
    """``3``, or ``3-7 (5)``."""
    first = summary.place(layers[0].router)
    if len(layers) == 1:
        return first
    return f"{span([layer.router for layer in layers], first)} ({len(layers)})"


def _shown_layers(found: Explanation, most: int | None) -> list[list[LayerEvidence]]:
    """Layers to show, each alone where ``most`` is None.

    Else those are together that follow each other with the same figures, and of many some are
    evenly spread with those of the verdict.
    """
    if most is None:
        return [[layer] for layer in found.layers]
    runs = [[*alike] for _, alike in itertools.groupby(found.layers, key=_figures)]
    if len(runs) <= most:
        return runs
    step = (len(runs) - 1) / (most - 1)
    numbers = {round(number * step) for number in range(most)}
    numbers |= {
        number
        for number, run in enumerate(runs)
        if found.verdict.router in [layer.router for layer in run]
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
    return _equal(layer.agreement), f"{layer.num_clean:,}", *noisy


def _ending(found: Explanation, view: View) -> list[Block]:
    scored = () if found.log_probs is None else (found.log_probs.sentence,)
    told = (*_growth(found), *_details(found), *scored)
    untold = sorted({layer.reason for layer in found.layers if layer.reason})
    return [
        in_part([Note(text, "plain") for text in told], "note", view.detail, is_aside=True),
        in_part([Note(f"not tried: {r}.", "plain") for r in untold], "reason", view.detail),
        *map(Note, _limits(found)),
    ]


def _growth(found: Explanation) -> Iterator[str]:
    """How the noise on the inputs grows with depth; nothing where it is not known."""
    known = [
        (layer.router, layer.noise.scale)
        for layer in found.layers
        if layer.noise and layer.noise.scale > 0.0
    ]
    if len(known) < 2:
        return
    summary = _summary(found)
    source = "what is left over" if found.verdict.faults else "the flips"
    (first, early), (last, late) = known[0], known[-1]
    yield (
        f"noise on the inputs, from {source}: {small_percent(early)} of their rms in "
        f"{summary.places([first])}, {small_percent(late)} in {summary.places([last])}. Rounding "
        "to bfloat16 alone makes 0.17 %."
    )


def _details(found: Explanation) -> Iterator[str]:
    """What else was found: examples, renamed experts, weights."""
    summary = _summary(found)
    for layer in found.layers:
        if layer.noise is not None and layer.noise.num_beyond:
            named = ", ".join(f"document {d} position {p}" for d, p in layer.noise.examples)
            yield (
                f"{summary.places([layer.router])}: {layer.noise.num_beyond:,} flips beyond the "
                f"reach of noise, such as {named}."
            )
            break
    if not found.verdict.faults:  # a fault is not doubted by a numbering that chance makes better
        yield _numbering(found.layers, summary)
    weights = [
        (layer.weights.error, layer.router) for layer in found.layers if layer.weights is not None
    ]
    if weights:
        error, router = max(weights, key=lambda pair: pair[0])
        yield (
            f"routing weights where both chose alike: differ by {error:.1g} at most "
            f"({summary.places([router])}), relative rms."
        )


def _numbering(layers: Sequence[LayerEvidence], summary: Summary) -> str:
    """Whether B's experts fit A's choices best under another numbering."""
    renamed = [layer for layer in layers if layer.num_renamed]
    if not renamed:
        return "numbers of experts: each fits itself best, in all layers."
    most = max(renamed, key=lambda layer: layer.num_renamed)
    where = summary.places([layer.router for layer in renamed])
    return (
        f"numbers of experts: in {where} another numbering fits better (most in "
        f"{summary.places([most.router])}: {most.num_renamed} experts)."
    )


def _limits(found: Explanation) -> Sequence[str]:
    """What is not said."""
    whose = "B's own inputs are routed: every layer speaks for itself."
    if found.inputs_of == "A":
        whose = (
            "Only the first layer with a router reads what nothing has changed yet: deeper ones "
            "inherit what earlier ones did."
        )
    return whose, f"Not checked: {'; '.join(found.not_looked_at)}."


def _equal(share: float) -> str:
    """A share of equal choices: rounded down, so that 100 % means all of them."""
    value = 100.0 * share
    if value == 100.0:
        return "100 %"
    digits = 3 if value > 99.9 else 2 if value > 99.0 else 1
    return f"{math.floor(value * 10.0**digits) / 10.0**digits:.{digits}f} %"


def _costs(found: Explanation) -> list[Block]:
    """What flips do to the output, where experts were read."""
    known = [cost for cost in found.costs if cost.over_output is not None]
    summary, said = _summary(found), []
    if known:
        most = max(known, key=lambda cost: cost.over_output or 0.0)
        looked, flipped = (
            sum(getattr(cost, name) for cost in known) for name in ("num_looked", "num_flipped")
        )
        mean = sum(cost.num_looked * (cost.over_output or 0.0) for cost in known) / looked
        read, of = (sum(getattr(c, n) for c in known) for n in ("experts_read", "expert_bytes"))
        said.append(
            f"With the experts that B chose in the place of A's, at A's inputs and by A's experts "
            f"and rule, the output of a router's experts changes by {percent(mean)} of its length "
            f"on average (most in {summary.places([most.router])}: "
            f"{percent(most.over_output or 0.0)}). Of {looked:,} of {number_of(flipped, 'flip')}; "
            f"{number_of(read, 'expert')} read ({size(of)})."
        )
    for reason in dict.fromkeys(cost.reason for cost in found.costs if cost.reason):
        places = summary.places([cost.router for cost in found.costs if cost.reason == reason])
        said.append(f"{places}: not known: {reason}.")
    return [Fact("cost" * (not number), text, "plain") for number, text in enumerate(said)]


def _record(found: Explanation) -> Mapping[str, Any]:
    verdict = found.verdict
    return {
        "verdict": {
            **dataclasses.asdict(verdict),
            "meaning": verdict.meaning,
            "remedy": verdict.remedy,
        },
        "agreement": found.agreement,
        "any_flipped_share": found.any_share,
        "inputs_of": found.inputs_of,
        "num_matched": found.num_matched,
        "num_examined": found.num_examined,
        "num_non_finite": found.num_non_finite,
        "faults": [dataclasses.asdict(fault) for fault in found.faults],
        "layers": [dataclasses.asdict(layer) for layer in found.layers],
        "costs": [dataclasses.asdict(cost) for cost in found.costs],
        "log_probs": found.log_probs and dataclasses.asdict(found.log_probs),
        "not_looked_at": list(found.not_looked_at),
        "checkpoint_b": found.against,
        "run_b": dict(found.other),
        **rule_facts(found.run),
        "run": dict(found.run),
    }
