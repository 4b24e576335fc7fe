"""Multi-head attention written as a hierarchical mixture of experts."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.hmoe.mixture import Mixture


def mixture_of_attention(
    query: Float64[np.ndarray, "heads width keys"],
    key: Float64[np.ndarray, "heads width keys"],
    value: Float64[np.ndarray, "heads width channels"],
    output: Float64[np.ndarray, "heads channels width"],
    tokens: int,
    row: int,
    column: int,
) -> Mixture:
    r"""One entry of the output of attention as a mixture in all its tokens, one after the other.

    x is the vector of the rows of the N tokens, :math:`J_i` takes token i out of it,
    :math:`P_h = W_Q W_K^\top / \sqrt{d_k}`. Entry (i, i') of the output is the regression function
    with :math:`M_{hj} = \text{sym}(J_i^\top P_h J_j)`, :math:`a_{hjk} = J_j^\top W_V e_k` and
    :math:`\omega_{hk} = (W_O)_{ki'}`. The quadratic form is that of the symmetric part. An
    activation behind the values, or around what attention gives before the output matrix, is the
    regression function with the position ``value`` or ``sdpa``. A sigmoid of the input that
    multiplies, as in released models, is neither: ``gate_per_head``, ``gate_per_channel``.

    Source: S2 section 2; docs/theory.md C1. Oracle in tests: torch's multi-head attention.
    """
    heads, width, _ = query.shape
    product = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[2])
    scores = np.zeros((heads, tokens, tokens, width, tokens, width))
    experts = np.zeros((heads, tokens, value.shape[2], tokens, width))
    for other in range(tokens):
        scores[:, other, row, :, other, :] = product
        experts[:, other, :, other] = value.transpose(0, 2, 1)
    scores = scores.reshape(heads, tokens, tokens * width, tokens * width)
    return Mixture(
        output[:, :, column],
        (scores + scores.transpose(0, 1, 3, 2)) / 2.0,
        experts.reshape(heads, tokens, -1, tokens * width),
    )
