"""The part of the text that lies on the fewest experts: a domain, a document, or a run of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.checks.statistics import p_above
from moegeom.core.errors import NonFiniteError
from moegeom.core.router import Router
from moegeom.core.row_keys import AS_STORED, is_domain
from moegeom.core.shapes import Int64
from moegeom.engine.sample import drawn_tokens
from moegeom.engine.session import Session
from moegeom.geometry.load import FEW_EXPERTS, effective_by_unit, lowest_part
from moegeom.geometry.statistics import in_logs
from moegeom.kernels.batch import RUN_TOKENS
from moegeom.tokens.rows import consecutive
from moegeom.tokens.traces.source import CountedSource

#: Tokens that are looked at where choices were recorded, and where they are computed again.
_MOST_READ, _MOST_ROUTED = 262_144, 20_000

#: Tokens of a unit at least, and units at most: shorter documents count with their neighbours.
_LEAST_TOKENS, _MOST_UNITS = 32, 512


#: Slots for each expert from which on the entropy of a load is hardly less for their being few.
_SLOTS_OF_EXPERT = 10


def domain_facts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As :func:`text_part_facts`, of the domains of each router with tokens enough, by rows of the
    table ``layers``: the one on the fewest experts beside the median of the others, by Student's t
    over blocks of documents, times the domains.
    """
    by_router: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        slots = (row["num_tokens"] or 0) * (row.get("top_k") or 0)
        is_large = slots >= _SLOTS_OF_EXPERT * row["num_experts"]
        is_known = row.get("effective_experts_se") is not None
        if is_large and is_known and row["variant"] == AS_STORED and is_domain(row["population"]):
            by_router.setdefault(row["router"], []).append(row)
    return [_lowest_domain(router, own) for router, own in by_router.items() if len(own) > 1]


def _lowest_domain(router: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns = ("effective_experts", "effective_experts_se")
    effective, errors = (np.array([row[name] for row in rows], np.float64) for name in columns)
    values, errors = in_logs(effective, errors)
    low = int(values.argmin())
    inside, others = float(effective[low]), float(np.median(np.delete(effective, low)))
    error = math.hypot(errors[low], np.delete(errors, low).max())
    facts: dict[str, Any] = {"router": router, "num_tests": len(rows), "low": {}}
    if error > 0.0 and inside <= FEW_EXPERTS * others:
        freedom = min(row["num_blocks"] for row in rows) - 1
        p_value = p_above(math.log(others / inside), 0.0, error, freedom)
        place = str(rows[low]["population"]).replace("=", " ")
        facts["low"] = {"place": place, "effective": inside, "others": others}
        facts["low"]["p_value"] = min(1.0, p_value * len(rows))
    return facts


def text_part_facts(opened: Session) -> list[dict[str, Any]]:
    """One entry for each router of which choices of k of more than 2 k experts are known.

    ``units`` counts documents, or runs of 256 tokens where these are not known or one alone, and
    ``num_tests`` the parts that were tried. ``low`` is the part on half of the experts of the
    others at most: its ``place`` in words, the ``effective`` experts that it and the ``others`` lie
    on, and the ``p_value``; empty where there is none.
    """
    if opened.source is None or isinstance(opened.source, CountedSource):
        return []
    has_chosen = opened.source.facts.has_chosen
    token = drawn_tokens(opened.source, opened.terms, _MOST_READ if has_chosen else _MOST_ROUTED)
    text = _Text(opened, token)
    return [
        text.part_of(router, counts)
        for router in opened.recorded
        if (router.rule.num_chosen or router.num_experts) * 2 < router.num_experts
        and (counts := text.counts_of(router)) is not None
    ]


class _Text:
    """Tokens in their order, and the units that they belong to."""

    def __init__(self, opened: Session, token: Int64[np.ndarray, "tokens"]) -> None:
        assert opened.source is not None, "there are tokens"
        self._opened, self._source, self._token = opened, opened.source, token
        self._runs = list(consecutive(token))
        columns = [self._source.read_columns(*run) for run in self._runs]
        document = np.concatenate([one.document for one in columns])
        self._has_documents = bool((document >= 0).all()) and len(np.unique(document)) > 1
        label = document if self._has_documents else token // RUN_TOKENS
        is_other = np.diff(label, prepend=label[:1] - 1) != 0
        starts = np.flatnonzero(is_other)
        number = np.maximum(_LEAST_TOKENS, -(-len(token) // _MOST_UNITS))
        firsts, last = [], -number
        for start in starts.tolist():
            if start - last >= number and len(token) - start >= min(number, len(token)):
                firsts.append(start)
                last = start
        self._starts = np.array(firsts or [0])
        self.unit = np.searchsorted(self._starts, np.arange(len(token)), side="right") - 1
        self._label = label

    def counts_of(self, router: Router) -> Int64[np.ndarray, "units experts"] | None:
        """How often each expert is chosen in each unit; None where tokens are not finite."""
        if self._source.facts.has_chosen:
            chosen = np.concatenate(list(self._recorded(router)))
        else:
            try:
                sample = self._opened.sample(router, ("chosen",), at=self._token)
            except NonFiniteError:
                return None
            if sample.num_non_finite:
                return None
            chosen = sample.chosen
        cell = self.unit[:, None] * router.num_experts + chosen
        counts = np.bincount(cell[chosen >= 0], minlength=len(self._starts) * router.num_experts)
        return counts.reshape(-1, router.num_experts)

    def _recorded(self, router: Router) -> Iterator[np.ndarray]:
        for start, stop in self._runs:
            chosen = self._source.read_chosen(router.name, start, stop)
            assert chosen is not None, "choices were recorded"
            yield chosen

    def part_of(self, router: Router, counts: Int64[np.ndarray, "units experts"]) -> dict[str, Any]:
        """The entry of a router."""
        top_k = router.rule.num_chosen
        assert top_k is not None, "asked before"
        effective = effective_by_unit(counts, top_k)
        part = lowest_part(np.log(effective), -math.log(FEW_EXPERTS))
        facts: dict[str, Any] = {"router": router.name, "units": len(counts)}
        facts |= {"has_documents": self._has_documents, "num_tests": part.num_tests, "low": {}}
        if part.first < 0:
            return facts
        is_part = np.isin(np.arange(len(counts)), np.arange(part.first, part.last + 1))
        inside, others = (math.exp(np.log(effective[one]).mean()) for one in (is_part, ~is_part))
        place = self._place(part.first, part.last)
        low = {"place": place, "effective": inside, "others": others, "p_value": part.p_value}
        return facts | {"low": low}

    def _place(self, first: int, last: int) -> str:
        """``documents 12 to 14 (tokens 768 to 959)``."""
        rows = np.flatnonzero((self.unit >= first) & (self.unit <= last))[[0, -1]]
        one, other = self._token[rows].tolist()
        where = f"tokens {one:,} to {other:,}"
        if not self._has_documents:
            return where
        one, other = self._label[rows].tolist()
        return f"document{f's {one} to {other}' if one != other else f' {one}'} ({where})"
