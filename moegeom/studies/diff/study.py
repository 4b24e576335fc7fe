"""``moegeom diff A B``: what happened to the routers, and which figures changed with them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.files import refuse_existing
from moegeom.core.router import RouterSet, Rule, parse_layers
from moegeom.core.text import number_of
from moegeom.document.requested_layers import layers_without_router
from moegeom.engine.plan import on_all_cores
from moegeom.engine.request import too_late
from moegeom.engine.sources import refuse_no_tokens
from moegeom.pipeline import ScanRequest, Watch, scan
from moegeom.results.reader import MemoryResults, ResultsView, is_results, open_results
from moegeom.router.expert_samples import read_expert_samples
from moegeom.studies.changes.figures import figure_changes
from moegeom.studies.changes.others import RoutersOfA
from moegeom.studies.changes.projected import ProjectedRouters, compare_projected
from moegeom.studies.changes.record import RouterChange
from moegeom.studies.changes.router import Samples, compare_routers
from moegeom.studies.changes.rule import is_same_norm, rule_differences
from moegeom.studies.diff.record import Difference, DifferenceRequest, Figures, Side
from moegeom.studies.diff.sides import OpenedSide, describe, open_side, tokens_line

#: Names of the two sides in messages and of their results under ``--out``.
_LETTERS = ("A", "B")

Sides = tuple[OpenedSide, OpenedSide]

_APPROXIMATE = (
    "Results hold no weights: what is not identical is judged by 32 projections of each row, true "
    "to 12 %; casts, rotations, updates of low rank and factors for columns show no pattern "
    "(compare the checkpoints)."
)


def difference(
    request: DifferenceRequest,
    watch: Watch | None = None,
) -> Difference:
    """The difference of two checkpoints, of two results, or of one of each.

    Both sides are checkpoints or results, kept or in memory. ``tokens`` are those of both, or a
    pair: of ``a``, of ``b``.

    Raises
    ------
    MoeGeomError
        When a side cannot be read, or the request cannot be meant.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> report = mg.diff(f"{sample}/step_1000", f"{sample}/step_1500")
    >>> [router.is_identical for router in report.value.routers]
    [False, False, False]
    """
    _refuse_unmeant(request)
    sides = open_side(request.a, request), open_side(request.b, request)
    samples = _samples(sides, watch) if request.experts else None
    with _measured(request, sides, watch) as results:
        comparison = _routers(request, sides, samples)
        figures = None
        if results is not None:
            figures = figure_changes(*(_of_layers(r, request.layers) for r in results))
        return dataclasses.replace(
            comparison,
            sides=_described(sides, results),
            figures=figures,
            notes=(
                *comparison.notes,
                *_absent_layers(request, sides),
                *_notes(request, results, figures),
            ),
            not_looked_at=tuple(_not_looked_at(request, sides, figures)),
        )


def _refuse_unmeant(request: DifferenceRequest) -> None:
    """Raises UsageError for options that contradict each other or the targets."""
    measured = [
        t if isinstance(t, str) else t.name
        for t in (request.a, request.b)
        if not isinstance(t, str) or is_results(t)
    ]
    if len(request.tokens) > 2:
        raise UsageError(
            f"--tokens is given {len(request.tokens)} times; there are two sides.",
            "Give it once for both, or once for A and once for B.",
        )
    for flag, is_given in (("--tokens", request.tokens), ("--experts", request.experts)):
        if measured and is_given:
            raise too_late(measured[0], flag, "name two checkpoints")
    about_scans = {
        "--out": request.out,
        "--stale-inputs": request.stale_inputs,
        "--unverified": request.unverified,
    }
    if not request.tokens:
        refuse_no_tokens(request)
    for flag, is_given in about_scans.items():
        if is_given and not request.tokens:
            raise UsageError(f"{flag} is about scans, and there are no --tokens.")
    if request.layers is not None:
        parse_layers(request.layers)
    if request.out is not None:
        for letter in _LETTERS:
            refuse_existing(_kept(request.out, letter), may_replace=is_results)


def _routers(
    request: DifferenceRequest,
    sides: Sides,
    samples: tuple[Mapping[str, Samples], Mapping[str, Samples]] | None,
) -> Difference:
    """The difference of the routers; its sides are filled in later."""
    if sides[0].routers is not None and sides[1].routers is not None:
        return _exactly(sides[0].routers, sides[1].routers, samples)
    views = [ProjectedRouters(side.weights) for side in sides]
    layers = None if request.layers is None else parse_layers(request.layers)
    names = [
        [name for name in view.names() if layers is None or int(name.split("/")[1]) in layers]
        for view in views
    ]
    common = [name for name in names[0] if name in names[1]]
    runs = [side.weights.run["checkpoint"] for side in sides]
    rules = [{name: view.rule(name) for name in common} for view in views]
    compared = [compare_projected(views[0], views[1], name)[0] for name in common]
    is_exact = all(router.is_identical for router in compared)
    return Difference(
        _no_sides(),
        compared,
        (*_unlike(runs[0], runs[1], rules[0], rules[1]), *_other_words(views[0], views[1], common)),
        tuple(name for name in names[0] if name not in names[1]),
        tuple(name for name in names[1] if name not in names[0]),
        notes=(*_other_family(runs[0], runs[1]), *(() if is_exact else (_APPROXIMATE,))),
    )


def _exactly(
    a: RouterSet,
    b: RouterSet,
    samples: tuple[Mapping[str, Samples], Mapping[str, Samples]] | None,
) -> Difference:
    first, second = ({router.name: router for router in one.routers} for one in (a, b))
    common = [name for name in first if name in second]

    others = RoutersOfA(a.routers)

    def compare(name: str) -> RouterChange:
        pair = None if samples is None else (samples[0].get(name), samples[1].get(name))
        return compare_routers(first[name], second[name], pair, others)

    compared = list(on_all_cores(compare, common))
    facts = [{"family": one.family, "rule": one.family_text} for one in (a, b)]
    rules = [{name: side[name].rule for name in common} for side in (first, second)]
    norms = [name for name in common if not is_same_norm(first[name].norm, second[name].norm)]
    unlike = list(_unlike(facts[0], facts[1], rules[0], rules[1]))
    if norms:
        unlike.append(f"another norm in front of {len(norms)} routers, first {norms[0]}")
    return Difference(
        _no_sides(),
        compared,
        tuple(unlike),
        tuple(name for name in first if name not in second),
        tuple(name for name in second if name not in first),
        notes=tuple(_other_family(facts[0], facts[1])),
    )


def _unlike(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    first: Mapping[str, Rule],
    second: Mapping[str, Rule],
) -> Iterator[str]:
    """Differences of the selection rules, step by step."""
    others = [name for name in first if rule_differences(first[name], second[name])]
    if a["family"] != b["family"] and (others or not first):
        yield f"family {a['family']} in A, {b['family']} in B"
    elif not first and a["rule"] != b["rule"]:
        yield f"rule: {a['rule']} in A; {b['rule']} in B"
    if others:
        steps = "; ".join(rule_differences(first[others[0]], second[others[0]]))
        counted = f"{len(others)} routers, first" if len(others) > 1 else "router"
        yield f"the rule of {counted} {others[0]}: {steps}"


def _other_words(a: ProjectedRouters, b: ProjectedRouters, common: Sequence[str]) -> Iterator[str]:
    """Differences in how weights are normalised and scaled, where results record it."""
    rules = [(name, *(view.facts[name].get("rule") for view in (a, b))) for name in common]
    other = [one for one in rules if None not in one and one[1] != one[2]]
    if other:
        name, first, second = other[0]
        yield f"the rule of {len(other)} routers, first {name}: {first} in A; {second} in B"


def _other_family(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """A note where another format has another name for the family."""
    if a["family"] != b["family"]:
        yield (
            f"A is read as {a['family']}, B as {b['family']}: what is compared of their rules is "
            "told above where it differs."
        )


def _samples(
    sides: Sides, watch: Watch | None
) -> tuple[Mapping[str, Samples], Mapping[str, Samples]]:
    digests = []
    for letter, side in zip(_LETTERS, sides, strict=True):
        assert side.session is not None
        assert side.routers is not None
        samples = read_expert_samples(side.session.store, side.routers.routers)
        if watch:
            watch.say(f"{letter}: read {samples.bytes_read:,} bytes of headers and expert weights")
        digests.append(samples.digests)
    return digests[0], digests[1]


@contextmanager
def _measured(
    request: DifferenceRequest, sides: Sides, watch: Watch | None
) -> Iterator[tuple[ResultsView, ResultsView] | None]:
    """Results on tokens of both sides: read, or scanned; None when there are none."""
    if sides[0].results is not None and sides[1].results is not None:
        yield sides[0].results, sides[1].results
        return
    if not request.tokens:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="moegeom-") as temporary:
        folder = Path(temporary) if request.out is None else request.out
        tokens = (request.tokens[0], request.tokens[-1])
        views = []
        for letter, side, source in zip(_LETTERS, sides, tokens, strict=True):
            out = _kept(folder, letter)
            out.parent.mkdir(parents=True, exist_ok=True)
            scan_request = ScanRequest(side.target, out, tokens=source, **request.shared_terms())
            assert side.session is not None, "results go without tokens"
            views.append(open_results(scan(scan_request, watch, side.session.on(source))))
        yield views[0], views[1]


def _kept(folder: Path, letter: str) -> Path:
    return folder / f"{letter.lower()}.moegeom"


def _of_layers(results: ResultsView, layers: str | None) -> ResultsView:
    if layers is None:
        return results
    numbers = parse_layers(layers)
    rows = [row for row in results.rows("layers") if int(row["router"].split("/")[1]) in numbers]
    return MemoryResults(results.run, {"layers": rows})


def _described(sides: Sides, results: tuple[ResultsView, ResultsView] | None) -> tuple[Side, Side]:
    first, second = ("", "") if results is None else (tokens_line(one.run) for one in results)
    return describe(sides[0], first), describe(sides[1], second)


def _no_sides() -> tuple[Side, Side]:
    return Side("", "", "", 0), Side("", "", "", 0)


def _absent_layers(request: DifferenceRequest, sides: Sides) -> Iterator[str]:
    """A note for each side that lacks layers which were asked for."""
    for letter, side in zip(_LETTERS, sides, strict=True):
        if absent := layers_without_router(request.layers, side.names()):
            yield f"{letter}: {absent}."


def _notes(
    request: DifferenceRequest,
    results: tuple[ResultsView, ResultsView] | None,
    figures: Figures | None,
) -> Iterator[str]:
    if results is not None and figures is None:
        yield "No router was measured on tokens on both sides: no figures are compared."
    if figures is None or results is None:
        return
    sources = [json.dumps(side.run.get("tokens"), sort_keys=True, default=str) for side in results]
    is_one = request.tokens != () and request.tokens[0] is request.tokens[-1]
    # facts name files, and not arrays in memory
    is_named = all(isinstance(tokens, str) for tokens in request.tokens)
    if is_one or (is_named and sources[0] == sources[1]):
        yield (
            "Both sides were measured on the same inputs and are tested as if they were not: that "
            "errs towards no change."
        )
    if figures.num_tokens[0] != figures.num_tokens[1]:
        first, second = figures.num_tokens
        yield (
            f"A has {number_of(first, 'token')} and B {second:,}: load and all that depends on "
            "the number of "
            "tokens is not comparable (scan equal numbers)."
        )


def _not_looked_at(
    request: DifferenceRequest, sides: Sides, figures: Figures | None
) -> Iterator[str]:
    if figures is None:
        both = all(side.session is not None for side in sides)
        how = " (--tokens REC_A --tokens REC_B)" if both else ""
        yield f"how tokens are routed{how}"
    if not request.experts:
        yield "expert weights" + (" (--experts)" if sides[0].session and sides[1].session else "")
    yield "what else changed in the model: routers with equal weights read other hidden states"
