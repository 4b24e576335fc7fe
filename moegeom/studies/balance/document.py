"""Balancing as a document: what was read, what the figures mean, a line for each router."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from moegeom.checks.catalogue.tokens import MOST_PULL
from moegeom.core.text import number_of, percent
from moegeom.document.excerpts import in_part, worst_rows
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
from moegeom.document.study import study_page, study_record, study_summary
from moegeom.studies.balance.figures import balance_figures
from moegeom.studies.balance.record import NO_GUARANTEE, SENTENCES, Balance, RouterBalance

#: Columns of ``layer 10`` in front of the experts that its bias moves.
_ROUTER = 10

_HEADS = (
    ("", "MaxVio", "", "", "", "", "CV", "", "", "bias change", "", "sets", "weight"),
    (
        *("layer", "now", "chance", "these", "others", "chance", "now", "these", "others"),
        *("largest", "spreads", "changed", "moved"),
    ),
)

#: A narrow screen does without CV.
_DROPS = (0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)

_PAGE_HEADS = (
    *("router", "MaxVio now", "chance", "these tokens", "other documents", "chance there"),
    *("CV now", "CV these", "CV others", "largest change", "unit", "in spreads"),
    *("sets changed", "weight moved", "pushed most"),
)


def document(found: Balance, view: View) -> Document:
    """What ``moegeom balance`` says."""
    notes = [*_limits(found)]
    if found.written:
        notes.append(
            f"Biases written to {found.written}: change and selection_bias of each router."
        )
    page = Table([_PAGE_HEADS], [*map(_page_cells, found.routers)], left=(0, 10, 14))
    shown, *fewer = worst_rows(found.routers, lambda router: router.before.max_vio, view)
    shorter = [[_table(found, some)] for some in fewer]
    return study_page(
        found,
        "balance",
        view,
        [Gallery(lambda: [*balance_figures(found)])],
        [Excerpt([_table(found, shown)], [page], shorter=shorter)],
        [in_part([*_pushes(found, shown)], "line", view.detail, page=[])],
        verdict=_meanings(found),
        sample=_halves(found),
        notes=notes,
        record=lambda: study_record(found, _figures),
    )


def _figures(router: RouterBalance) -> dict[str, Any]:
    sentence = SENTENCES[router.meaning]
    return {
        "largest_change": router.largest_change,
        "pushes": router.pushes(),
        "sentence": sentence,
    }


def _halves(found: Balance) -> str:
    return (
        f"'others': made on one half of the {_plural(found.unit)}, tried on the other; the worse "
        "of both ways."
    )


def _plural(unit: str) -> str:
    """``runs of 256 tokens``."""
    first, _, rest = unit.partition(" ")
    return f"{first}s {rest}".strip()


# ------------------------------------------------------------------------------------------ meaning


def _meanings(found: Balance) -> Iterator[Block]:
    """Worst first; green only where nothing is uneven."""
    is_even = all(router.meaning == "balanced" for router in found.routers)
    look: Look = "good" if is_even else "warning"
    label = "RESULT"
    for places, text in (*_verdicts(found), *_remarks(found)):
        yield Fact(label, f"{places}: {text}", look)
        label = ""


def _verdicts(found: Balance) -> Iterator[tuple[str, str]]:
    """Routers and sentence, worst first."""
    for meaning, sentence in SENTENCES.items():
        routers = [router.router for router in found.routers if router.meaning == meaning]
        if routers:
            yield study_summary(found).places(routers), sentence


def _remarks(found: Balance) -> Iterator[tuple[str, str]]:
    """Place and text: experts that cannot be told apart, ties, and where no guarantee is given."""
    summary = study_summary(found)
    for router in found.routers:
        for experts, why in router.duplicates:
            named = ", ".join(map(str, experts[:8])) + (" ..." if len(experts) > 8 else "")
            text = f"experts {named} cannot be told apart by any bias ({why})."
            yield summary.places([router.router]), text
        if router.meaning == "none" and router.num_tied is not None:
            text = f"{router.num_tied:,} of {router.num_tokens:,} tokens are ties at the optimum."
            yield summary.places([router.router]), text
    uneven = [r for r in found.routers if r.meaning != "balanced" and r.pull > MOST_PULL]
    if uneven:
        most = max(router.pull for router in uneven)
        text = (
            f"the mean input favours some experts, up to {most:.2g} times as much as tokens "
            "differ: moegeom space says how much of the imbalance that makes."
        )
        yield summary.places([router.router for router in uneven]), text
    grouped = [router.router for router in found.routers if router.is_grouped]
    if grouped:
        yield summary.places(grouped), f"{NO_GUARANTEE}."
    for name, reason in found.left_out:
        yield summary.place(name), f"not checked: {reason}."


# ------------------------------------------------------------------------------------------ routers


def _table(found: Balance, shown: Sequence[RouterBalance]) -> Table:
    """A line for each; the three columns of CV stay or go together."""
    summary = study_summary(found)
    heads = _HEADS
    rows = [(summary.place(router.router), *_cells(router)) for router in shown]
    rest = len(found.routers) - len(shown)
    more = f"and {rest} more that were more even: --detail" if rest else ""
    return Table(heads, rows, drops=_DROPS, rest=more)


def _cells(router: RouterBalance) -> tuple[str, ...]:
    worst = router.worst
    ratio = router.largest_change / router.spread if router.spread else float("nan")
    others = ("-", "-") if worst is None else (_figure(worst.after.max_vio), _figure(worst.limit))
    return (
        _figure(router.before.max_vio),
        _figure(router.limit),
        _figure(router.after.max_vio),
        *others,
        _figure(router.before.cv),
        _figure(router.after.cv),
        "-" if worst is None else _figure(worst.after.cv),
        f"{router.largest_change:.2g}",
        _figure(ratio),
        _percent(router.changed_share),
        _percent(router.displaced_weight),
    )


def _page_cells(router: RouterBalance) -> tuple[str, ...]:
    *loads, _, ratio, changed, moved = _cells(router)
    change = (f"{router.largest_change:.3g}", router.score_unit, ratio)
    return (router.router, *loads, *change, changed, moved, _pushed(router))


def _pushes(found: Balance, shown: Sequence[RouterBalance]) -> Iterator[Block]:
    """Which experts the bias pushes most, where loads are uneven; a page has a column of them."""
    uneven = [router for router in shown if router.meaning != "balanced"]
    if uneven:
        yield Note("experts that the bias moves most")
    for router in uneven:
        place = study_summary(found).places([router.router])
        yield Fact(place, f"{_pushed(router)}  ({router.score_unit})", "plain", indent=_ROUTER)


def _pushed(router: RouterBalance) -> str:
    """The experts with the largest changes; ``up 3 +0.21, 7 +0.18; down 12 -0.4``."""
    pushes = router.pushes()
    up = ", ".join(f"{e} {c:+.2g}" for e, c in pushes if c > 0.0)
    down = ", ".join(f"{e} {c:+.2g}" for e, c in pushes if c < 0.0)
    said = [f"up {up}" if up else "", f"down {down}" if down else ""]
    return "; ".join(part for part in said if part) or "none"


# ------------------------------------------------------------------------------------------- limits


def _limits(found: Balance) -> Iterator[str]:
    """How to read the figures, and what they do not say."""
    units = sorted({router.num_units for router in found.routers})
    count = number_of(units[-1], found.unit, _plural(found.unit))
    shares = sorted({100.0 * (1.0 - r.top_k / r.num_experts) for r in found.routers})
    at_random = " to ".join(dict.fromkeys(f"{s:.3g}" for s in (shares[0], shares[-1])))
    halves = [r.worst for r in found.routers if r.worst is not None]
    yield (
        "'chance': MaxVio that even routing stays below in all routers together with "
        f"probability {1.0 - found.level * len(found.routers):.2f}, from the scatter of "
        f"{count}; for 'others' it holds the chance of both halves."
    )
    if halves:
        vio, cv = (max(h.max_vio_floor for h in halves), max(h.cv_floor for h in halves))
        yield (
            f"The floor of as many independent tokens as in one half: MaxVio {_figure(vio)}, CV "
            f"{_figure(cv)}; with a bias made on the other half 1.41 times that. Tokens of one "
            "document are not independent."
        )
    yield (
        "A bias evens out nearly any loads of these tokens. What that costs is the weight it moves "
        f"off the chosen experts ({at_random} % for a choice at random). This does not say that "
        "quality is lost, nor that it is kept."
    )


def _figure(value: float) -> str:
    """Three digits at most, without the zero in front; ``-`` for what is not known."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "any"
    return f"{value:.2f}" if value < 99.5 else f"{value:.0f}"


def _percent(share: float) -> str:
    return percent(share, ".1f")
