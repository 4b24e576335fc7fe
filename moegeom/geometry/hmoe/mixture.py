"""Parameters of a hierarchical mixture of experts: heads, experts of a head, channels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float64


@dataclass(frozen=True, eq=False)
class Mixture:
    """Output weights, symmetric matrices of the scores, expert vectors; rows of gates, if any.

    Of attention, ``weights`` are entries of the output matrix, ``scores`` come from queries and
    keys and ``experts`` from the values; a gate has one row for each channel, or one for all
    channels of a head.
    """

    weights: Float64[np.ndarray, "heads channels"]
    scores: Float64[np.ndarray, "heads experts dims dims"]
    experts: Float64[np.ndarray, "heads experts channels dims"]
    gates: Float64[np.ndarray, "heads gates dims"] | None = None

    @property
    def num_channels(self) -> int:
        """Channels of a head."""
        return self.weights.shape[1]

    def moved(self, direction: Mixture, step: float) -> Mixture:
        """All parameters but the gates, ``step`` times ``direction`` further on."""
        return dataclasses.replace(
            self,
            weights=self.weights + step * direction.weights,
            scores=self.scores + step * direction.scores,
            experts=self.experts + step * direction.experts,
        )

    def norm_squared(self) -> float:
        """Sum of the squares of all parameters but those of gates."""
        parts = (self.weights, self.scores, self.experts)
        return float(sum(np.vdot(part, part) for part in parts))


def published_truth() -> Mixture:
    """The parameters that the experiment of S2 recovers: 2 heads, experts, channels, dimensions.

    Source: S2 appendix D and its Table 2; docs/theory.md C6.
    """
    return Mixture(
        np.array([[1.0, 0.5], [0.8, 0.3]]),
        np.array(
            [
                [[[2.0, 0.0], [0.0, 0.5]], [[0.5, 0.0], [0.0, 2.0]]],
                [[[1.5, 0.2], [0.2, 0.3]], [[0.3, -0.1], [-0.1, 1.2]]],
            ]
        ),
        np.array(
            [
                [[[1.0, -0.5], [0.5, 0.8]], [[-1.0, 0.8], [0.2, -0.3]]],
                [[[0.6, 0.4], [-0.2, 0.5]], [[-0.7, -0.2], [0.3, -0.4]]],
            ]
        ),
    )


def centred(mixture: Mixture) -> Mixture:
    r"""The same function with scores that add up to 0: :math:`M_{hi} - \frac1N \sum_j M_{hj}`.

    A softmax does not see what is added to all scores of a head; without this a loss between
    parameters measures it (F-21). One expert has the matrix 0. Source: S2 assumption (A.3), which
    sets the last matrix to 0 instead; docs/theory.md C2.
    Oracle in tests: the regression function, which stays.
    """
    mean = mixture.scores.mean(axis=1, keepdims=True)
    return dataclasses.replace(mixture, scores=mixture.scores - mean)


def with_channels(mixture: Mixture, channels: int) -> Mixture:
    """The same function with more channels: copies of the first ones, weights split evenly.

    Raises
    ------
    UsageError
        For fewer channels than there are.

    Oracle in tests: the regression function, which stays.
    """
    own = mixture.num_channels
    if channels < own:
        raise UsageError(f"{channels} channels: expected {own} or more, those of the truth.")
    source = np.arange(channels) % own
    weights = mixture.weights[:, source] / np.bincount(source)[source]
    return dataclasses.replace(mixture, weights=weights, experts=mixture.experts[:, :, source])


def split(mixture: Mixture, shift: Float64[np.ndarray, "dims"]) -> Mixture:
    r"""The first channel of every head as two of half its weight, their experts ``shift`` apart
    on either side.

    Without an activation the function stays, however long the shift: attention cannot tell channels
    apart. With one behind the values or around the mixture it moves by
    :math:`O(\lVert\text{shift}\rVert^2)`, which is why over-specified parameters are estimated
    at half the rate. Source: S2 equation (19); docs/theory.md C4.
    Oracle in tests: the regression functions by torch.
    """
    first = mixture.experts[:, :, :1]
    half = mixture.weights[:, :1] / 2.0
    return dataclasses.replace(
        mixture,
        weights=np.concatenate([half, half, mixture.weights[:, 1:]], axis=1),
        experts=np.concatenate([first + shift, first - shift, mixture.experts[:, :, 1:]], axis=2),
    )
