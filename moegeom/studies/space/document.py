"""The space of a router as a document: what makes loads uneven, and what each law would show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from moegeom.core.text import number_of, percent
from moegeom.document.excerpts import worst_rows
from moegeom.document.model import Block, Document, Excerpt, Fact, Gallery, Look, Note, Table, View
from moegeom.document.study import study_page, study_record, study_summary
from moegeom.geometry.reference_laws import Attribution
from moegeom.studies.space.figures import space_figures
from moegeom.studies.space.record import SENTENCES, MeasuredShare, RouterSpace, RouterSpaces

_LOADS = (
    ("", "MaxVio", "", "of it made by", "", "", "", "pull", "", "centred", "", "", ""),
    (
        *("layer", "now", "chance", "rows", "mean", "cov.", "rest"),
        *("here", "random", "MaxVio", "others", "moved", "sets"),
    ),
)

#: A narrow screen does without the pull at random, the sets after centring, and isotropic inputs.
_DROPS = (0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1)

_SETS_DROPS = (0, 0, 0, 0, 0, 0, 0, 0, 1, 0)

_SETS = (
    ("", "effective expert sets", "", "", "", "", "near a boundary", "", "", ""),
    (
        *("layer", "rows", "x mean", "x cov.", "x rest", "tokens"),
        *("tokens", "gaussian", "isotropic", "ball"),
    ),
)

_MEASURE = (
    ("", "two tie", "", "", "", "three tie", "", "", ""),
    ("within", *("tokens", "gaussian", "ball", "at most") * 2),
)

_MEASURED = ("tokens", "gaussian", "ball")

#: Shares of tokens near a boundary between which widths are shown.
_LEAST_SHOWN, _MOST_SHOWN = 0.01, 0.9

_PAGE_HEADS = (
    *("router", "MaxVio", "chance", "rows", "mean input", "covariance", "rest", "pull"),
    *("pull at random", "MaxVio centred", "other documents", "weight moved", "sets centred"),
    *("sets of rows", "times mean", "times covariance", "times rest", "sets of tokens"),
    *("near boundary", "gaussian", "isotropic", "ball", "dimension", "sets met", "sets at most"),
)


def document(found: RouterSpaces, view: View) -> Document:
    """What ``moegeom space`` says."""
    notes = [*_limits(found)]
    if found.written:
        what = "Laws" if found.written.endswith(".parquet") else "Biases of centring"
        notes.append(f"{what} written to {found.written}.")
    if found.measure:
        notes.append(f"Shares near ties written to {found.measure}.")
    page = Table([_PAGE_HEADS], [*map(_page_cells, found.routers)], left=(0,))
    shown, *fewer = worst_rows(found.routers, lambda router: router.tokens.max_vio, view)
    return study_page(
        found,
        "space",
        view,
        [Excerpt([_loads(found, shown)], [page], shorter=[[_loads(found, f)] for f in fewer])],
        [Excerpt([_sets(found, shown)], [], shorter=[[_sets(found, f)] for f in fewer])],
        [*_measure(found)],
        [Gallery(lambda: [*space_figures(found)])],
        verdict=_meanings(found),
        sample=f"As many are drawn from each law, {found.seeds} times (seed {found.seed}).",
        notes=notes,
        record=lambda: study_record(found, _figures),
    )


def _figures(router: RouterSpace) -> dict[str, Any]:
    return {"is_pulled": router.is_pulled, "sentence": SENTENCES[router.meaning]}


def _meanings(found: RouterSpaces) -> Iterator[Block]:
    is_even = all(router.meaning == "even" for router in found.routers)
    look: Look = "good" if is_even else "warning"
    label = "RESULT"
    for meaning, sentence in SENTENCES.items():
        routers = [router.router for router in found.routers if router.meaning == meaning]
        if routers:
            yield Fact(label, f"{study_summary(found).places(routers)}: {sentence}", look)
            label = ""
    for name, reason in found.left_out:
        yield Fact(label, f"{study_summary(found).place(name)}: not looked at: {reason}.", look)
        label = ""


def _loads(found: RouterSpaces, shown: list[RouterSpace]) -> Table:
    summary = study_summary(found)
    rest = len(found.routers) - len(shown)
    more = f"and {rest} more that were more even: --detail" if rest else ""
    rows = [(summary.place(router.router), *_load_cells(router)) for router in shown]
    return Table(_LOADS, rows, drops=_DROPS, rest=more)


def _sets(found: RouterSpaces, shown: list[RouterSpace]) -> Table:
    summary = study_summary(found)
    rows = [(summary.place(r.router), *_set_cells(r)) for r in shown]
    return Table(_SETS, rows, drops=_SETS_DROPS)


def _load_cells(router: RouterSpace) -> tuple[str, ...]:
    part, centring = router.parts.get("max_vio"), router.centring
    return (
        _figure(router.tokens.max_vio),
        _figure(router.limit),
        *_parts(part, "+.2f"),
        _figure(router.pull),
        _figure(router.pull_random),
        _figure(centring.max_vio),
        _figure(centring.other_documents),
        percent(centring.weight_moved, ".0f"),
        f"{centring.effective_sets:,.0f}",
    )


def _parts(part: Attribution | None, form: str) -> tuple[str, ...]:
    if part is None:
        return ("-", "-", "-", "-")
    first = format(part.rows, form.removeprefix("+"))
    return (first, *(format(value, form) for value in (part.mean, part.covariance, part.rest)))


def _set_cells(router: RouterSpace) -> tuple[str, ...]:
    part = router.parts.get("log_effective_sets")
    shares = {law.law: law.figures.near_share for law in router.laws}
    factors = ("-", "-", "-", "-")
    if part is not None:
        parts = (part.mean, part.covariance, part.rest)
        factors = (f"{math.exp(part.rows):,.0f}", *(f"{math.exp(value):.2f}" for value in parts))
    return (
        *factors,
        f"{math.exp(router.tokens.log_effective_sets):,.0f}",
        *(_share(shares.get(law)) for law in ("tokens", "gaussian", "isotropic", "ball")),
    )


def _page_cells(router: RouterSpace) -> tuple[str, ...]:
    dimension = "-"
    if router.dimension is not None:
        dimension = f"{router.dimension[0]:.2g} to {router.dimension[1]:.2g}"
    most = _count(router.reach[-1].most_log10) if router.reach else "-"
    met = f"{router.tokens.num_sets:,.0f}"
    return (router.router, *_load_cells(router), *_set_cells(router), dimension, met, most)


def _measure(found: RouterSpaces) -> Iterator[Block]:
    """Shares near ties of two and of three experts, of the least even layer that has them."""
    known = [router for router in found.routers if router.measured]
    if not known:
        return
    router = max(known, key=lambda one: one.tokens.max_vio)
    share = {
        (one.order, one.epsilon, one.law): one
        for one in router.measured
        if one.centre in (None, "origin")
    }
    rows = []
    for width in sorted({one.epsilon for one in router.measured}):
        tokens = share.get((1, width, "tokens"))
        if tokens is None or not _LEAST_SHOWN <= tokens.share_upper <= _MOST_SHOWN:
            continue
        cells = [f"{width:.2g}"]
        for order in (1, 2):
            cells += [_ends(share.get((order, width, law))) for law in _MEASURED]
            ball = share.get((order, width, "ball"))
            cells.append(_bound(ball))
        rows.append(tuple(cells))
    place = study_summary(found).place(router.router)
    yield Note(
        f"Layer {place}: shares nearer than a width to where two, and three, experts "
        " tie at the border of the chosen set."
    )
    yield Table(_MEASURE, rows)


def _ends(share: MeasuredShare | None) -> str:
    """A share, or both ends where searches did not come to theirs."""
    if share is None:
        return "-"
    upper = percent(share.share_upper, ".1f")
    if share.share_lower == share.share_upper:
        return upper
    return f"{percent(share.share_lower, '.1f')} to {upper}"


def _bound(ball: MeasuredShare | None) -> str:
    if ball is None or ball.counted is None:
        return "-"
    return percent(min(10.0**ball.counted.bound_log10, 1.0), ".3g")


def _limits(found: RouterSpaces) -> Iterator[str]:
    """How to read the figures, and what they do not say."""
    yield (
        "'rows': normal inputs without preferred direction; 'mean': with the mean of the tokens; "
        "'cov.': with their covariance; 'rest': what is not normal. Parts add up to MaxVio, "
        "factors multiply to the expert sets that the tokens use (exp of their entropy)."
    )
    if any(router.is_pulled for router in found.routers):
        yield (
            "'centred': each expert's mean score taken away, 'others' with the mean of the other "
            "half of the documents. One product, causal, no solver; moegeom balance evens loads "
            "to the end, and moves more weight. Neither says that quality is kept."
        )
    else:
        yield (
            "'centred' takes each expert's mean score away. No pull here is above that of random "
            "directions: there is nothing to take away, and loads may get worse."
        )
    yield (
        "'pull' of the mean input: rms of the mean scores over what tells tokens apart; 'random': "
        "rows in random directions. 'near a boundary': nearer than the nearest tenth of these "
        "tokens."
    )
    yield from _near(found)
    yield from _reach(found)
    yield from _cones(found)
    yield from _experts(found)


def _near(found: RouterSpaces) -> Iterator[str]:
    """What the number of boundaries makes of the share near one, in the first layer that has it."""
    first = next((router for router in found.routers if router.near is not None), None)
    if first is None or first.near is None:
        return
    near = first.near
    bound, leading = (min(share, 1.0) for share in (10.0 ** near.bounds_log10[0], near.leading))
    place = study_summary(found).place(first.router)
    yield (
        f"Layer {place}: {near.borders:.3g} of {near.num_pairs:,} boundaries between two experts "
        f"border the chosen set, counted by shares. Within {near.width:.2g} of them lies "
        f"{percent(leading, '.1f')} of a ball of the inputs' rms length {near.radius:.3g} if none "
        f"met; {percent(bound, '.3g')} at most, for any rows."
    )


def _reach(found: RouterSpaces) -> Iterator[str]:
    """How many expert sets data of the measured dimension can meet, beside what they do meet."""
    known = [router for router in found.routers if router.dimension is not None]
    if not known:
        return
    low, high = (
        ends(router.dimension[place] for router in known if router.dimension is not None)
        for place, ends in ((0, min), (1, max))
    )
    yield f"Intrinsic dimension of the inputs: {low:.2g} to {high:.2g}."
    router = max(known, key=lambda one: one.reach[-1].dims if one.reach else 0)
    if not router.reach:
        return
    reach = "; ".join(
        f"of {number_of(one.dims, 'dimension')} {_count(one.most_log10)} at most"
        + ("" if one.random_log10 is None else f", {_count(one.random_log10)} of random rows")
        for one in router.reach
    )
    sets = math.comb(router.num_experts, router.top_k)
    place = study_summary(found).place(router.router)
    yield (
        f"Expert sets that an affine set can meet in layer {place}: "
        f"{reach}; {_count(math.log10(sets))} there are. These tokens meet "
        f"{router.tokens.num_sets:,.0f}. Curved data may meet more."
    )


def _cones(found: RouterSpaces) -> Iterator[str]:
    """Whether the sets that are met often are large, in the first layer where it can be said."""
    first = next((router for router in found.routers if router.cones is not None), None)
    if first is None or first.cones is None:
        return
    cones = first.cones
    rank = "they are too few, or too small a part, to be compared one by one"
    if cones.correlation is not None and cones.correlation_by_size is not None:
        rank = (
            "ranks of how often each is met and of its size correlate by "
            f"{cones.correlation:.2f}, and by {cones.correlation_by_size:.2f} were size all"
        )
    yield (
        f"The expert sets met in layer {study_summary(found).place(first.router)} take "
        f"{percent(cones.covered, '.3g')} of all directions from 0; {rank}. The most frequent "
        f"takes {percent(cones.modal)} of directions and {percent(first.tokens.modal_share)} of "
        "tokens."
    )


def _experts(found: RouterSpaces) -> Iterator[str]:
    """What experts tell apart of the data: narrow ones, then the layer of least rank."""
    known = [(router.router, router.experts) for router in found.routers if router.experts]
    if narrow := [name for name, ranks in known if ranks.is_narrow]:
        places = study_summary(found).places(narrow)
        yield (
            f"{places}: experts have fewer neurons than the inputs have dimensions, and cannot "
            "tell all directions apart."
        )
    if not known:
        return
    name, ranks = min(known, key=lambda one: one[1].effective_median / one[1].effective_random)
    over = around = ""
    if ranks.width_over_dimension is not None:
        over = f", {ranks.width_over_dimension:.3g} for each dimension of the inputs"
    if ranks.local_dims is not None:
        around = (
            f"; around a token, on {number_of(ranks.local_dims, 'direction')}, "
            f"{ranks.local_median:.3g} and {ranks.local_random:.3g}"
        )
    place = study_summary(found).place(name)
    yield (
        f"Experts of layer {place} have {number_of(ranks.width, 'neuron')}"
        f"{over}. On the {number_of(ranks.dims, 'direction')} that hold 99 % of the variance their "
        f"effective rank is {ranks.effective_median:.3g} ({ranks.effective_min:.3g} the least), of "
        f"random rows {ranks.effective_random:.3g}{around}."
    )


def _count(log10: float) -> str:
    """A number from its logarithm, in digits where there are few."""
    return f"{10.0**log10:,.0f}" if log10 < 6.0 else f"10^{log10:.2f}"


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "any" if math.isinf(value) else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value, ".1f")
