"""Parts that documents of studies share: routers, those left out and why, the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from moegeom.core.text import number_of
from moegeom.core.tokens import SampleCounts
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Fact, Note, View
from moegeom.document.rule_trust import rule_facts
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


class _OfSample(_OfRouters, Protocol):
    @property
    def sample(self) -> SampleCounts: ...


def study_summary(study: _OfRouters) -> Summary:
    """Names of the routers alone, those that were left out among them."""
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
    return Fact("sample", f"{of_all}{left_out}. {more}".rstrip())


def study_page(
    study: _OfSample,
    name: str,
    view: View,
    *sections: Sequence[Block],
    verdict: Iterable[Block],
    facts: Iterable[Block] = (),
    sample: str = "",
    notes: Iterable[str] = (),
    record: Callable[[], Mapping[str, Any]] | None = None,
) -> Document:
    """The page of a study: what it found, what of, its own sections, and its notes last.

    ``sample`` goes on behind the tokens, ``facts`` stand below them; ``record`` is
    :func:`study_record` unless it is given.
    """
    summary = study_summary(study)
    top = [*header(summary, "routers", "rule", "tokens"), sample_fact(study.sample, sample), *facts]
    ending = [Note(text) for text in (*notes, *skipped(summary))]
    aside = in_part(ending, "note", view.detail, is_aside=True)
    return Document(
        name,
        study.run["checkpoint"]["name"],
        [[*verdict], top, *map(list, sections), [aside]],
        record or (lambda: study_record(study)),
    )


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
