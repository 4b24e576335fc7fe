"""Documents of several domains: Zipf tokens that depend on the tokens before them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

#: Share of tokens that follow from the one before, and of those that repeat it.
_FOLLOWS, _REPEATS = 0.3, 0.08

#: Every document begins with the same few tokens, as chat templates do.
_TEMPLATE = 4

DOMAINS = ("web", "code", "maths", "dialogue")


@dataclass(frozen=True, eq=False)
class Text:
    """Documents side by side; behind the end of a document stands the padding token 0."""

    token_id: Int[np.ndarray, "documents length"]
    lengths: Int[np.ndarray, "documents"]
    domain: Int[np.ndarray, "documents"]

    @property
    def is_token(self) -> Bool[np.ndarray, "documents length"]:
        return np.arange(self.token_id.shape[1]) < self.lengths[:, None]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def position(self) -> Int[np.ndarray, "documents length"]:
        return np.broadcast_to(np.arange(self.token_id.shape[1]), self.token_id.shape)

    @property
    def index(self) -> Int[np.ndarray, "documents length"]:
        """The number of each token when documents follow one another; -1 for padding."""
        there = self.is_token
        index = np.full(there.shape, -1)
        index[there] = np.arange(self.num_tokens)
        return index


def draw_text(rng: np.random.Generator, documents: int, length: int, vocabulary: int) -> Text:
    """Documents of 0.6 to 1 times ``length``; domains have Zipf laws and followers of their own."""
    domain = rng.integers(len(DOMAINS), size=documents)
    ranks = np.arange(1, vocabulary)
    cumulated = np.cumsum(1.0 / ranks**1.1)
    order = np.stack([rng.permutation(ranks) for _ in DOMAINS])
    follower = np.stack([rng.permutation(ranks) for _ in DOMAINS])
    drawn = np.searchsorted(cumulated, rng.random((documents, length)) * cumulated[-1])
    token = order[domain[:, None], np.minimum(drawn, vocabulary - 2)]
    kind = rng.random((documents, length))
    token[:, :_TEMPLATE] = rng.integers(1, vocabulary, size=_TEMPLATE)
    for at in range(_TEMPLATE, length):
        before = token[:, at - 1]
        follows, repeats = kind[:, at] < _FOLLOWS, kind[:, at] > 1.0 - _REPEATS
        token[:, at] = np.where(follows, follower[domain, before - 1], token[:, at])
        token[:, at] = np.where(repeats, before, token[:, at])
    lengths = rng.integers(int(0.6 * length), length + 1, size=documents)
    lengths[0] = length
    token[np.arange(length) >= lengths[:, None]] = 0
    return Text(token, lengths, domain)
