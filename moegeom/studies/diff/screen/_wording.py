"""What every report of a difference says in the same words: groups, places, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moegeom.core.text import number_of
from moegeom.document.verdict_text import places
from moegeom.studies.diff.screen._difference import (
    Change,
    Difference,
    FigureChange,
    Figures,
    RouterChange,
    percent,
)

#: Columns named when it is told what could have been found, the best known first.
_WELL_KNOWN = (
    "load_cv_ddof0",
    "max_vio_global",
    "margin_p50",
    "routing_entropy_normalised",
    "load_cv_squared_debiased",
    "bf16_switch_share_isotropic",
)
_MOST_NAMED = 4

_ALL = {1: "the router is", 2: "both routers are"}

#: Told beside nearly every router, so not worth a line where nothing changed.
_USUAL = "gain equal"


def where(routers: Sequence[str], difference: Difference) -> str:
    """``layers 3-7,9``, or whole names where layers of several stacks could be meant."""
    names = [router.router for router in difference.routers]
    return places(routers, {"routers": [{"name": name} for name in names]})


def described(change: Change, others: Sequence[Change] = ()) -> str:
    """The phrase of a change with its size, or with the range over ``others`` as well."""
    sizes = [c.size for c in (change, *others) if c.size is not None]
    if not sizes:
        return change.phrase
    low, high = percent(min(sizes)), percent(max(sizes))
    text = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return change.phrase.replace("{size}", text)


def told(router: RouterChange) -> str:
    """Everything that happened to one router, without the evidence."""
    return " and ".join(described(change) for change in router.changes)


def groups(difference: Difference) -> list[tuple[str, list[str]]]:
    """Changed routers to which the same happened: what, and which; the largest group first."""
    found: dict[tuple[str, ...], list[RouterChange]] = {}
    for router in difference.routers:
        if not router.is_identical:
            found.setdefault(router.phrases, []).append(router)
    listed = []
    for routers in sorted(found.values(), key=len, reverse=True):
        alike = zip(*(router.changes for router in routers), strict=True)
        what = " and ".join(described(first, rest) for first, *rest in alike)
        listed.append((what, [router.router for router in routers]))
    return listed


def verdict_sentence(difference: Difference) -> str:
    """How many routers are identical, what happened to the others, how many figures changed."""
    routers = difference.routers
    same = sum(router.is_identical for router in routers)
    changes = "; ".join(f"{where(names, difference)} {what}" for what, names in groups(difference))
    if not routers:
        said = "the two have no router in common"
    elif same == len(routers):
        said = f"{_ALL.get(same, f'all {same} routers are')} identical"
        absent = [("A", len(difference.only_first)), ("B", len(difference.only_second))]
        said += "".join(f"; {number} more only in {side}" for side, number in absent if number)
    elif same:
        said = (
            f"{same} of {len(routers)} routers identical; {len(routers) - same} changed: {changes}"
        )
    else:
        said = f"no router is identical: {changes}"
    figures = difference.figures
    if figures is None:
        return f"{said}."
    changed = f"{len(figures.significant)} of {len(figures.tests)}"
    return f"{said}. Figures: {changed} changed by more than chance."


def mood(difference: Difference) -> str:
    """How the verdict looks: good when nothing differs."""
    is_same = all(router.is_identical for router in difference.routers)
    is_whole = bool(difference.routers) and not difference.unlike
    lonely = difference.only_first or difference.only_second
    figures = difference.figures
    moved = figures is not None and figures.significant
    return "good" if is_same and is_whole and not lonely and not moved else "warning"


def warnings(difference: Difference) -> list[str]:
    """What must be read before the verdict: other kinds, routers without a partner."""
    lines = list(difference.unlike)
    for names, here, there in (
        (difference.only_first, "A", "B"),
        (difference.only_second, "B", "A"),
    ):
        if names:
            more = " ..." if len(names) > 4 else ""
            what = f"{len(names)} router{'s' if len(names) > 1 else ''} of {here} not in {there}"
            lines.append(f"{what}: {', '.join(names[:4])}{more}")
    return lines


def meanings(difference: Difference) -> dict[str, str]:
    """Each word that was used, with what it means; once each."""
    found: dict[str, str] = {}
    for router in difference.routers:
        for change in router.changes:
            found.setdefault(change.word, change.meaning)
    return found


def unchanged_beside(difference: Difference) -> dict[str, list[str]]:
    """What is worth telling of identical routers: sentence -> routers."""
    found: dict[str, list[str]] = {}
    for router in difference.routers:
        said = "; ".join(text for text in router.beside if text != _USUAL)
        if router.is_identical and said:
            found.setdefault(said, []).append(router.router)
    return found


def figures_sentence(figures: Figures) -> str:
    """How many comparisons, on how many tokens, and how many are significant."""
    first, second = figures.num_tokens
    tokens = (
        f"{number_of(first, 'token')} each"
        if first == second
        else f"{first:,} and {number_of(second, 'token')}"
    )
    columns = {test.column for test in figures.tests}
    routers = {test.router for test in figures.tests}
    return (
        f"{tokens}. {number_of(len(figures.tests), 'comparison')} "
        f"({number_of(len(columns), 'figure')}, {number_of(len(routers), 'router')}), by blocks "
        f"of documents, together wrong in {percent(figures.level)} of runs "
        f"(Holm): {len(figures.significant)} changed."
    )


def by_column(figures: Figures) -> list[tuple[FigureChange, int, int]]:
    """The worst significant change of each figure, in how many routers of how many."""
    found = []
    for worst in figures.significant:
        if worst.column not in [test.column for test, _, _ in found]:
            alike = [test for test in figures.tests if test.column == worst.column]
            found.append((worst, sum(test.is_significant for test in alike), len(alike)))
    return found


def detectable(figures: Figures) -> str:
    """What would have been found nine times in ten, for the best known figures."""
    by_name: dict[str, list[float]] = {}
    for test in figures.tests:
        by_name.setdefault(test.column, []).append(test.detectable)
    named = [name for name in _WELL_KNOWN if name in by_name][:_MOST_NAMED]
    if not named:
        return ""
    middle = {name: sorted(by_name[name])[len(by_name[name]) // 2] for name in named}
    listed = ", ".join(f"{name} by {value:.2g}" for name, value in middle.items())
    return f"Would have been found 9 times in 10 (median router): {listed}."


def left_out(figures: Figures) -> list[str]:
    """Why some figures were not compared, with the first of them."""
    lines = []
    for reason, columns in _nonempty(figures.left_out).items():
        more = " ..." if len(columns) > 3 else ""
        number = f"{len(columns)} figure{'s' if len(columns) > 1 else ''}"
        lines.append(f"Not compared, {reason}: {number}, {', '.join(columns[:3])}{more}.")
    return lines


def _nonempty(groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    return {reason: columns for reason, columns in groups.items() if columns}
