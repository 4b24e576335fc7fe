"""Maps of single logits that come before the score."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from moegeom.core.router import LogitMap


def mapped_logits(
    logits: Float[np.ndarray, "*shape"], logit_map: LogitMap | None
) -> Float[np.ndarray, "*shape"]:
    r"""Logits behind the map, :math:`c \tanh(m z / c)`, or :math:`m z` without a cap.

    The logits themselves when there is no map, else float64. Increasing in z, with slope at most m.
    Source: transformers 5.23.0 modeling_laguna.py (cap), modeling_muse_spark.py (multiplier).
    """
    if logit_map is None:
        return logits
    scaled = logits.astype(np.float64) * logit_map.multiplier
    if np.isinf(logit_map.soft_cap):
        return scaled
    return logit_map.soft_cap * np.tanh(scaled / logit_map.soft_cap)
