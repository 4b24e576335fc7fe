"""``moegeom balance``: does a selection bias exist that balances these tokens?

It separates a bad update of the bias from a bad router (docs/balance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.files import write_whole
from moegeom.core.router import Router
from moegeom.core.tokens import SourceFacts
from moegeom.engine.plan import SAMPLE_TOKENS
from moegeom.engine.prepared import unavailable
from moegeom.kernels.batch import RUN_TOKENS
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import (
    Watch,
)
from moegeom.studies.balance import STUDY
from moegeom.studies.balance.record import Balance, BalanceRequest
from moegeom.studies.balance.router import balance_router, read_sample

#: Probability that a run over even routers calls any of them uneven; shared by its routers.
LEVEL = 0.05


def balance(request: BalanceRequest, watch: Watch | None = None) -> Balance:
    """The bias that balances each router on a sample of the tokens, and what it means.

    Raises
    ------
    RecordingError
        When the recording does not hold the scores of all experts, or records none of the routers.
    UsageError
        When ``out`` exists or cannot be written.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> found = mg.balance(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=0)
    >>> [router.meaning for router in found.value.routers]
    ['balanced']
    """
    opened, source = STUDY.open(request)
    recorded = opened.recorded
    refuse_partial_scores(recorded, source.facts, "say which bias balances")
    if watch:
        watch.start(len(recorded) * min(source.facts.num_tokens, SAMPLE_TOKENS))
    kernels, level = load_kernels(request.backend), LEVEL / len(recorded)
    found, samples = [], []
    for router in recorded:
        if watch:
            watch.begin(router.name)
        samples.append(read_sample(router, source, request, watch.advance if watch else None))
        found.append(balance_router(router, samples[-1], kernels, level, request.seed))
    if request.out is not None:
        changes, units = [one.change for one in found], [one.score_unit for one in found]
        write_changes(request.out, recorded, changes, units)
    return Balance(
        run=opened.facts(recorded),
        routers=tuple(found),
        left_out=opened.left_out,
        num_tokens=found[0].num_tokens,
        unit="document" if source.facts.has_documents else f"run of {RUN_TOKENS} tokens",
        level=level,
        sample=opened.sample_counts(samples),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
    )


def write_changes(
    out: Path,
    routers: Sequence[Router],
    changes: Sequence[Sequence[float]],
    score_units: Sequence[str],
) -> None:
    """``change`` and ``selection_bias`` (the stored one plus the change) in both precisions.

    Arrays are called ``<router>/change_float64`` and so on. A file that is there at the end is
    whole.
    """
    arrays = {}
    for router, each in zip(routers, changes, strict=True):
        change = np.array(each)
        stored = np.zeros(len(change)) if router.selection_bias is None else router.selection_bias
        for name, values in (("change", change), ("selection_bias", stored + change)):
            for dtype in ("float32", "float64"):
                arrays[f"{router.name}/{name}_{dtype}"] = values.astype(dtype)
    if out.suffix == ".npz":
        write_whole(out, lambda file: np.savez(file, allow_pickle=False, **arrays))
    else:
        from safetensors.numpy import save

        named = zip(routers, score_units, strict=True)
        units = {f"{router.name}/unit": unit for router, unit in named}
        write_whole(out, save(arrays, metadata=units))


def refuse_partial_scores(routers: Sequence[Router], facts: SourceFacts, task: str) -> None:
    """A bias moves experts that were not chosen: their scores must be known."""
    for router in routers:
        why = unavailable(router, facts).get("selection")
        if why is not None:
            raise RecordingError(
                f"{facts.name}: cannot {task} router {router.name}: {why}.",
                "A bias also brings in experts that were not chosen. Record router inputs, or all "
                "logits.",
            )
