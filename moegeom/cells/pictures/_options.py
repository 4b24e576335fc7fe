"""What can be asked of a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moegeom.core.errors import UsageError
from moegeom.core.registry import unknown_name

#: Widths of one and of two columns in most journals, in millimetres.
ONE_COLUMN, TWO_COLUMNS = 89.0, 183.0

#: Narrowest and widest page, in millimetres.
_WIDTHS = (60.0, 600.0)


@dataclass(frozen=True)
class PictureOptions:
    """``width`` is in millimetres, ``band`` half the width of the shaded strip along walls, in
    units of the plane; ``expert`` is the one of the view "expert"; ``dpi`` counts where pixels do.
    """

    view: Literal["cells", "expert", "tropical"] = "cells"
    expert: int | None = None
    band: float | None = None
    width: float = ONE_COLUMN
    with_caption: bool = False
    dpi: int = 300


def picture_options(given: Mapping[str, Any]) -> PictureOptions:
    """The options by name. Raises UsageError for an unknown name and for a value out of range."""
    known = [field.name for field in dataclasses.fields(PictureOptions)]
    for name in given:
        if name not in known:
            raise unknown_name("option of a picture", name, known)
    options = PictureOptions(**given)
    if not _WIDTHS[0] <= options.width <= _WIDTHS[1]:
        raise UsageError(
            f"A picture of {options.width:g} mm was asked for, {_WIDTHS[0]:g} to {_WIDTHS[1]:g} mm "
            "are possible.",
            f"One column is {ONE_COLUMN:g} mm, two are {TWO_COLUMNS:g} mm.",
        )
    if options.band is not None and not (math.isfinite(options.band) and options.band >= 0):
        raise UsageError(
            f"Band {options.band} of a picture: half a width, 0 or more, was expected.",
            "It is in units of the plane, as on its axes.",
        )
    if not 30 <= options.dpi <= 2400:
        raise UsageError(
            f"A picture of {options.dpi} dots per inch was asked for, 30 to 2400 are possible.",
            "Journals want 300 for photographs, 600 to 1200 for lines; SVG and PDF need none.",
        )
    return options


def asked_expert(options: PictureOptions, num_experts: int) -> int:
    """The expert of the view "expert". Raises UsageError where it is none or not one of these."""
    if options.expert is None or not 0 <= options.expert < num_experts:
        found = "no expert" if options.expert is None else f"expert {options.expert}"
        raise UsageError(
            f"The view 'expert' was asked for with {found} of {num_experts}.",
            f"Name one: expert = 0 to {num_experts - 1}.",
        )
    return options.expert
