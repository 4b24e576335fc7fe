"""``moegeom diff A B``: what happened to the routers, and which figures changed with them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, upcast
from moegeom.checks.statistics import detectable_shift, holm_rejects, p_differs, welch_freedom
from moegeom.core.errors import CheckpointError, UsageError, about
from moegeom.core.files import refuse_existing
from moegeom.core.router import Router, RouterSet, Rule, parse_layers
from moegeom.core.row_keys import is_stored_whole, layer_of
from moegeom.core.text import listed, number_of
from moegeom.document.header import left_out_text
from moegeom.document.place import layers_without_router
from moegeom.document.rule_words import assumed, rule_brief, rule_status, rule_trust
from moegeom.engine.plan import on_all_cores
from moegeom.engine.request import too_late
from moegeom.engine.run_facts import router_facts
from moegeom.engine.session import Session
from moegeom.engine.sources import refuse_no_tokens
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, Terms, Watch, lint, scan
from moegeom.results.reader import (
    MemoryResults,
    Results,
    ResultsView,
    is_results,
    open_results,
    results_at,
)
from moegeom.router.facts import compared_tables
from moegeom.router.rule import rule_origin
from moegeom.studies.changes.experts import (
    ExpertsOfSide,
    listing,
    number_of_experts,
    pairs_of,
    with_experts,
)
from moegeom.studies.changes.record import ExpertsChange, RouterChange, where
from moegeom.studies.changes.router import (
    compare_projected,
    compare_routers,
    is_same_norm,
    projected_routers,
    rule_differences,
)
from moegeom.studies.changes.row_pair import RoutersOfA
from moegeom.studies.diff.record import Difference, DifferenceRequest, FigureChange, Figures, Side
from moegeom.studies.study import watched


@dataclass(frozen=True, eq=False)
class OpenedSide:
    """One side: a checkpoint (``session``), or ``results``."""

    target: str
    terms: Terms
    session: Session | None = None
    results: ResultsView | None = None

    @cached_property
    def routers(self) -> RouterSet | None:
        """The routers with weights of the layers asked for; None for results."""
        if self.session is None:
            return None
        weighed = self.session.on(None)
        return dataclasses.replace(weighed.routers, routers=weighed.chosen)

    @cached_property
    def weights(self) -> ResultsView:
        """Results on the weights alone; measured here for a checkpoint."""
        if self.results is not None:
            return self.results
        return lint(self.target, self.terms, self.session)

    @cached_property
    def names(self) -> list[str]:
        """Names of the routers of this side, in the layers asked for."""
        if self.routers is not None:
            return [router.name for router in self.routers.routers]
        layers = None if self.terms.layers is None else parse_layers(self.terms.layers)
        names = (router["name"] for router in self.weights.run["routers"])
        return [name for name in names if layers is None or layer_of(name) in layers]


def open_side(target: str | Results, request: DifferenceRequest) -> OpenedSide:
    """Opens a checkpoint, reading its routers, or results."""
    if (results := results_at(target)) is not None:
        name = target if isinstance(target, str) else target.name
        return OpenedSide(name, request, results=results)
    assert isinstance(target, str)
    has_tokens = bool(request.tokens)
    with about("checkpoint", target):
        opened = Session.of(target, request, with_listed=has_tokens, is_whole=has_tokens)
    return OpenedSide(target, request, opened)


def describe(side: OpenedSide, tokens: str = "") -> Side:
    """What the header says of a side, and on which tokens it was measured."""
    if side.routers is not None and side.session is not None:
        model = side.routers
        origin = assumed(rule_origin(model.family))
        brief = rule_brief(model.family_text, [router_facts(router) for router in model.routers])
        return Side(
            name=side.target,
            kind="checkpoint",
            rule=f"{model.family}: {brief}; rule {origin}",
            num_routers=len(model.routers),
            bytes_read=side.session.store.bytes_read,
            bytes_total=model.bytes_total,
            tokens=tokens,
            rule_status="assumed",
        )
    assert side.results is not None
    run = side.results.run
    checkpoint = run["checkpoint"]
    brief = rule_brief(checkpoint["rule"], run["routers"])
    return Side(
        name=f"{side.target} of {checkpoint['name']}",
        kind="results",
        rule=f"{checkpoint['family']}: {brief}; rule {rule_trust(run)}",
        num_routers=len(run["routers"]),
        tokens=tokens or tokens_line(run),
        rule_status=rule_status(run) or "",
    )


def tokens_line(run: Mapping[str, Any]) -> str:
    """On which tokens results were measured; empty where on none."""
    tokens = run.get("tokens")
    if tokens is None:
        return ""
    num_documents = tokens["num_documents"]
    documents = f" in {number_of(num_documents, 'document')}" if num_documents else ""
    trust = run.get("trust") or {}
    stale = trust.get("fingerprint") == "differs"
    of = ", RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)" if stale else ""
    failed = len(trust.get("overridden") or ()) > int(stale)
    of += ", FAILED ITS TESTS (unverified inputs allowed)" if failed else ""
    return f"{tokens['num_tokens']:,}{documents} ({tokens['name']}){of}{left_out_text(run)}"


#: Names of the two sides in messages and of their results under ``--out``.
_LETTERS = ("A", "B")

Sides = tuple[OpenedSide, OpenedSide]

_APPROXIMATE = (
    "Results hold no weights: changed rows are judged by 32 projections each, true to 12 %, which "
    "show no casts, rotations, updates of low rank or factors for columns. Compare the checkpoints."
)


def difference(request: DifferenceRequest, watch: Watch | None = None) -> Difference:
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
    names = sides[0].names, sides[1].names
    sessions = [side.session for side in sides if side.session is not None]
    skipped, odd = compared_skipped(*sessions) if len(sessions) == 2 else ((), [])
    tables = list(_tables(sides, request.layers))
    with _measured(request, sides, watch) as results:
        compared, unlike, notes = _routers(sides, request.experts, watch)
        figures, tokens = None, ("", "")
        if results is not None:
            figures = figure_changes(*(_of_layers(r, request.layers) for r in results))
            tokens = (tokens_line(results[0].run), tokens_line(results[1].run))
        return Difference(
            (describe(sides[0], tokens[0]), describe(sides[1], tokens[1])),
            compared,
            (*unlike, *odd, *(text for text, is_equal in tables if not is_equal)),
            tuple(name for name in names[0] if name not in names[1]),
            tuple(name for name in names[1] if name not in names[0]),
            figures,
            (
                *notes,
                *_notes(request, sides, results, figures),
                *(f"{text}." for text, is_equal in tables if is_equal),
            ),
            (*_not_looked_at(request, sides, figures, compared), *skipped_in_words(skipped)),
            skipped,
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
    refuse_about_tokens(request, bool(request.tokens), "scans", {"--out": request.out})
    if request.out is not None:
        for letter in _LETTERS:
            refuse_existing(_kept(request.out, letter), may_replace=is_results)


def refuse_about_tokens(
    request: Terms, has_tokens: bool, what: str, flags: Mapping[str, object]
) -> None:
    """Raises UsageError for ``flags`` about ``what`` is measured on tokens, where there are none,
    and for layers that cannot be meant.
    """
    if not has_tokens:
        refuse_no_tokens(request)
        waived = {"--stale-inputs": request.stale_inputs, "--unverified": request.unverified}
        for flag, is_given in {**flags, **waived}.items():
            if is_given:
                raise UsageError(f"{flag} is about {what}, and there are no --tokens.")
    if request.layers is not None:
        parse_layers(request.layers)


#: What happened to routers, what makes the sides unlike, and notes.
Compared = tuple[list[RouterChange], tuple[str, ...], tuple[str, ...]]


def _routers(sides: Sides, every_expert: bool, watch: Watch | None) -> Compared:
    """What happened to the common routers, what makes the sides unlike, and notes."""
    common = [name for name in sides[0].names if name in sides[1].names]
    if sides[0].routers is not None and sides[1].routers is not None:
        return _exactly(sides[0].routers, sides[1].routers, common, sides, every_expert, watch)
    views = [projected_routers(side.weights) for side in sides]
    runs = [side.weights.run["checkpoint"] for side in sides]
    rules = [{name: view[name].rule for name in common} for view in views]
    compared = [compare_projected(views[0], views[1], name) for name in common]
    is_exact = all(router.is_identical for router in compared)
    unlike = (*_unlike(runs[0], runs[1], rules[0], rules[1]), *_other_words(sides, common))
    notes = (*_other_family(runs[0], runs[1]), *(() if is_exact else (_APPROXIMATE,)))
    return compared, unlike, notes


def _exactly(
    a: RouterSet,
    b: RouterSet,
    common: Sequence[str],
    sides: Sides,
    every_expert: bool,
    watch: Watch | None,
) -> Compared:
    first, second = ({router.name: router for router in one.routers} for one in (a, b))
    others = RoutersOfA(a.routers)

    def compare(name: str) -> RouterChange:
        return compare_routers(first[name], second[name], others)

    compared = list(watched(on_all_cores(compare, common), common, watch))
    compared = _with_experts(compared, first, second, sides, every_expert, watch)
    facts = [{"family": one.family, "rule": one.family_text} for one in (a, b)]
    rules = [{name: side[name].rule for name in common} for side in (first, second)]
    norms = [name for name in common if not is_same_norm(first[name].norm, second[name].norm)]
    unlike = list(_unlike(facts[0], facts[1], rules[0], rules[1]))
    if norms:
        unlike.append(f"another norm in front of {len(norms)} routers, first {norms[0]}")
    lost = [one for one in compared if one.experts and one.experts.reason.startswith("B: ")]
    if lost and lost[0].experts:
        layers = where([one.router for one in lost], common)
        unlike.append(f"experts of {layers} cannot be compared: {lost[0].experts.reason}")
    return compared, tuple(unlike), tuple(_other_family(facts[0], facts[1]))


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


def _other_words(sides: Sides, common: Sequence[str]) -> Iterator[str]:
    """Differences in how weights are normalised and scaled, where results record it."""
    texts = [
        {one["name"]: one.get("rule") for one in side.weights.run["routers"]} for side in sides
    ]
    rules = [(name, *(of_side[name] for of_side in texts)) for name in common]
    other = [one for one in rules if None not in one and one[1] != one[2]]
    if other:
        name, first, second = other[0]
        yield f"the rule of {len(other)} routers, first {name}: {first} in A; {second} in B"


def _other_family(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """A note where another format has another name for the family."""
    if a["family"] != b["family"]:
        yield (
            f"A is read as {a['family']}, B as {b['family']}: where their rules differ stands "
            "above."
        )


def _with_experts(
    compared: Sequence[RouterChange],
    first: Mapping[str, Router],
    second: Mapping[str, Router],
    sides: Sides,
    every_expert: bool,
    watch: Watch | None,
) -> list[RouterChange]:
    """With samples of the experts: of all of them, or of some."""
    stores = [side.session.store for side in sides if side.session is not None]
    before = [store.bytes_read for store in stores]
    names = [one.router for one in compared]
    pairs = pairs_of(
        *(
            ExpertsOfSide(s, [r[n] for n in names])
            for s, r in zip(stores, (first, second), strict=True)
        )
    )
    changed = []
    for one in compared:
        pair = pairs[one.router]
        number = None if every_expert else number_of_experts(pair, len(names))
        changed.append(with_experts(one, first[one.router], second[one.router], pair, number))
    for letter, store, start in zip(_LETTERS, stores, before, strict=True):
        if watch and every_expert:
            read = store.bytes_read - start
            watch.say(f"{letter}: read {read:,} bytes of headers and expert weights")
    return changed


def compared_skipped(a: Session, b: Session) -> tuple[tuple[str, ...], list[str]]:
    """Tensors of either side that look like routers and were skipped, and what differs in them.

    Those of one name are held against each other where both are plain floats, number by number.
    """
    stores = (a.store, b.store)
    of_side = [[one.tensor for one in side.routers.skipped] for side in (a, b)]
    unlike = []
    for name in of_side[0]:
        # of files that are not there nothing is known
        with contextlib.suppress(CheckpointError):
            infos = [store.info(name) for store in stores if name in of_side[1]]
            if infos and all(info.dtype in PLAIN_FLOATS for info in infos):
                one, other = (upcast(store.read(name)) for store in stores)
                if not np.array_equal(one, other, equal_nan=True):
                    unlike.append(f"'{name}', which looks like a router, holds other numbers")
    return tuple(dict.fromkeys((*of_side[0], *of_side[1]))), unlike


def skipped_in_words(names: Sequence[str]) -> Iterator[str]:
    """How many tensors look like routers and are none, and which."""
    if names:
        alike = ("tensor that looks like a router", "tensors that look like routers")
        yield f"{number_of(len(names), *alike)}, beyond their numbers ({listed(names, 4)})"


def _tables(sides: Sides, layers: str | None) -> Iterator[tuple[str, bool]]:
    """What can be said of each table by token id of two checkpoints, and whether they are equal."""
    stores = [side.session.store for side in sides if side.session is not None]
    if len(stores) == len(sides):
        tables = [() if side.routers is None else side.routers.tables for side in sides]
        yield from compared_tables(stores, tables, layers)


@contextlib.contextmanager
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
        # results go without tokens; what is refused is refused before the work
        opened = [s.session.on(t) for s, t in zip(sides, tokens, strict=True) if s.session]
        for letter, side, source, one in zip(_LETTERS, sides, tokens, opened, strict=True):
            out = _kept(folder, letter)
            out.parent.mkdir(parents=True, exist_ok=True)
            scan_request = ScanRequest(side.target, out, tokens=source, **request.shared_terms())
            views.append(open_results(scan(scan_request, watch, one)))
        yield views[0], views[1]


def _kept(folder: Path, letter: str) -> Path:
    return folder / f"{letter.lower()}.moegeom"


def _of_layers(results: ResultsView, layers: str | None) -> ResultsView:
    if layers is None:
        return results
    numbers = parse_layers(layers)
    rows = [row for row in results.rows("layers") if layer_of(row["router"]) in numbers]
    return MemoryResults(results.run, {"layers": rows})


def _notes(
    request: DifferenceRequest,
    sides: Sides,
    results: tuple[ResultsView, ResultsView] | None,
    figures: Figures | None,
) -> Iterator[str]:
    for letter, side in zip(_LETTERS, sides, strict=True):
        if absent := layers_without_router(request.layers, side.names):
            yield f"{letter}: {absent}."
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
            "Both sides read the same inputs and are tested as independent: small changes may be "
            "missed."
        )
    if figures.num_tokens[0] != figures.num_tokens[1]:
        first, second = figures.num_tokens
        yield (
            f"A has {number_of(first, 'token')} and B {second:,}: load, and all that depends on "
            "their number, is not compared. Scan equal numbers."
        )


def _not_looked_at(
    request: DifferenceRequest,
    sides: Sides,
    figures: Figures | None,
    compared: Sequence[RouterChange],
) -> Iterator[str]:
    if figures is None:
        both = all(side.session is not None for side in sides)
        how = " (--tokens REC_A --tokens REC_B)" if both else ""
        yield f"how tokens are routed{how}"
    looked_at = [one.experts for one in compared if one.experts is not None]
    yield experts_unseen(looked_at, not request.experts)
    if any(side.results and side.results.run.get("token_tables") for side in sides):
        yield "tables by token id, of which results hold counts alone"
    yield "what else changed in the model: routers with equal weights read other hidden states"


def experts_unseen(looked_at: Sequence[ExpertsChange], may_ask: bool = False) -> str:
    """What is not known of the experts: beyond samples, or why at all."""
    tensors = dict.fromkeys(name for one in looked_at for name in one.tensors)
    reasons = [one.reason for one in looked_at if one.reason]
    if not tensors:
        return f"expert weights ({reasons[0]})" if reasons else "expert weights"
    most = number_of(max(one.num_bytes for one in looked_at), "byte")
    text = f"expert weights beyond samples (the first {most} of {listing(tensors)}"
    sampled, total = sum(len(o.sampled) for o in looked_at), sum(o.num_experts for o in looked_at)
    text += f" of {sampled:,} of {number_of(total, 'expert')}" if sampled < total else ""
    text += "; --experts: more" if may_ask else ""
    return f"{text}{f'; in part not: {reasons[0]}' if reasons else ''})"


#: Probability that any figure is called changed by chance.
LEVEL = 0.05

Row = Mapping[str, Any]


def figure_changes(a: ResultsView, b: ResultsView) -> Figures | None:
    r"""Tests of "no difference" for each router and each figure of ``layers`` that has an error.

    :math:`t = (x_B - x_A) / \sqrt{s_A^2 + s_B^2}` with the degrees of freedom of Welch and
    Satterthwaite from the numbers of blocks less 1, two-sided, Holm over all of them at LEVEL. The
    two sets of tokens are taken as independent: for the same text on both sides that is on the safe
    side. None unless both were measured on tokens.
    """
    rows = (_rows(a), _rows(b))
    common = [router for router in rows[0] if router in rows[1]]
    if not common:
        return None
    versions = tuple(results.run.get("column_versions", {}) for results in (a, b))
    tests: list[tuple[FigureChange, float]] = []
    left_out: dict[str, list[str]] = {}
    columns = (c for metric in METRICS.all() for c in metric.columns.get("layers", ()))
    texts = {column.name: column.text for column in columns if column.has_se}
    for router in common:
        pair = (rows[0][router], rows[1][router])
        for column, text in texts.items():
            outcome = _one(router, column, text, pair, (versions[0], versions[1]))
            if isinstance(outcome, tuple):
                tests.append(outcome)
            elif outcome and column not in left_out.setdefault(outcome, []):
                left_out[outcome].append(column)
    tokens = tuple(max(row["num_tokens"] or 0 for row in side.values()) for side in rows)
    return Figures(_judged(tests), LEVEL, (tokens[0], tokens[1]), left_out)


def _judged(tests: Sequence[tuple[FigureChange, float]]) -> list[FigureChange]:
    rejected = holm_rejects([test.p_value for test, _ in tests], LEVEL)
    return [
        dataclasses.replace(
            test,
            is_significant=is_rejected,
            # both directions share the level
            detectable=detectable_shift(test.error, freedom, LEVEL / 2.0, len(tests)),
        )
        for (test, freedom), is_rejected in zip(tests, rejected, strict=True)
    ]


_FEW_BLOCKS = "no standard error: fewer than two blocks of documents"


def _one(
    router: str, column: str, text: str, pair: tuple[Row, Row], versions: tuple[Row, Row]
) -> tuple[FigureChange, float] | str | None:
    """The test and its degrees of freedom, else the reason for none; None where a side lacks the
    figure.
    """
    values = _numbers(column, pair)
    if values is None:
        return None
    if versions[0].get(column) != versions[1].get(column):
        return "another version of the metric"
    tokens = [row["num_tokens"] or 0 for row in pair]
    if tokens[0] != tokens[1] and not is_free_of_t(column):
        return "depends on the number of tokens"
    if min(tokens) < least_tokens(column):
        return "too few tokens for its standard error"
    errors = _numbers(f"{column}_se", pair)
    if errors is None:
        return _FEW_BLOCKS
    both = math.hypot(*errors)
    if both == 0.0:
        return "no standard error: leaving out documents changes nothing"
    freedom = welch_freedom(errors, [row["num_blocks"] - 1 for row in pair])
    if math.isnan(freedom):
        return _FEW_BLOCKS
    p_value = p_differs(values[1] - values[0], both, freedom)
    return FigureChange(router, column, text, *values, both, p_value), freedom


def _numbers(column: str, pair: tuple[Row, Row]) -> tuple[float, float] | None:
    """The figure on both sides; None unless both are numbers."""
    values = [row.get(column) for row in pair]
    numbers = [float(value) for value in values if value is not None and math.isfinite(value)]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _rows(results: ResultsView) -> dict[str, Row]:
    """The row of each router for all tokens, where it was measured on any."""
    return {
        row["router"]: row
        for row in results.rows("layers")
        if is_stored_whole(row) and row.get("num_tokens")
    }


#: Figures whose expected value does not depend on the number of tokens: means over tokens or over
#: pairs of tokens, quantiles with many tokens below them, and what was corrected for it. All others
#: do: the largest of many counts, entropies and squares of counts, shares of sets seen before and
#: the length of a mean move with T even when nothing else does, so a figure that is not listed is
#: compared at equal T only.
FREE_OF_T: tuple[str, ...] = (
    "ambiguous_share",
    "bf16_flip_share*",
    "boundary_distance*_p01",
    "boundary_distance*_p50",
    "chosen_entropy_*",
    "chosen_score_share",
    "distance_exact_share",
    "first_choice_repeat",
    "load_cv_squared_debiased",
    "log_sum_exp_mean",
    "margin_p01",
    "margin_p50",
    "mean_pairwise_cosine",
    "neighbour_overlap",
    "neighbour_same_set",
    "noise_sigmas_p01",
    "noise_sigmas_p50",
    "overlap_output",
    "participation_ratio",
    "pre_norm_angle_p01",
    "pre_norm_angle_p50",
    "rounding_sigmas_p01",
    "rounding_sigmas_p50",
    "routing_entropy_*",
    "z_loss",
)

#: Quantiles with few tokens below them have no standard error by leaving out documents: the share,
#: by the end of the name.
QUANTILES: dict[str, float] = {"_p001": 0.001, "_p01": 0.01}

#: Tokens that must lie below a quantile on both sides.
LEAST_BELOW = 100


def is_free_of_t(column: str) -> bool:
    """True for a figure that may be compared between different numbers of tokens."""
    return any(fnmatchcase(column, pattern) for pattern in FREE_OF_T)


def least_tokens(column: str) -> float:
    """Tokens that both sides must have for the figure to be tested."""
    share = next((s for end, s in QUANTILES.items() if column.endswith(end)), None)
    return 0.0 if share is None else LEAST_BELOW / share
