"""``boundary-report``: a scan that also routes the tokens in other arithmetics."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.core.input_noise import InputNoise
from moegeom.pipeline import ScanRequest, Watch, scan
from moegeom.studies.recorded_noise import recorded_noise
from moegeom.tokens.open import open_tokens
from moegeom.variants.arithmetic import arithmetic

#: What is asked when nothing is asked: from harmless to harmful.
USUAL = ("float32-blocks", "tf32", "bf16", "bf16-logits")


@dataclass(frozen=True)
class ExposureRequest(ScanRequest):
    """A scan request whose ``out`` may be left open; no ``arithmetics`` means the usual ones.

    ``noisy`` is a share of the rms of the inputs as text, or a second recording of the tokens.
    """

    out: Path | None = None  # type: ignore[assignment] - measure_exposure fills it in
    noisy: str | None = None


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
    if request.noisy is not None and request.tokens is None:
        raise UsageError("--noise REC needs --tokens, a recording of the same text.")
    names = request.arithmetics or USUAL
    for name in (*names, *([request.reference] if request.reference else ())):
        arithmetic(name)  # an unknown name ends here, before anything is read
    name = Path(request.checkpoint.rstrip("/")).resolve().name
    out = request.out or Path("runs") / f"{name}.boundary"
    asked = {field.name: getattr(request, field.name) for field in dataclasses.fields(ScanRequest)}
    unique = tuple(dict.fromkeys(names))
    if request.noisy is not None:
        asked["noise"] = _noise(request)
    return scan(ScanRequest(**{**asked, "out": out, "arithmetics": unique}), watch)


def _noise(request: ExposureRequest) -> InputNoise | dict[str, InputNoise]:
    """A number, or what two recordings of the same tokens show."""
    assert request.noisy is not None
    try:
        scale = float(request.noisy)
    except ValueError:
        assert request.tokens is not None, "measure_exposure has seen it"
        pair = (request.tokens, request.noisy)
        return recorded_noise(*(open_tokens(path, request.stage, None, ()) for path in pair))
    if not 0.0 < scale < math.inf:
        raise UsageError(
            f"--noise {request.noisy}: expected a positive share of the input's rms.",
            "Such as 0.002; or name a second recording of the same text.",
        )
    return InputNoise(scale)
