"""``boundary-report``: a scan that also routes the tokens in other arithmetics, and its noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, InputNoise, TokenSource
from moegeom.engine.batch import refuse_non_finite
from moegeom.engine.choice import through_norm
from moegeom.engine.session import Session
from moegeom.engine.sources import open_source
from moegeom.geometry.noise import noise_between
from moegeom.pipeline import Watch, scan
from moegeom.studies.announced import announce_experts
from moegeom.studies.boundary.record import BoundaryRequest
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.variants.emulated import arithmetic

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
    opened = Session.open(request, with_listed=True)
    if request.experts:
        announce_experts(opened, request.yes, watch)
    noise, unique = asked_noise(request.noise, opened), tuple(dict.fromkeys(names))
    return scan(dataclasses.replace(request, arithmetics=unique, noise=noise), watch, opened)


# -------------------------------------------------------------------------------------------- noise
#: Tokens that are compared at each router.
_MOST = 16 * TILE


def asked_noise(
    noise: str | InputNoise | Mapping[str, InputNoise] | None, opened: Session
) -> InputNoise | Mapping[str, InputNoise] | None:
    """A share of the rms as it is given, or what two recordings of the same tokens show.

    Raises
    ------
    RecordingError
        As :func:`recorded_noise`.
    UsageError
        For a share that is none.
    """
    if not isinstance(noise, str):
        return noise
    try:
        scale = float(noise)
    except ValueError:
        again = second_recording(noise, opened)
        assert opened.source is not None
        skips = opened.terms.skips_non_finite
        return recorded_noise(opened.source, again, opened.chosen, skips)
    if not 0.0 < scale < math.inf:
        raise UsageError(
            f"--noise {noise}: expected a positive share of the input's rms.",
            "Such as 0.002; or name a second recording of the same text.",
        )
    return InputNoise(scale)


def second_recording(path: str, opened: Session) -> TokenSource:
    """Another recording for the routers of a session."""
    source = open_source(opened.terms, path, opened.chosen, opened.routers.routers)
    assert source is not None
    return source


def recorded_noise(
    first: TokenSource,
    second: TokenSource,
    routers: Sequence[Router] = (),
    skips_non_finite: bool = False,
) -> dict[str, InputNoise]:
    """Noise of one of the two runs at every router that both recorded, in units of the input.

    What was recorded before the norm is taken through that of one of the ``routers``, or left out.
    Tokens that a router cannot be computed on, in one of the runs, are left out and counted.

    Raises
    ------
    NonFiniteError
        At the first router with such a token, unless it ``skips_non_finite`` and others are left.
    RecordingError
        When one holds no router inputs, they share no router, or their tokens differ.
    """
    for source in (first, second):
        if source.facts.stage not in INPUT_STAGES:
            raise RecordingError(
                f"{source.facts.name}: holds {source.facts.stage.replace('_', ' ')}; noise on the "
                "inputs is measured from router inputs.",
                "moegeom capture --keep hidden records them.",
            )
    if first.facts.stage != second.facts.stage:
        raise RecordingError(
            f"{first.facts.name} holds {first.facts.stage}, {second.facts.name} "
            f"{second.facts.stage}; expected the same stage."
        )
    names = [name for name in first.facts.routers if name in second.facts.routers]
    by_name = {router.name: router for router in routers}
    if first.facts.stage == "pre_norm":
        names = [name for name in names if name in by_name]
    if not names:
        raise RecordingError(
            f"{first.facts.name} and {second.facts.name} record no router in common."
        )
    num_tokens = _same_tokens(first, second)
    return {
        name: _noise(first, second, name, by_name.get(name), num_tokens, skips_non_finite)
        for name in names
    }


def _same_tokens(first: TokenSource, second: TokenSource) -> int:
    """How many tokens are compared; they are the same ones in the same order."""
    (name, number), (other, others) = ((s.facts.name, s.facts.num_tokens) for s in (first, second))
    differs, compared = "", min(number, others, _MOST)
    if number != others:
        differs = f"{name} holds {number_of(number, 'token')}, {other} {others:,}"
    mine, theirs = (source.read_columns(0, compared) for source in (first, second))
    for field in ("document", "position", "token_id"):
        at = np.flatnonzero(getattr(mine, field) != getattr(theirs, field))
        if len(at) and not differs:
            of = field.replace("_", " ")
            differs = f"{other}: token {at[0]} has another {of} than in {name}"
    if differs:
        raise RecordingError(
            f"{differs}; expected the same tokens in the same order.",
            "Record both runs on the same text.",
        )
    return compared


def _noise(
    first: TokenSource,
    second: TokenSource,
    router: str,
    loaded: Router | None,
    num_tokens: int,
    skips_non_finite: bool,
) -> InputNoise:
    values = [source.read_values(router, 0, num_tokens) for source in (first, second)]
    if values[0].shape != values[1].shape:
        raise RecordingError(
            f"router {router}: {first.facts.name} has {values[0].shape[1]} values a token, "
            f"{second.facts.name} {values[1].shape[1]}."
        )
    if loaded is not None and first.facts.stage == "pre_norm":
        values = [through_norm(read, loaded, first.facts.name) for read in values]
    finite = [_is_finite(read, loaded) for read in values]
    is_left = finite[0] & finite[1]
    for source, are_finite in zip((first, second), finite, strict=True):
        if not skips_non_finite or not is_left.any():
            lost = tuple(np.flatnonzero(~are_finite).tolist())
            refuse_non_finite(router, source.facts.name, lost, num_tokens)
    values = [read[is_left] for read in values]
    noise = noise_between(*values)
    size = float(np.sqrt((values[0].astype(np.float64) ** 2).mean()))
    return InputNoise(
        **vars(noise),
        is_relative=False,
        relative=noise.scale / size if size else 0.0,
        num_non_finite=int((~is_left).sum()),
    )


def _is_finite(
    values: Float[np.ndarray, "tokens hidden"], loaded: Router | None
) -> Bool[np.ndarray, "tokens"]:
    """Which tokens the router can be computed on: their logits are finite, as everywhere else."""
    is_finite = np.isfinite(values).all(axis=1)
    if loaded is not None and values.shape[1] == loaded.weight.shape[1]:
        with np.errstate(invalid="ignore", over="ignore"):
            is_finite &= np.isfinite(values @ loaded.weight.T).all(axis=1)
    return np.asarray(is_finite)
