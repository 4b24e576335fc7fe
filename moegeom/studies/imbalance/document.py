"""An imbalance as a document: what makes loads uneven, and what evening them would cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from moegeom.checks.catalogue.tokens import MOST_PULL
from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Heat, Panel, Polyline, padded
from moegeom.document.excerpts import in_part, worst_excerpt, worst_rows
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
from moegeom.document.place import place
from moegeom.document.study import (
    Column,
    left_out_facts,
    study_page,
    study_record,
    study_summary,
    table_of,
)
from moegeom.studies.imbalance.record import (
    CAUSES,
    MEANINGS,
    PARTS,
    Evening,
    Imbalance,
    RouterImbalance,
)

#: Columns of ``layer 10`` in front of the experts that its bias moves.
_ROUTER = 10


def document(imbalance: Imbalance, view: View) -> Document:
    """What ``moegeom imbalance`` says."""
    units = _plural(imbalance.unit)
    more, page = (
        [_table(imbalance, columns, imbalance.routers)]
        for columns in (_MORE_COLUMNS, (*_MORE_COLUMNS, *_PAGE_COLUMNS))
    )
    return study_page(
        imbalance,
        "imbalance",
        view,
        [Gallery(lambda: [*imbalance_figures(imbalance)])],
        [_worst(imbalance, _EVENING_COLUMNS, view)],
        [_worst(imbalance, _CAUSE_COLUMNS, view)],
        [in_part([*_pushes(imbalance, view)], "line", view.detail, page=[])],
        [_worst(imbalance, _SET_COLUMNS, view, "expert sets")],
        [Excerpt(more if view.detail else [], page)],
        verdict=_verdict(imbalance),
        sample=f"As many are drawn from each law, {imbalance.seeds} times (seed {imbalance.seed}). "
        f"'others': made on one half of the {units}, tried on the other; the worse of both ways.",
        notes=_limits(imbalance),
        record=lambda: study_record(imbalance, partial(_figures, imbalance)),
    )


def _figures(imbalance: Imbalance, router: RouterImbalance) -> dict[str, Any]:
    return {
        "is_pulled": router.is_pulled,
        "sentence": _sentence(imbalance, [router]),
        "largest_change": router.evening.largest_change,
        "pushes": router.evening.pushes(),
    }


def _plural(unit: str) -> str:
    """``runs of 256 tokens``."""
    first, _, rest = unit.partition(" ")
    return f"{first}s {rest}".strip()


# ---------------------------------------------------------------------------------------- verdict
def _verdict(imbalance: Imbalance) -> Iterator[Block]:
    """Cause and price, then what else a reader must know; green only where all are even."""
    is_even = all(router.cause == "even" for router in imbalance.routers)
    look: Look = "good" if is_even else "warning"
    label, summary = "RESULT", study_summary(imbalance)
    for routers, text in (*_judged(imbalance), *_remarks(imbalance)):
        yield Fact(label, f"{summary.places([one.router for one in routers])}: {text}", look)
        label = ""
    yield from left_out_facts(imbalance, label)
    if imbalance.routers:
        worst = max(imbalance.routers, key=lambda one: one.tokens.max_vio)
        layer, evening = summary.place(worst.router), worst.evening
        yield Headline(
            [
                (f"{worst.tokens.max_vio:.2f}", f"MaxVio of layer {layer}, the most", look),
                (f"{evening.after.max_vio:.2f}", "MaxVio there, evened by a bias", "plain"),
                (percent(evening.changed_share), "of its tokens change experts for that", "plain"),
            ]
        )


_Sentences = Iterator[tuple[Sequence[RouterImbalance], str]]


def _judged(imbalance: Imbalance) -> _Sentences:
    """The routers of each cause and price, and their sentence."""
    for verdict in itertools.product(CAUSES, MEANINGS):
        routers = [one for one in imbalance.routers if (one.cause, one.evening.meaning) == verdict]
        for is_pulled in (True, False):
            if alike := [one for one in routers if one.is_pulled == is_pulled]:
                yield alike, _sentence(imbalance, alike)


def _sentence(imbalance: Imbalance, routers: Sequence[RouterImbalance]) -> str:
    """What makes loads uneven, where that is the mean whether it also is with random rows, and what
    evening them costs: of routers for which these are the same.
    """
    cause, meaning = routers[0].cause, routers[0].evening.meaning
    part = ""
    if cause in PARTS:
        part = _span((getattr(one.parts["max_vio"], PARTS[cause]) for one in routers), _figure)
    words = {
        "part": part,
        "whole": _span((one.tokens.max_vio for one in routers), _figure),
        "left": _span((one.centring.max_vio for one in routers), _figure),
        "share": _span((one.evening.changed_share for one in routers), percent),
        "units": _plural(imbalance.unit),
    }
    text = CAUSES[cause].format(**words)
    if cause == "mean input":
        moved = _span((one.centring.weight_moved for one in routers), percent)
        rows = "turn towards it" if routers[0].is_pulled else "lean on it no more than random ones"
        text += f", and {moved} of the routing weight moves (rows {rows})"
    return f"{text}. {MEANINGS[meaning].format(**words)}".rstrip()


def _remarks(imbalance: Imbalance) -> _Sentences:
    """Experts that cannot be told apart, ties, and a mean that leans where no cause is known."""
    for router in imbalance.routers:
        evening = router.evening
        for experts, why in evening.duplicates:
            named = ", ".join(map(str, experts[:8])) + (" ..." if len(experts) > 8 else "")
            yield [router], f"no bias tells experts {named} apart ({why})."
        if evening.meaning == "none" and evening.num_tied is not None:
            yield (
                [router],
                f"{evening.num_tied:,} of {router.num_tokens:,} tokens tie at the optimum.",
            )
    pulled = [one for one in imbalance.routers if one.cause == "unknown" and one.pull > MOST_PULL]
    if pulled:
        most = max(router.pull for router in pulled)
        yield (
            pulled,
            f"mean scores of experts differ by up to {most:.2g}x their spread over tokens.",
        )


# ----------------------------------------------------------------------------------------- columns
def _of(path: str, text: Callable[[Any], str]) -> Callable[[RouterImbalance], str]:
    """An attribute, or entry of a mapping, by its path, as text; ``-`` where it is not there."""
    *names, last = path.split(".")

    def cell(record: Any) -> str:
        for name in (*names, last):
            record = record.get(name) if isinstance(record, Mapping) else getattr(record, name)
            if record is None:
                return "-"
        return text(record)

    return cell


def _pushed(evening: Evening) -> str:
    """The experts with the largest changes; ``up 3 +0.21, 7 +0.18; down 12 -0.4``."""
    pushes = evening.pushes()
    up = ", ".join(f"{e} {c:+.2g}" for e, c in pushes if c > 0.0)
    down = ", ".join(f"{e} {c:+.2g}" for e, c in pushes if c < 0.0)
    return "; ".join(f"{way} {of}" for way, of in (("up", up), ("down", down)) if of) or "none"


def _figure(value: float | None) -> str:
    """Two places; ``-`` for what is not known, ``any`` where there is no limit."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "any"
    return f"{value:.2f}" if value < 99.5 else f"{value:.0f}"


