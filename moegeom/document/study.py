"""Parts that documents of studies share: routers, those left out and why, the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from moegeom.core.text import number_of
from moegeom.core.tokens import SampleCounts
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Fact, Note, Table, View
from moegeom.document.rule_words import rule_facts
from moegeom.document.summary import Summary


class _OfRouter(Protocol):
    @property
    def router(self) -> str: ...


class _OfRouters(Protocol):
    @property
    def run(self) -> Mapping[str, Any]: ...
    @property
    def routers(self) -> Sequence[_OfRouter]: ...
    @property
    def left_out(self) -> Sequence[tuple[str, str]]: ...


class _OfResults(Protocol):
    @property
    def summary(self) -> Summary: ...


def study_summary(study: _OfRouters | _OfResults) -> Summary:
    """That of its results; else names of the routers alone, those that were left out among them."""
    if isinstance(summary := getattr(study, "summary", None), Summary):
        return summary
    study = cast("_OfRouters", study)
    names = [*(one.router for one in study.routers), *(name for name, _ in study.left_out)]
    return Summary(study.run, [{"router": name} for name in names], [], [], [])


def left_out_facts(
    study: _OfRouters, label: str = "", what: str = "not looked at"
) -> Iterator[Fact]:
    """A line for each reason why routers were left out; ``label`` stands before the first."""
    for reason in dict.fromkeys(why for _, why in study.left_out):
        names = [name for name, why in study.left_out if why == reason]
        places = study_summary(study).places(names)
        yield Fact(label, f"{places}: {what}: {reason.removesuffix('.')}.", "warning")
        label = ""


def sample_fact(counts: SampleCounts, more: str = "") -> Fact:
    """The sample of tokens of a study, and how many of them were left out."""
    whole, size = counts.num_recorded, counts.num_drawn
    tokens = number_of(whole, "token")
    by = "named" if counts.seed is None else f"seed {counts.seed}"
    of_all = f"all {tokens}" if size == whole else f"{size:,} of {tokens} ({by})"
    lost = counts.num_non_finite
    left_out = f"; {lost:,} of them not finite at a router, left out" if lost else ""
    if outliers := counts.num_outliers:
        left_out += (
            f"; {number_of(outliers, 'outlier')} left out: inputs 4 times as long as most, or"
        )
        left_out += " a quarter"
    return Fact("sample", f"{of_all}{left_out}. {more}".rstrip())


def page(
    name: str,
    about: str,
    view: View,
    *sections: Sequence[Block],
    notes: Iterable[str],
    record: Callable[[], Mapping[str, Any]],
    least: int = 0,
) -> Document:
    """A page on ``about``: its sections, and its notes last, ``least`` of them on every screen."""
    ending = [Note(text) for text in notes]
    aside = in_part(ending, "note", view.detail, least, is_aside=True)
    return Document(name, about, [*map(list, sections), [aside]], record)


def study_page(
    study: _OfRouters | _OfResults,
    name: str,
    view: View,
    *sections: Sequence[Block],
    verdict: Iterable[Block],
    labels: Sequence[str] = ("routers", "rule", "tokens"),
    facts: Iterable[Block] = (),
    sample: str = "",
    notes: Iterable[str] = (),
    record: Callable[[], Mapping[str, Any]] | None = None,
) -> Document:
    """The page of a study: what it found, what of, its own sections, and its notes last.

    ``labels`` are those of the header. Where the study has a sample, ``sample`` goes on behind the
    tokens; ``facts`` stand below. ``record`` is :func:`study_record` unless it is given.
    """
    summary, counts = study_summary(study), getattr(study, "sample", None)
    top = [*header(summary, *labels), *([sample_fact(counts, sample)] if counts else []), *facts]
    return page(
        name,
        summary.run["checkpoint"]["name"],
        view,
        [*verdict],
        top,
        *sections,
        notes=(*notes, *skipped(summary)),
        record=record or (lambda: study_record(study)),
    )


#: Line above, heading, when a narrow screen does without it, and the cell of a row.
Column = tuple[str, str, int, Callable[[Any], str]]


def table_of(columns: Sequence[Column], rows: Iterable[Any], **options: Any) -> Table:
    """A line for each row, with the other ``options`` of a table; one line of headings where
    nothing stands above.
    """
    above, heads, drops, cells = zip(*columns, strict=True)
    lines = [[cell(row) for cell in cells] for row in rows]
    return Table([above, heads] if any(above) else [heads], lines, drops=drops, **options)


def mean_of(rows: Iterable[Mapping[str, Any]], column: str) -> float | None:
    """Mean of a column over routers; None where no router has a value."""
    numbers = [row[column] for row in rows if row.get(column) is not None]
    return sum(numbers) / len(numbers) if numbers else None


def study_record(
    study: Any, of_router: Callable[[Any], Mapping[str, Any]] = lambda one: {}
) -> dict[str, Any]:
    """The fields of a study in their order, then what its rule rests on, and the run last.

    ``of_router`` adds what follows from the figures of a router.
    """
    record = dataclasses.asdict(dataclasses.replace(study, run={}))
    del record["run"]
    for router, one in zip(record["routers"], study.routers, strict=True):
        router.update(of_router(one))
    return {**record, **(rule_facts(study.run) if study.run else {}), "run": study.run}
