"""``boundary-report``: a scan that also routes the tokens in other arithmetics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.pipeline import ScanRequest, Watch, scan
from moegeom.variants.arithmetic import arithmetic

#: What is asked when nothing is asked: from harmless to harmful.
USUAL = ("float32-blocks", "tf32", "bf16", "bf16-logits")


@dataclass(frozen=True)
class ExposureRequest(ScanRequest):
    """A scan request whose ``out`` may be left open; no ``arithmetics`` means the usual ones."""

    out: Path | None = None  # type: ignore[assignment] - measure_exposure fills it in


def measure_exposure(request: ExposureRequest, watch: Watch | None = None) -> Path:
    """The results directory, with every arithmetic as a variant.

    Raises
    ------
    MoeGeomError
        As ``scan``; UsageError without tokens and for an unknown arithmetic.
    """
    if request.tokens is None and request.source is None:
        raise UsageError(
            "boundary-report needs tokens: how near they are to a wall is not in the weights.",
            "moegeom capture CKPT --text FILE --keep hidden --out REC, then add --tokens REC.",
        )
    names = request.arithmetics or USUAL
    for name in (*names, *([request.reference] if request.reference else ())):
        arithmetic(name)  # an unknown name ends here, before anything is read
    name = Path(request.checkpoint.rstrip("/")).resolve().name
    out = request.out or Path("runs") / f"{name}.boundary"
    asked = {field.name: getattr(request, field.name) for field in dataclasses.fields(ScanRequest)}
    unique = tuple(dict.fromkeys(names))
    return scan(ScanRequest(**{**asked, "out": out, "arithmetics": unique}), watch)
