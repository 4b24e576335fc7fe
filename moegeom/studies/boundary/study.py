"""``boundary-report``: a scan that also routes the tokens in other arithmetics."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.engine.session import Session
from moegeom.pipeline import Watch, scan
from moegeom.studies.announced import announce_experts
from moegeom.studies.boundary.record import BoundaryRequest
from moegeom.studies.boundary.recorded_noise import asked_noise
from moegeom.variants.arithmetic import arithmetic

#: What is asked when nothing is asked: from harmless to harmful.
USUAL = ("float32-blocks", "tf32", "bf16", "bf16-logits")


def measure_boundary(request: BoundaryRequest, watch: Watch | None = None) -> Path:
    """The results directory, with every arithmetic as a variant.

    ``checkpoint`` may be results of an earlier boundary report. Results stay in memory, or are kept
    in the folder ``out``.

    Raises
    ------
    MoeGeomError
        As ``scan``; UsageError without tokens, for an unknown arithmetic, and when more than 2 GB
        of experts are to be read without ``yes``; RouterError where there are none.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> report = mg.boundary_report(
    ...     f"{sample}/step_1500", f"{sample}/rec/step_1500", arithmetics="bf16", layers=0
    ... )
    >>> [variant.name for variant in report.value.variants]
    ['bf16']
    """
    if request.tokens is None:
        raise UsageError(
            "boundary-report needs tokens: how near they are to a boundary is not in the weights.",
            "moegeom capture CKPT --text FILE --keep hidden --out REC, then add --tokens REC.",
        )
    names = request.arithmetics or USUAL
    for name in (*names, *([request.reference] if request.reference else ())):
        arithmetic(name)  # an unknown name ends here, before anything is read
    opened = Session.open(request, request.prior, with_listed=True)
    if request.experts:
        announce_experts(opened, request.yes, watch)
    noise, unique = asked_noise(request.noise, opened), tuple(dict.fromkeys(names))
    return scan(dataclasses.replace(request, arithmetics=unique, noise=noise), watch, opened)
