"""``moegeom space``: what the data let each router use, and what the mean input costs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.geometry.border_shares import CONVENTIONS
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.router.expert_tensors import open_experts
from moegeom.studies.announced import announce
from moegeom.studies.balance.study import (
    LEVEL,
    refuse_partial_scores,
    write_changes,
)
from moegeom.studies.space import STUDY
from moegeom.studies.space.experts import expert_ranks
from moegeom.studies.space.laws import FIELDS, SEEDS
from moegeom.studies.space.record import RouterSpace, RouterSpaces, SpaceRequest, TieCount
from moegeom.studies.space.router import router_space, sampled
from moegeom.studies.written import refuse_out, write_rows


def space(request: SpaceRequest, watch: Watch | None = None) -> RouterSpaces:
    """Reference laws beside a sample of the tokens of each router, and what makes loads uneven.

    Raises
    ------
    RecordingError
        When the recording does not hold the scores of all experts, or records none of the routers.
    UsageError
        When ``out`` or ``measure`` exists or cannot be written, for a radius that is not positive,
        without tokens, and when more than 2 GB of experts are to be read without ``yes``.
    RouterError
        When there are no experts beside a router whose experts are asked for.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-collapsed"
    >>> found = mg.space(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=2)
    >>> [router.meaning for router in found.value.routers]
    ['mean input']
    """
    if request.measure is not None:
        refuse_out(request.measure, request.overwrite, (".parquet",), "--measure")
        if request.measure == request.out:
            raise UsageError(f"--out and --measure name one file, {request.out}.")
    if request.radius is not None and not 0.0 < request.radius < math.inf:
        raise UsageError(f"--radius {request.radius:g}: expected a length above 0.")
    opened, source = STUDY.open(request)
    recorded = opened.recorded
    refuse_partial_scores(recorded, source.facts, "say what makes the loads uneven at")
    tensors = {}
    if request.experts:
        tensors = {router.name: open_experts(opened.store, router) for router in recorded}
        announce(tensors.values(), request.yes, watch)
    if watch:
        watch.start(len(recorded) * min(source.facts.num_tokens, SMALL_SAMPLE_TOKENS))
    kernels, found, samples = load_kernels(request.backend), [], []
    for router in recorded:
        if watch:
            watch.begin(router.name)
        sample = opened.sample(
            router, sampled(router), SMALL_SAMPLE_TOKENS, advance=watch.advance if watch else None
        )
        samples.append(sample)
        level, is_measured = LEVEL / len(recorded), request.measure is not None
        one = router_space(
            router,
            sample,
            kernels,
            level,
            request.seed,
            radius=request.radius,
            is_measured=is_measured,
        )
        if request.experts:
            ranks = expert_ranks(tensors[router.name], sample, one.dimension, request.seed)
            one = dataclasses.replace(one, experts=ranks)
        found.append(one)
    if request.out is not None:
        _write(request.out, recorded, found)
    if request.measure is not None:
        _write_measure(request.measure, found)
    return RouterSpaces(
        run=opened.facts(recorded),
        routers=tuple(found),
        left_out=opened.left_out,
        seeds=SEEDS,
        sample=opened.sample_counts(samples),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
        measure=None if request.measure is None else request.measure.name,
    )


def _write(out: Path, routers: Sequence[Router], found: Sequence[RouterSpace]) -> None:
    if out.suffix != ".parquet":
        changes = [one.centring.change for one in found]
        units = [router.rule.selection_score_unit for router in routers]
        write_changes(out, routers, changes, units)
        return
    rows = [
        {
            "router": one.router,
            "law": law.law,
            **dataclasses.asdict(law.figures),
            **{f"{name}_se": getattr(law.errors, name) for name in FIELDS},
        }
        for one in found
        for law in one.laws
    ]
    write_rows(out, rows)


def _write_measure(out: Path, found: Sequence[RouterSpace]) -> None:
    """One row for each router, law, order and width; what counting says beside the balls."""
    counts = [field.name for field in dataclasses.fields(TieCount) if field.name != "ratios_log10"]
    rows = []
    for one in found:
        for share in one.measured:
            row = {"router": one.router, **dataclasses.asdict(share)}
            counted = row.pop("counted") or {}
            ratios = counted.get("ratios_log10", {})
            row |= {name: counted.get(name) for name in counts}
            row |= {f"ratio_to_order_1_log10_{name}": ratios.get(name) for name in CONVENTIONS}
            rows.append(row)
    write_rows(out, rows)
