"""``boundary-report``: a scan that also routes the tokens in other arithmetics."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.core.tokens import InputNoise
from moegeom.pipeline import Watch, scan
from moegeom.studies.boundary.record import BoundaryRequest
from moegeom.studies.boundary.recorded_noise import recorded_noise
from moegeom.tokens.open import open_tokens
from moegeom.variants.arithmetic import arithmetic

#: What is asked when nothing is asked: from harmless to harmful.
USUAL = ("float32-blocks", "tf32", "bf16", "bf16-logits")


def measure_boundary(request: BoundaryRequest, watch: Watch | None = None) -> Path:
    """The results directory, with every arithmetic as a variant.

    Raises
    ------
    MoeGeomError
        As ``scan``; UsageError without tokens and for an unknown arithmetic.
    """
    if request.tokens is None and request.source is None:
        raise UsageError(
            "boundary-report needs tokens: how near they are to a boundary is not in the weights.",
            "moegeom capture CKPT --text FILE --keep hidden --out REC, then add --tokens REC.",
        )
    names = request.arithmetics or USUAL
    for name in (*names, *([request.reference] if request.reference else ())):
        arithmetic(name)  # an unknown name ends here, before anything is read
    noise = _noise(request, request.noise) if isinstance(request.noise, str) else request.noise
    unique = tuple(dict.fromkeys(names))
    return scan(dataclasses.replace(request, arithmetics=unique, noise=noise), watch)


def _noise(request: BoundaryRequest, asked: str) -> InputNoise | dict[str, InputNoise]:
    """A number, or what two recordings of the same tokens show."""
    try:
        scale = float(asked)
    except ValueError:
        if request.tokens is None:
            raise UsageError("--noise REC needs --tokens, a recording of the same text.") from None
        pair = (request.tokens, asked)
        return recorded_noise(*(open_tokens(path, request.stage, None, ()) for path in pair))
    if not 0.0 < scale < math.inf:
        raise UsageError(
            f"--noise {asked}: expected a positive share of the input's rms.",
            "Such as 0.002; or name a second recording of the same text.",
        )
    return InputNoise(scale)
