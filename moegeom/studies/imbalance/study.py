"""``moegeom imbalance``: what makes loads uneven, and what evening them would cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import write_whole
from moegeom.core.router import Router
from moegeom.engine.plan import SAMPLE_TOKENS
from moegeom.engine.prepared import unavailable
from moegeom.engine.sample import Sample
from moegeom.geometry.border_shares import CONVENTIONS, TieCount
from moegeom.geometry.reference_laws import FIGURES, SEEDS
from moegeom.kernels.batch import RUN_TOKENS
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.router.expert_tensors import open_experts
from moegeom.studies.announced import announce
from moegeom.studies.imbalance import STUDY
from moegeom.studies.imbalance.record import Imbalance, ImbalanceRequest, RouterImbalance
from moegeom.studies.imbalance.router import router_imbalance, sampled
from moegeom.studies.written import refuse_out, write_rows

#: Columns of what counting ties says.
_COUNTS = tuple(f.name for f in dataclasses.fields(TieCount) if f.name != "ratios_log10")

#: Probability that a run over even routers calls any of them uneven; shared by its routers.
LEVEL = 0.05


def imbalance(request: ImbalanceRequest, watch: Watch | None = None) -> Imbalance:
    """What makes the loads of each router uneven, on a sample of its tokens, and the price of a
    bias that would even them.

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
    >>> imbalance = mg.imbalance(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=2)
    >>> [(router.cause, router.evening.meaning) for router in imbalance.value.routers]
    [('mean input', 'holds, no bias now')]
    """
    if request.measure is not None:
        refuse_out(request.measure, request.overwrite, (".parquet",), "--measure")
        if request.measure == request.out:
            raise UsageError(f"--out and --measure name one file, {request.out}.")
    if request.radius is not None and not 0.0 < request.radius < math.inf:
        raise UsageError(f"--radius {request.radius:g}: expected a length above 0.")
    opened, source = STUDY.open(request)
    recorded = opened.recorded
    # a bias moves experts that were not chosen: their scores must be known
    for router in recorded:
        if (why := unavailable(router, source.facts).get("selection")) is not None:
            raise RecordingError(
                f"{source.facts.name}: cannot say what makes the loads uneven at router "
                f"{router.name}: {why}.",
                "A bias also brings in experts that were not chosen. Record router inputs, or all "
                "logits.",
            )
    tensors = {}
    if request.experts:
        tensors = {router.name: open_experts(opened.store, router) for router in recorded}
        announce(tensors.values(), request.yes, watch)
    if watch:
        watch.start(len(recorded) * min(source.facts.num_tokens, SAMPLE_TOKENS))
    kernels, level = load_kernels(request.backend), LEVEL / len(recorded)
    routers, samples = [], []
    for router in recorded:
        if watch:
            watch.begin(router.name)
        sample = opened.sample(router, sampled(router), advance=watch.advance if watch else None)
        # without its inputs, the largest arrays there are: no more than one router's at a time
        samples.append(Sample(token=sample.token, num_non_finite=sample.num_non_finite))
        gates = tensors.get(router.name)
        routers.append(router_imbalance(router, sample, kernels, level, request, gates))
    if request.out is not None and request.out.suffix == ".parquet":
        write_rows(request.out, [row for one in routers for row in _law_rows(one)])
    elif request.out is not None:
        write_biases(request.out, recorded, routers)
    if request.measure is not None:
        write_rows(request.measure, [row for one in routers for row in _measured_rows(one)])
    return Imbalance(
        run=opened.facts(recorded),
        routers=tuple(routers),
        left_out=opened.left_out,
        seeds=SEEDS,
        unit="document" if source.facts.has_documents else f"run of {RUN_TOKENS} tokens",
        level=level,
        sample=opened.sample_counts(samples),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
        measure=None if request.measure is None else request.measure.name,
    )


# -------------------------------------------------------------------------------------------- files
def write_biases(out: Path, routers: Sequence[Router], records: Sequence[RouterImbalance]) -> None:
    """The change that evens the loads and the one that takes the mean away, ``centring_``.

    Each as ``change`` and as ``selection_bias`` (the stored one plus the change), in both
    precisions: ``<router>/change_float64``, ``<router>/centring_selection_bias_float32`` and so on.
    A file that is there at the end is whole.
    """
    arrays = {}
    for router, one in zip(routers, records, strict=True):
        for prefix, change in (("", one.evening.change), ("centring_", one.centring.change)):
            added = np.array(change)
            own = router.selection_bias
            stored = np.zeros(len(added)) if own is None else own
            for name, values in (("change", added), ("selection_bias", stored + added)):
                for dtype in ("float32", "float64"):
                    arrays[f"{router.name}/{prefix}{name}_{dtype}"] = values.astype(dtype)
    if out.suffix == ".npz":
        write_whole(out, lambda file: np.savez(file, allow_pickle=False, **arrays))
    else:
        from safetensors.numpy import save

        units = {f"{one.router}/unit": one.evening.score_unit for one in records}
        write_whole(out, save(arrays, metadata=units))


def _law_rows(one: RouterImbalance) -> Iterator[dict[str, Any]]:
    """One row for each law."""
    for law in one.laws:
        errors = {f"{name}_se": getattr(law.errors, name) for name in FIGURES}
        yield {"router": one.router, "law": law.law, **dataclasses.asdict(law.figures), **errors}


def _measured_rows(one: RouterImbalance) -> Iterator[dict[str, Any]]:
    """One row for each law, order and width; what counting says beside the balls."""
    for share in one.measured:
        row = {"router": one.router, **dataclasses.asdict(share)}
        counted = row.pop("counted") or {}
        ratios = counted.get("ratios_log10", {})
        row |= {name: counted.get(name) for name in _COUNTS}
        yield row | {f"ratio_to_order_1_log10_{name}": ratios.get(name) for name in CONVENTIONS}