def _share(value: float) -> str:
    return percent(value, ".1f")


def _sets(log: float) -> str:
    return f"{math.exp(log):,.0f}"


def _factor(log: float) -> str:
    """Two digits of a small one too: the factors multiply to what stands beside them."""
    factor = math.exp(log)
    return f"{factor:.2f}" if factor >= 0.1 else f"{factor:.2g}"


_EVENING_COLUMNS: tuple[Column, ...] = (
    ("MaxVio", "now", 0, _of("tokens.max_vio", _figure)),
    ("a bias reroutes", "tokens", 0, _of("evening.changed_share", _share)),
    ("", "weight", 0, _of("evening.displaced_weight", _share)),
    ("", "score", 0, _of("evening.score_lost", "{:.2g}".format)),
    ("MaxVio left", "others", 0, _of("evening.worst.after.max_vio", _figure)),
    ("chance", "now", 0, _of("limit", _figure)),
    ("", "others", 0, _of("evening.worst.limit", _figure)),
)

_CAUSE_COLUMNS: tuple[Column, ...] = (
    ("MaxVio made by", "rows", 0, _of("parts.max_vio.rows", "{:.2f}".format)),
    ("", "mean", 0, _of("parts.max_vio.mean", "{:+.2f}".format)),
    ("", "cov.", 0, _of("parts.max_vio.covariance", "{:+.2f}".format)),
    ("", "rest", 0, _of("parts.max_vio.rest", "{:+.2f}".format)),
    ("pull", "here", 0, _of("pull", _figure)),
    ("", "random", 0, _of("pull_random", _figure)),
    ("without mean", "MaxVio", 0, _of("centring.max_vio", _figure)),
    ("", "others", 0, _of("centring.other_documents", _figure)),
    ("", "moved", 0, _of("centring.weight_moved", lambda share: percent(share, ".0f"))),
)

