"""First line of a sign-off: are all routers there, of the same shape and rule, and how stored?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.core.errors import RouterError
from moegeom.core.router import Norm, Router
from moegeom.document.verdict_text import places
from moegeom.router.integrity import PART_MISSING, STORAGE_UNKNOWN
from moegeom.studies.changes.rule import rule_differences
from moegeom.studies.signoff.record import Line

#: What the loader refuses because of how routers are stored; everything else ends the command.
ABOUT_STORAGE = frozenset({STORAGE_UNKNOWN, PART_MISSING})


def storage_line(a: Sequence[Router], b: Sequence[Router]) -> Line:
    """Fails for routers of A that B lacks, and for another shape, rule or norm in front.

    Quantised storage that the loader can decode passes and is named: what it did to the router is
    the business of the next line. Routers that only B has are told and not compared.
    """
    found = {router.name: router for router in b}
    pairs = [(router, found[router.name]) for router in a if router.name in found]
    names = [router.name for router in a]
    wrong = [*_missing(a, found), *_others(pairs, names)]
    stored = f"stored {stored_as(a)} in A, {stored_as(b)} in B"
    if stored_as(a) == stored_as(b):
        stored = f"stored {stored_as(a)} in both"
    only_b = [name for name in found if name not in names]
    more = (f"Only in B and not compared: {', '.join(only_b[:4])}.",) if only_b else ()
    evidence = {"stored": {side: stored_as(routers) for side, routers in (("a", a), ("b", b))}}
    evidence |= {"only_in_a": [n for n in names if n not in found], "only_in_b": only_b}
    if wrong:
        return Line("storage", "failed", f"{'; '.join(wrong)}; {stored}.", more, (), evidence)
    count = "the router" if len(a) == 1 else f"all {len(a)} routers"
    are = "is" if len(a) == 1 else "are"
    sentence = f"{count} of A {are} in B with the same shape and rule; {stored}."
    return Line("storage", "passed", sentence, more, (), evidence)


def refused_line(refusal: RouterError) -> Line:
    """The line of a side B whose storage the loader refuses, in the loader's words."""
    details = (refusal.hint,) if refusal.hint else ()
    evidence = {"code": refusal.code}
    sentence = f"the routers of B cannot be read: {refusal.message}"
    return Line("storage", "failed", sentence, details, (), evidence)


def stored_as(routers: Sequence[Router]) -> str:
    """``bf16``, or ``bf16 (46), f8_e4m3 with scales (2)`` where they differ."""
    counted = Counter(_storage(router.provenance.stored_dtype) for router in routers)
    if len(counted) < 2:
        return next(iter(counted), "nothing")
    return ", ".join(f"{storage} ({count})" for storage, count in counted.most_common())


def _storage(dtype: str) -> str:
    return dtype.lower() if dtype in PLAIN_FLOATS else f"{dtype.lower()} with scales"


def _missing(a: Sequence[Router], b: dict[str, Router]) -> Iterator[str]:
    missing = [router.name for router in a if router.name not in b]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        yield f"{len(missing)} of {len(a)} routers missing in B: {', '.join(missing[:4])}{more}"


def _others(pairs: Sequence[tuple[Router, Router]], names: Sequence[str]) -> Iterator[str]:
    """Shapes, rules and norms that differ: the first of each kind, and in how many routers."""
    kinds = {
        "shape": [(a.name, f"{_shape(a)} in A, {_shape(b)} in B") for a, b in pairs],
        "rule": [(a.name, "; ".join(rule_differences(a.rule, b.rule))) for a, b in pairs],
        "norm": [(a.name, f"{_norm(a.norm)} in A, {_norm(b.norm)} in B") for a, b in pairs],
    }
    is_same = {
        "shape": [a.weight.shape == b.weight.shape for a, b in pairs],
        "rule": [a.rule == b.rule for a, b in pairs],
        "norm": [_norm(a.norm) == _norm(b.norm) for a, b in pairs],
    }
    run = {"routers": [{"name": name} for name in names]}
    for kind, told in kinds.items():
        other = [said for said, same in zip(told, is_same[kind], strict=True) if not same]
        if other:
            where = places([name for name, _ in other], run)
            yield f"another {kind} in {where}: {other[0][1]}"


def _shape(router: Router) -> str:
    return f"{router.num_experts} x {router.hidden_size}"


def _norm(norm: Norm | None) -> str:
    """A gain that is stored with another offset is the same norm."""
    return "none" if norm is None else f"{norm.kind} norm with epsilon {norm.eps:g}"
