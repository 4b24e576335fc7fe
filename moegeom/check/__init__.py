"""Results to findings and verdicts: one file per check."""

from moegeom.check._check import CHECKS, Check, Limit, Tested, Unknown
from moegeom.check._judge import judge
from moegeom.check._measured import NO_NAME, Measured, measured_results, measured_rows
from moegeom.check._run import run_checks

__all__ = [
    "CHECKS",
    "NO_NAME",
    "Check",
    "Limit",
    "Measured",
    "Tested",
    "Unknown",
    "judge",
    "measured_results",
    "measured_rows",
    "run_checks",
]