_SET_COLUMNS: tuple[Column, ...] = (
    ("effective sets", "rows", 0, _of("parts.log_effective_sets.rows", _sets)),
    ("", "x mean", 0, _of("parts.log_effective_sets.mean", _factor)),
    ("", "x cov.", 0, _of("parts.log_effective_sets.covariance", _factor)),
    ("", "x rest", 0, _of("parts.log_effective_sets.rest", _factor)),
    ("", "tokens", 0, _of("token_law.log_effective_sets", _sets)),
    ("", "+-", 2, _of("token_law.effective_sets_error", lambda share: percent(share, ".0f"))),
)

#: What ``--detail`` adds, and a page.
_MORE_COLUMNS: tuple[Column, ...] = (
    ("a bias leaves", "MaxVio", 0, _of("evening.after.max_vio", _figure)),
    ("CV", "now", 0, _of("tokens.cv", _figure)),
    ("", "bias", 0, _of("evening.after.cv", _figure)),
    ("", "others", 0, _of("evening.worst.after.cv", _figure)),
    ("change", "largest", 0, _of("evening.largest_change", "{:.3g}".format)),
    ("", "spreads", 0, _of("evening.largest_in_spreads", _figure)),
    ("sets", "centred", 0, _of("centring.effective_sets", "{:,.0f}".format)),
)

#: What a page alone adds.
_PAGE_COLUMNS: tuple[Column, ...] = (
    ("sets", "met", 0, _of("tokens.num_sets", "{:,.0f}".format)),
    ("", "cover", 0, _of("tokens.coverage", _share)),
    ("two tokens", "share", 0, _of("tokens.pair_overlap", _share)),
    ("change", "unit", 0, _of("evening.score_unit", str)),
    ("experts", "pushed most", 0, _of("evening", _pushed)),
)


def _table(
    imbalance: Imbalance, columns: Sequence[Column], routers: Sequence[RouterImbalance]
) -> Table:
    """A line for each of the routers; how many of all are not among them.

    Columns below one heading that have no figure at all are left out.
    """
    starts = [number for number, column in enumerate(columns) if column[0]] + [len(columns)]
    groups = [columns[start:stop] for start, stop in itertools.pairwise(starts)]
    columns = [
        column
        for group in groups
        if any(cell(one) != "-" for *_, cell in group for one in imbalance.routers)
        for column in group
    ]
    summary, others = study_summary(imbalance), len(imbalance.routers) - len(routers)
    return table_of(
        [("", "layer", 0, lambda one: summary.place(one.router)), *columns],
        routers,
        rest=f"and {others} more that were more even: --detail" if others else "",
    )


def _worst(imbalance: Imbalance, columns: Sequence[Column], view: View, what: str = "") -> Excerpt:
    """The least even routers on a screen, and all of them on a page.

    A table of ``what`` is cut before the others, and to nothing where there is no room.
    """
    table = partial(_table, imbalance, columns)
    excerpt = worst_excerpt(imbalance.routers, lambda one: one.tokens.max_vio, view, table)
    if not what or view.detail:
        return excerpt
    nothing = [Note(f"Not shown: {what}: --detail")]
    return replace(excerpt, shorter=[*excerpt.shorter, nothing], is_aside=True)


def _pushes(imbalance: Imbalance, view: View) -> Iterator[Block]:
    """Which experts the bias pushes most, where loads are uneven; a page has a column of them."""
    worst = next(worst_rows(imbalance.routers, lambda one: one.tokens.max_vio, view))
    uneven = [router for router in worst if router.cause not in ("even", "few")]
    if uneven:
        yield Note("experts that the bias moves most")
    for router in uneven:
        place = study_summary(imbalance).places([router.router])
        text = f"{_pushed(router.evening)}  ({router.evening.score_unit})"
        yield Fact(place, text, "plain", indent=_ROUTER)


