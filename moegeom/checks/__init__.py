"""Results to findings and verdicts: one file per check."""

from moegeom.checks.check import CHECKS, Check, Limit, Tested, Unknown
from moegeom.checks.measured import NO_CHECKPOINT, NO_NAME, Measured, measured_results
from moegeom.checks.run import judge, run_checks, verdicts_of

__all__ = [
    "CHECKS",
    "NO_CHECKPOINT",
    "NO_NAME",
    "Check",
    "Limit",
    "Measured",
    "Tested",
    "Unknown",
    "judge",
    "measured_results",
    "run_checks",
    "verdicts_of",
]
