"""What ``moegeom cells`` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, RouterError, UsageError
from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.engine.parameters import option_of
from moegeom.engine.request import TokensRequest
from moegeom.routing_cells.pictures.page import PictureOptions
from moegeom.routing_cells.pictures.views import check_picture
from moegeom.tokens.foreign.npy_arrays import read_numbers


@dataclass(frozen=True)
class CellsRequest(TokensRequest):
    """What was asked for, by the command line or, for the fields below, from Python alone.

    ``weights`` is a bare matrix instead of a checkpoint, with the ``top_k`` that is asked for.
    ``radius`` bounds the search around the centre of the slice. ``expert_set`` asks about one set
    of experts. ``plot`` is a picture of one router.

    Parameters
    ----------
    box
        Only what lies within so far of the centre along every direction of the slice.
    hops, at
        Only the cells that so many facets, or fewer, part from those of the tokens ``at``.
    inradius
        The radius of the largest ball in each cell, in the table of ``out``.
    random_routers
        Count the cells of so many random routers with the same row norms too.
    band
        Shade in the picture what lies within so far of a facet.
    frame
        Half the side of what the picture shows; without it there is room for the tokens.
    pixels
        Pixels a side where facets are curved.
    width, dpi
        Width of the picture in millimetres (one column is 89), and dots per inch where they count.
    """

    weights: Path | None = None
    subspace: str | None = None
    radius: float | None = None
    box: float | None = None
    hops: int | None = None
    at: tuple[int, ...] = ()
    expert_set: tuple[int, ...] | None = None
    certify: bool = False
    tie_broken: bool = False
    inradius: bool = False
    random_routers: int = 0
    vertices: int = 10**7
    out: Path | None = None
    plot: Path | None = None
    view: str = "cells"
    expert: int | None = None
    band: float | None = None
    frame: float | None = None
    pixels: int = 512
    caption: bool = False
    width: float = 89.0
    dpi: int = 300

    @property
    def picture(self) -> PictureOptions:
        """What was asked of the picture. Raises UsageError for a value out of range."""
        return PictureOptions(self.view, self.expert, self.band, self.width, self.caption, self.dpi)


def check_request(request: CellsRequest) -> None:
    """Raises UsageError for what cannot be meant, before anything is read.

    Parameters that the command line has are named as they are typed there.
    """
    if (request.weights is None) == (not request.checkpoint):
        raise UsageError("expected a checkpoint, or --weights FILE.npz, and not both.")
    if request.weights is not None and request.asked.top_k is None:
        raise UsageError("--weights needs --top-k K: a matrix does not say how many are chosen.")
    if request.weights is not None and request.tokens is not None:
        raise UsageError("--tokens goes with a checkpoint, not with --weights.")
    bounds = bounds_of(request)
    if len(bounds) > 1:
        raise UsageError(f"{bounds[0]} and {bounds[1]} exclude each other.")
    for name in ("radius", "box", "frame"):
        value = getattr(request, name)
        if value is not None and not 0.0 < value < np.inf:
            raise UsageError(f"{_typed(name)} {value:g}: expected a positive number.")
    for name, (least, most, words) in _RANGES.items():
        value = getattr(request, name)
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name} {value}: expected {words}.")
    if (request.hops is None) != (not request.at):
        raise UsageError("hops goes with at, the tokens to begin at.")
    if request.at and request.tokens is None:
        raise UsageError("at names tokens of a recording: add --tokens REC.")
    _refuse_alone(request)
    _check_plot(request)
    if request.certify and request.expert_set is None and request.out is None:
        raise UsageError("--certify goes with --expert-set or --out: what it checks is written.")


#: Fields that the command line has no option for.
_OF_PYTHON = frozenset(
    ("box", "hops", "at", "inradius", "random_routers", "band", "frame", "pixels", "width", "dpi")
)

#: The least and the largest of what such a field may be, and that in words.
_RANGES = {
    "hops": (0, 2**31, "how many facets to cross, such as 1 or 2; with 0 the token's own cell"),
    "random_routers": (0, 1000, "0 to 1,000 routers"),
    "pixels": (8, 4096, "8 to 4,096 pixels a side"),
}


def _typed(name: str) -> str:
    """A parameter as the one who gave it wrote it."""
    return name if name in _OF_PYTHON else option_of(name)


def bounds_of(request: CellsRequest) -> list[str]:
    """What bounds the search, as it was given: nobody is told of what they did not type."""
    names = ("radius", "box", "hops")
    return [_typed(name) for name in names if getattr(request, name) is not None]


#: Options that mean nothing without another one, and what they are when they are not given.
_GOES_WITH: dict[str, tuple[str, object]] = {
    "view": ("plot", "cells"),
    "band": ("plot", None),
    "frame": ("plot", None),
    "caption": ("plot", False),
    "inradius": ("out", False),
}

#: Options that a question about one set of experts has no use for.
_NOT_WITH_EXPERT_SET: dict[str, object] = {
    "radius": None,
    "hops": None,
    "plot": None,
    "out": None,
    "tie_broken": False,
    "random_routers": 0,
}


def _refuse_alone(request: CellsRequest) -> None:
    """Raises UsageError for options that would be passed over."""
    for name, (wanted, default) in _GOES_WITH.items():
        if getattr(request, name) != default and getattr(request, wanted) is None:
            raise UsageError(f"{_typed(name)} goes with {_typed(wanted)}.")
    if request.expert_set is not None:
        for name, default in _NOT_WITH_EXPERT_SET.items():
            if getattr(request, name) != default:
                raise UsageError(f"--expert-set goes without {_typed(name)}.")
    if request.weights is not None and request.layers is not None:
        raise UsageError("--layer goes with a checkpoint, not with --weights.")


def _check_plot(request: CellsRequest) -> None:
    """Raises UsageError for a picture that could not be drawn or written in the end."""
    if request.plot is None:
        return
    for name in bounds_of(request):
        raise UsageError(
            f"--plot draws the whole slice, not what {name} leaves of it.",
            "frame=R, from Python, is half the side of what is drawn.",
        )
    check_picture(request.plot, request.picture)


def parse_view(text: str) -> tuple[str, int | None]:
    """``expert:E`` as the view and its expert; others stay as they are, for the renderer to name.

    Raises UsageError for an expert that is no number.
    """
    view, colon, expert = text.partition(":")
    if not colon:
        return text, None
    if not expert.isdecimal():
        raise UsageError(f"--view {text}: expected a number of an expert, as in {view}:3.")
    return view, int(expert)


def matrix_router(path: Path, top_k: int) -> Router:
    """A router of the arrays ``weight`` (experts, dims) and ``bias`` (experts, may be left out).

    Raises RecordingError for a file that is none and RouterError for arrays that do not fit.
    """
    arrays = _arrays(path)
    weight = arrays["weight"]
    bias = arrays.get("bias")
    if weight.ndim != 2 or 0 in weight.shape:
        raise RouterError(
            f"{path.name}: weight has the shape {weight.shape}; expected (experts, dims)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RouterError(
            f"{path.name}: bias has the shape {bias.shape}; expected ({len(weight)},)."
        )
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise RouterError(f"{path.name}: {name} holds numbers that are not finite.")
    if not 1 <= top_k <= len(weight):
        raise UsageError(f"--top-k {top_k}: expected 1 to {len(weight)}, the number of experts.")
    return Router(
        name=path.stem,
        stack="",
        layer=0,
        weight=weight,
        rule=Rule(top_k, "identity", Weights("scores"), has_logit_bias=bias is not None),
        provenance=Provenance("matrix", ("weight",), path.name, str(weight.dtype)),
        logit_bias=bias,
    )


def read_named(path: Path, how: str) -> dict[str, np.ndarray]:
    """The arrays of an npz file; ``how`` to write one is the hint where another file is there.

    Raises RecordingError for a file that is none.
    """
    try:
        return read_numbers(path)
    except RecordingError as error:
        hint = how if path.is_file() else ""
        raise RecordingError(error.message, error.hint or hint) from None


def _arrays(path: Path) -> dict[str, np.ndarray]:
    how = "numpy.savez writes one: weight=W (experts, dims) and bias=b (experts)."
    found = read_named(path, how)
    if "weight" not in found:
        raise RouterError(
            f"{path.name}: holds {', '.join(found) or 'nothing'}; expected weight.", how
        )
    for name in ("weight", "bias"):
        whole = name in found and found[name].dtype.kind in "iu"
        if whole and ((found[name] > 2**53) | (found[name] < -(2**53))).any():
            raise RouterError(
                f"{path.name}: {name} holds integers that float64 does not tell apart.",
                "Store it as float64: cells are exact for the numbers that are read.",
            )
    return {name: found[name].astype(np.float64) for name in ("weight", "bias") if name in found}
