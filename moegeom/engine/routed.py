"""What a device hands to the threads of the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32

from moegeom.core.tokens import TokenColumns


@dataclass(frozen=True, eq=False)
class Routed:
    """What a device has found out about the tokens of a range; None where it was not asked.

    ``values`` are the router inputs in the dtype that they are stored in, in memory that the next
    batch will be read into; ``is_lost`` marks tokens
    with a logit that is not finite, of which the rest means nothing.
    """

    columns: TokenColumns
    logits: Float[np.ndarray, "tokens experts"]
    is_lost: Bool[np.ndarray, "tokens"]
    chosen: Int32[np.ndarray, "tokens k"]
    margin: Float64[np.ndarray, "tokens"]
    group_margin: Float64[np.ndarray, "tokens"] | None = None
    distance: Float64[np.ndarray, "tokens"] | None = None
    pair: Int32[np.ndarray, "tokens 2"] | None = None
    norm: Float64[np.ndarray, "tokens"] | None = None
    values: Float[np.ndarray, "tokens hidden"] | None = None
