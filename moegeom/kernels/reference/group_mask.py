"""Group-limited selection."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from moegeom.core.router import GroupMask
from moegeom.geometry.selection import mask


def group_mask(
    selection: Float64[np.ndarray, "tokens experts"], groups: GroupMask
) -> tuple[Float64[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"]]:
    """Masked selection scores and the group margin; see :mod:`moegeom.geometry.selection.mask`."""
    return mask.group_mask(selection, groups), mask.group_margin(selection, groups)
