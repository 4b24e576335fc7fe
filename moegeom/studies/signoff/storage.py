"""Whether B holds the routers of A: shape, rule, norm in front, tables by token id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.core.router import Norm, Router
from moegeom.core.text import all_of, number_of
from moegeom.studies.changes.record import where
from moegeom.studies.changes.router import is_same_norm, rule_differences, shape_text
from moegeom.studies.signoff.record import Line


def storage_line(
    a: Sequence[Router],
    b: Sequence[Router],
    pruned: Collection[str] = (),
    tables: Sequence[str] = (),
) -> Line:
    """Fails for routers of A that B lacks, and for another shape, rule or norm in front; and for
    ``tables`` by token id that differ, in words.

    Fewer rows are no other shape where each is one of A's (``pruned``): the next line judges them.

    Quantised storage that the loader can decode passes and is named: what it did to the router is
    the business of the next line. Routers that only B has are told and not compared.
    """
    by_name = {router.name: router for router in b}
    pairs = [(router, by_name[router.name]) for router in a if router.name in by_name]
    names = [router.name for router in a]
    only_a, only_b = [n for n in names if n not in by_name], [n for n in by_name if n not in names]
    wrong = [*_others(pairs, names, pruned), *tables]
    if only_a:
        rest = f" and {len(only_a) - 4} more" if len(only_a) > 4 else ""
        missing = f"{len(only_a)} of {len(a)} routers missing in B: {', '.join(only_a[:4])}{rest}"
        wrong.insert(0, missing)
    stored = f"stored {stored_as(a)} in A, {stored_as(b)} in B"
    if stored_as(a) == stored_as(b):
        stored = f"stored {stored_as(a)} in both"
    more = (f"Only in B and not compared: {', '.join(only_b[:4])}.",) if only_b else ()
    evidence = {"stored": {side: stored_as(routers) for side, routers in (("a", a), ("b", b))}}
    evidence |= {"only_in_a": only_a, "only_in_b": only_b}
    if wrong:
        return Line("storage", "failed", f"{'; '.join(wrong)}; {stored}.", more, (), evidence)
    count = all_of(len(a), "router of A is", "routers of A are")
    alike = "rule" if pruned else "shape and rule"
    fewer = f"; {number_of(len(pruned), 'router')} with other numbers of A's rows" if pruned else ""
    sentence = f"{count} in B with the same {alike}{fewer}; {stored}."
    return Line("storage", "passed", sentence, more, (), evidence)


def stored_as(routers: Sequence[Router]) -> str:
    """``bf16``, or ``bf16 (46), f8_e4m3 with scales (2)`` where they differ."""
    dtypes = (router.provenance.stored_dtype for router in routers)
    counted = Counter(f"{d.lower()}{' with scales' * (d not in PLAIN_FLOATS)}" for d in dtypes)
    if len(counted) < 2:
        return next(iter(counted), "nothing")
    return ", ".join(f"{storage} ({count})" for storage, count in counted.most_common())


def _others(
    pairs: Sequence[tuple[Router, Router]], names: Sequence[str], pruned: Collection[str]
) -> Iterator[str]:
    """Shapes, rules and norms that differ: the first of each kind, and in how many routers."""
    kinds: dict[str, list[tuple[str, str]]] = {"shape": [], "rule": [], "norm": []}
    for a, b in pairs:
        if a.weight.shape != b.weight.shape and a.name not in pruned:
            kinds["shape"].append((a.name, f"{shape_text(a)} in A, {shape_text(b)} in B"))
        if rules := rule_differences(a.rule, b.rule):
            kinds["rule"].append((a.name, "; ".join(rules)))
        if not is_same_norm(a.norm, b.norm):
            kinds["norm"].append((a.name, f"{_norm(a.norm)} in A, {_norm(b.norm)} in B"))
    for kind, others in kinds.items():
        if others:
            yield f"another {kind} in {where([name for name, _ in others], names)}: {others[0][1]}"


def _norm(norm: Norm | None) -> str:
    """A gain that is stored with another offset is the same norm."""
    return "none" if norm is None else f"{norm.kind} norm with epsilon {norm.eps:g}"