# ------------------------------------------------------------------------------------------- limits
def _limits(imbalance: Imbalance) -> Iterator[str]:
    """How to read the figures, and what they do not say."""
    units = _plural(imbalance.unit)
    yield (
        "'rows': inputs of any direction; 'mean', 'cov.': what the mean and the covariance of the "
        "tokens add; 'rest': the non-Gaussian remainder. The four parts sum to MaxVio; the four "
        "factors multiply to the effective number of expert sets, 1 over the share of pairs of "
        "tokens with one set."
    )
    if few := [one.router for one in imbalance.routers if one.token_law.log_effective_sets is None]:
        place = study_summary(imbalance).places(few)
        yield (
            f"{place}: effective sets are missing: hardly two tokens have one set. A pair shares "
            f"{_span((one.tokens.pair_overlap for one in imbalance.routers), _share)} of its "
            "experts: --out laws.parquet has it for every law."
        )
    number = max((router.num_units for router in imbalance.routers), default=0)
    yield (
        "'chance': even routing stays below in all routers together with probability "
        f"{1.0 - imbalance.level * len(imbalance.routers):.2f}, by the scatter of "
        f"{number_of(number, imbalance.unit, units)}; beside 'others' with that of both halves."
    )
    shares = sorted({100.0 * (1.0 - r.top_k / r.num_experts) for r in imbalance.routers})
    at_random = " to ".join(dict.fromkeys(f"{s:.3g}" for s in (shares[0], shares[-1])))
    yield (
        "'reroutes': tokens whose expert set changes, routing weight that leaves the chosen "
        f"experts ({at_random} % for a random choice), and how far their scores fall, in spreads. "
        "'without mean': one product, no solver. Neither says whether quality is lost."
    )
    halves = [r.evening.worst for r in imbalance.routers if r.evening.worst is not None]
    if halves:
        vio, cv = (max(h.max_vio_floor for h in halves), max(h.cv_floor for h in halves))
        yield (
            f"As many independent tokens as in one half: MaxVio {_figure(vio)}, CV {_figure(cv)} "
            "by chance, 1.41 times that with a bias of the other half. Tokens of one "
            f"{imbalance.unit} are not independent."
        )
    if any(router.evening.is_grouped for router in imbalance.routers):
        yield "Behind a mask of groups the bias is found by updates: a better one may exist."
    yield (
        "'pull' of the mean input: rms of mean scores over what tells tokens apart; 'random': rows "
        "in random directions, whose loads are uneven where it is not 0."
    )
    if imbalance.written:
        is_laws = imbalance.written.endswith(".parquet")
        what = "Laws" if is_laws else "Biases that even the loads, and those of centring,"
        yield f"{what} written to {imbalance.written}."


# --------------------------------------------------------------------------------------------- text
def _span(values: Iterable[float], text: Callable[[float], str]) -> str:
    """``14 to 33 %``: the least and the largest."""
    ordered = sorted(values)
    low, high = text(ordered[0]), text(ordered[-1])
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


# ------------------------------------------------------------------------------------------ figures
#: Parts of MaxVio in the order of their bars, and what makes each.
_MADE_BY = {PARTS[cause]: cause for cause in ("rows", "mean input", "covariance", "rest")}


def imbalance_figures(imbalance: Imbalance) -> Iterator[Chart]:
    """Nothing where no router could be looked at, or of what is not known of any."""
    routers = imbalance.routers
    if not routers:
        return
    names = [place(one.router, [other.router for other in routers]) for one in routers]
    if any("max_vio" in router.parts for router in routers):
        yield _chart_of_causes(routers, names)
    yield _chart_of_loads(routers, names, _plural(imbalance.unit))
    yield _chart_of_bias(routers, names)


def _chart_of_causes(routers: Sequence[RouterImbalance], names: Sequence[str]) -> Chart:
    parts = [router.parts.get("max_vio") for router in routers]
    values = {
        name: [None if part is None else getattr(part, name) for part in parts] for name in _MADE_BY
    }
    at = list(range(len(routers)))
    tokens, limits = [r.tokens.max_vio for r in routers], [r.limit for r in routers]
    marks = [
        # the first colour of groups is that of the tokens
        *(
            Bars(_MADE_BY[part], f"g{number}", values[part])
            for number, part in enumerate(_MADE_BY, 1)
        ),
        Polyline("MaxVio of the tokens", "tokens", at, tokens),
        Polyline("even routing stays below", "limit", at, limits),
    ]
    worst = max(at, key=lambda i: tokens[i])
    of_worst = {part: value for part in _MADE_BY if (value := values[part][worst]) is not None}
    largest = max(of_worst, key=lambda part: of_worst[part], default=None)
    made = ""
    if largest is not None:
        made = f", of which the {_MADE_BY[largest]} makes {figure_text(of_worst[largest])}"
    return Chart(
        "causes",
        "What makes the loads uneven",
        "MaxVio of each layer, the largest load over the mean less 1, parted: what the rows make "
        "alone, what the mean of all inputs adds, what their covariance adds, and the rest. Bars "
        "add up to the blue line. Below the red line chance alone can be the reason.",
        "What a layer would lose without its mean input: parts may be negative, where one evens "
        "out what another does.",
        f"The least even layer is {names[worst]}: MaxVio {figure_text(tokens[worst])}{made}.",
        [Panel("", Axis("layer", names=names), Axis("part of MaxVio"), marks)],
        [
            ("router", [router.router for router in routers]),
            *((part, values[part]) for part in _MADE_BY),
            ("max_vio", tokens),
            ("limit", limits),
            ("input_pull", [router.pull for router in routers]),
            ("input_pull_random", [router.pull_random for router in routers]),
        ],
    )


