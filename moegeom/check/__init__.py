"""Results to findings: one file per check."""

from moegeom.check._check import CHECKS, Check, measured_rows, run_checks
from moegeom.check._judge import judge

__all__ = ["CHECKS", "Check", "judge", "measured_rows", "run_checks"]
