"""Why two runs choose differently: the record, its closed list of verdicts, its reporters."""

from moegeom.studies.explain.screen._explanation import (
    EXPLANATION_REPORTERS,
    VERDICTS,
    Cause,
    Explanation,
    FlipNoise,
    LayerEvidence,
    LogProbs,
    Tried,
    Verdict,
    WeightRule,
    num_hypotheses,
)

__all__ = [
    "EXPLANATION_REPORTERS",
    "VERDICTS",
    "Cause",
    "Explanation",
    "FlipNoise",
    "LayerEvidence",
    "LogProbs",
    "Tried",
    "Verdict",
    "WeightRule",
    "num_hypotheses",
]
