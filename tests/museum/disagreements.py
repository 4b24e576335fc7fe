"""Every disagreement, in the order of the page."""

from __future__ import annotations

from tests.museum import disagreements_elsewhere, disagreements_of_biases, disagreements_of_weights

DISAGREEMENTS = (
    *disagreements_of_weights.DISAGREEMENTS,
    *disagreements_of_biases.DISAGREEMENTS,
    *disagreements_elsewhere.DISAGREEMENTS,
)
