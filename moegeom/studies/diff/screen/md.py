"""Markdown of GitHub: the verdict, a table of changed routers, a table of changed figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.document._reporter import Reporter, View
from moegeom.document.markdown import escaped
from moegeom.document.untrusted import printable
from moegeom.studies.diff.record import Difference, Figures
from moegeom.studies.diff.screen._wording import (
    by_column,
    detectable,
    figures_sentence,
    left_out,
    meanings,
    told,
    unchanged_beside,
    verdict_sentence,
    warnings,
    where,
)


def render(difference: Difference, view: View) -> str:
    """A heading, the verdict, and a section for routers and for figures where any changed."""
    difference = printable(difference)
    first, second = difference.sides
    lines = [f"## moegeom diff: {escaped(first.name)} and {escaped(second.name)}", ""]
    lines += [f"**unlike** {escaped(text)}\n" for text in warnings(difference)]
    lines += [escaped(verdict_sentence(difference)), ""]
    for name, side in zip("AB", difference.sides, strict=True):
        tokens = f" Tokens: {side.tokens}." if side.tokens else ""
        lines.append(f"- **{name}** {escaped(f'{side.name}, {side.kind}: {side.rule}.{tokens}')}")
    lines += ["", *_routers(difference)]
    lines += [] if difference.figures is None else _figures(difference, difference.figures)
    lines += [escaped(note) + "\n" for note in difference.notes]
    if difference.not_looked_at:
        lines.append(escaped(f"Not looked at: {'; '.join(difference.not_looked_at)}."))
    return "\n".join(lines).rstrip("\n") + "\n"


def _routers(difference: Difference) -> Iterator[str]:
    changed = [router for router in difference.routers if not router.is_identical]
    if changed:
        yield from _header(("router", "what happened", "evidence"))
        for router in changed:
            evidence = [change.detail for change in router.changes if change.detail]
            cells = (router.router, told(router), "; ".join([*evidence, *router.beside]))
            yield _row([escaped(cell) for cell in cells])
        yield ""
        for word, meaning in meanings(difference).items():
            yield f"- **{escaped(word)}** {escaped(meaning)}"
        yield ""
    for said, routers in unchanged_beside(difference).items():
        yield escaped(f"{where(routers, difference)}: {said}") + "\n"


def _figures(difference: Difference, figures: Figures) -> Iterator[str]:
    yield escaped(figures_sentence(figures))
    yield ""
    if figures.significant:
        yield from _header(("figure", "routers", "worst in", "A", "B", "change", "error", "p"))
        for test, count, total in by_column(figures):
            numbers = (test.before, test.after, test.change, test.error, test.p_value)
            cells = (test.column, f"{count} of {total}", where((test.router,), difference))
            yield _row([escaped(cell) for cell in (*cells, *(f"{n:.3g}" for n in numbers))])
        yield ""
    for text in (detectable(figures), *left_out(figures)):
        if text:
            yield escaped(text) + "\n"


def _header(cells: Sequence[str]) -> Iterator[str]:
    yield _row(cells)
    yield _row(["---"] * len(cells))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


REPORTER = Reporter("md", render)