def _chart_of_loads(routers: Sequence[RouterImbalance], names: Sequence[str], units: str) -> Chart:
    results, worst_of = [one.evening for one in routers], [one.evening.worst for one in routers]
    now, these = [r.tokens.max_vio for r in routers], [one.after.max_vio for one in results]
    others = [None if one is None else one.after.max_vio for one in worst_of]
    chance = [None if one is None else one.limit for one in worst_of]
    at = list(range(len(routers)))
    marks = [
        Bars("now", "tokens", now),
        Bars(f"with the bias, these {units}", "dim", these),
        Bars(f"with the bias, other {units}", "other", others),
        Polyline(f"even routing stays below, other {units}", "limit", at, chance),
    ]
    worst = max(at, key=lambda i: now[i])
    on_others, then = others[worst], f"{figure_text(these[worst])} on these {units}"
    if on_others is not None:
        then = f"{figure_text(on_others)} on other {units}"
    return Chart(
        "loads",
        "How even the loads would be",
        "MaxVio of each layer, the largest load over the mean less 1: now, with the bias that was "
        f"made from these {units}, and on the half of the {units} that the bias was not made "
        "from. Below the red line chance alone can be the reason.",
        "What the bias costs: it moves weight off the experts that the scores prefer.",
        f"The least even layer is {names[worst]}: MaxVio {figure_text(now[worst])} now, with the "
        f"bias {then}.",
        [Panel("", Axis("layer", names=names), Axis("MaxVio"), marks)],
        [
            ("router", [router.router for router in routers]),
            ("max_vio", now),
            ("max_vio_with_bias", these),
            ("max_vio_with_bias_other_documents", others),
            ("limit_other_documents", chance),
            *(
                (name, [getattr(one, name) for one in results])
                for name in ("changed_share", "displaced_weight", "score_lost")
            ),
        ],
    )


def _chart_of_bias(routers: Sequence[RouterImbalance], names: Sequence[str]) -> Chart:
    """Changes in spreads of the scores, so that layers compare."""
    results = [router.evening for router in routers]
    experts = max(router.num_experts for router in routers)
    scaled = padded(
        [[c / one.spread if one.spread else None for c in one.change] for one in results], experts
    )
    most = max((abs(v) for row in scaled for v in row if v is not None), default=0.0) or 1.0
    words = "change of the bias, in standard deviations of the scores"
    far = max(
        range(len(results)), key=lambda n: results[n].largest_change / (results[n].spread or 1)
    )
    change, unit = results[far].change, results[far].score_unit
    expert = max(range(len(change)), key=lambda e: abs(change[e]))
    rows = [(router, e) for router in routers for e in range(router.num_experts)]
    x = Axis("expert", names=[str(e) for e in range(experts)])
    return Chart(
        "bias",
        "The bias that would balance them",
        "What is added to the selection bias of each expert: blue pushes tokens away from it, red "
        "draws them to it.",
        "Why the loads are uneven.",
        f"The largest change is that of expert {expert} in layer {names[far]}: "
        f"{change[expert]:+.3g} ({unit}).",
        [Panel("", x, Axis("layer", names=names), [Heat(scaled, words, -most, most, 0.0)])],
        [
            ("router", [router.router for router, _ in rows]),
            ("expert", [e for _, e in rows]),
            ("change", [router.evening.change[e] for router, e in rows]),
            ("unit", [router.evening.score_unit for router, _ in rows]),
        ],
    )
