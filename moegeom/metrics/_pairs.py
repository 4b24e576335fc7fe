"""The most frequent pairs of a table of counts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64


def most_frequent(counts: Int64[np.ndarray, "experts experts"], most: int) -> dict[str, np.ndarray]:
    """At most ``most`` pairs: ``expert_out``, ``expert_in``, ``num_tokens`` and ``share``.

    Pairs without a token are left out; the lower pair comes first among equals. The share is of
    all counts.
    """
    flat = counts.reshape(-1)
    top = np.argsort(-flat, kind="stable")[:most]
    top = top[flat[top] > 0]
    out, into = np.divmod(top, len(counts))
    share = flat[top] / max(int(flat.sum()), 1)
    return {"expert_out": out, "expert_in": into, "num_tokens": flat[top], "share": share}
