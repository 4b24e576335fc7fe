"""Batches of tokens as reductions get them."""

from typing import Any

import numpy as np

from moegeom.kernels.batch import TokenBatch


def batch_of(tokens: int, **quantities: Any) -> TokenBatch:
    """The first tokens of a stream, in one block and one population unless these are given."""
    zeros = np.zeros(tokens, np.int32)
    usual = {"token": np.arange(tokens), "population": zeros, "block": zeros}
    return TokenBatch(**({**usual, "chosen": zeros[:, None]} | quantities))
